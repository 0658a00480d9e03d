"""What GGUF calls tensors, and how it stores their rows; as llama.cpp's converter has it."""

import re
from collections.abc import Sequence

from torch import Tensor

from model.families.base import Family, NormNames

GLOBAL_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
NORMS = NormNames("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
"""By their place in a layer."""
ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; they become `rope_scaling` in the configuration."""
LONGROPE_DIVISORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""By their names in `rope_scaling`: those of contexts as long as in the first training, and those of longer ones."""
ROPE_SCALING = "potstill.rope_scaling"
"""What the divisors were computed from, as JSON, which only we read: `LLAMA3_SCALING`'s numbers."""
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""That all releases of Llama 3 share; `factor` is theirs alone."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SHARED_GATE = ".shared_expert_gate.weight"


def gguf_name(name: str, family: Family) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`; one for a matrix of all experts of a layer."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", _EXPERT.sub(".experts.", module))
    if match is None:
        return f"{GLOBAL_TENSORS[module]}.{kind}"
    norms = {ours: theirs for ours, theirs in zip(family.norms, NORMS, strict=True) if ours and theirs}
    return f"blk.{match[1]}.{(LAYER_TENSORS | norms)[match[2]]}.{kind}"


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor belongs to, by Hugging Face's name; None for one of all tokens."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[1])


def is_router(name: str) -> bool:
    """Whether a tensor, by Hugging Face's name, weights experts; such are never quantized."""
    return name.endswith((".mlp.gate.weight", _SHARED_GATE))


def stored_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """That of `as_stored`, of a dense weight of so many rows and columns."""
    return tuple(shape[1:] if name.endswith(_SHARED_GATE) else shape)


def as_stored(weight: Tensor, name: str, family: Family, pair_size: int | None) -> Tensor:
    """A dense weight or its blocks [N, ...], by Hugging Face's name, as GGUF stores it.

    `pair_size`: features of a head where llama.cpp rotates neighbouring pairs, not the two halves; else None.
    """
    if pair_size is not None and is_rotated(name):
        return pairs_from_halves(weight, pair_size)
    if name.endswith(_SHARED_GATE):
        return weight[0]
    return weight.float() + family.norm_offset if family.norm_offset and is_norm(name) else weight


def as_in_model(stored: Tensor, name: str, family: Family, pair_size: int | None) -> Tensor:
    """The inverse of `as_stored`; of a norm's weight w to the bit where fp32 holds 1 + w."""
    if pair_size is not None and is_rotated(name):
        return halves_from_pairs(stored, pair_size)
    if name.endswith(_SHARED_GATE):
        return stored[None]
    return stored - family.norm_offset if family.norm_offset and is_norm(name) else stored


def is_norm(name: str) -> bool:
    """Whether a tensor, by Hugging Face's name, is the weight of a norm."""
    return name.endswith("norm.weight")


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
