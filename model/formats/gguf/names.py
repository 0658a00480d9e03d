"""What GGUF calls tensors and families of models, and how it orders rows; as llama.cpp's converter has it."""

import re

from torch import Tensor

from model.text.gguf_tokenizer import GGUFError

# Families whose q and k rows llama.cpp stores for rotation of neighbouring pairs, not of the two halves of a head.
INTERLEAVED_FAMILIES = ("llama", "smollm3")
SUPPORTED_FAMILIES = (*INTERLEAVED_FAMILIES, "qwen2", "qwen3")
GLOBAL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Divisors of the rotary frequencies; they become `rope_scaling` in the configuration.
ROPE_DIVISORS = "rope_freqs.weight"
_GGUF_PARTS = {ours: theirs for theirs, ours in (GLOBAL_TENSORS | LAYER_TENSORS).items()}


def hugging_face_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match:
        layer, part, kind = match.groups()
        if layer is None and part in GLOBAL_TENSORS:
            return f"{GLOBAL_TENSORS[part]}.{kind}"
        if layer is not None and part in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}"
    raise GGUFError(f"The GGUF file holds the unknown tensor {name}.")


def gguf_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    module, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
        return f"blk.{match[1]}.{_GGUF_PARTS[match[2]]}.{kind}"
    return f"{_GGUF_PARTS[module]}.{kind}"


def is_rotated(name: str) -> bool:
    """Whether the outputs of the layer that holds a tensor, by Hugging Face's name, are rotated."""
    return ".q_proj." in name or ".k_proj." in name


def halves_from_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from (0, d/2, 1, d/2 + 1, ...) back to (0, 1, 2, ...). `[heads * d, ...]`."""
    pairs = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def pairs_from_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from (0, 1, 2, ...) to (0, d/2, 1, d/2 + 1, ...). `[heads * d, ...]`."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
