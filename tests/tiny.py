"""Tiny models for tests: 2 layers, 64 wide, 512 tokens, built in milliseconds on a CPU."""

from typing import Any

import torch

from model.attention import PackedAttention
from model.config import ModelConfig
from model.experts_config import MixtureOfExperts
from model.transformer import Transformer

SPECIAL: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_scale": 0.1,
        "logit_divisor": 2.0,
    },
    "gemma2": {
        "embedding_multiplier": 8.0,
        "attention_scale": 0.2,
        "attention_soft_cap": 1.5,
        "logit_soft_cap": 4.0,
    },
    "gemma3_text": {
        "embedding_multiplier": 8.0,
        "attention_scale": 0.2,
        "local_rope_theta": 500.0,
        "qk_norm": True,
    },
    "phi3": {"rotary_factor": 0.5},
}
"""What a family has that others have not."""


def windows_of(family: str, num_layers: int) -> tuple[int | None, ...]:
    """In Mistral all layers have one, in Gemma every other."""
    windowed = {"mistral": (12,), "gemma2": (12, None), "gemma3_text": (12, None)}.get(family, (None,))
    return tuple(windowed[layer % len(windowed)] for layer in range(num_layers))


def experts_of(family: str, num_layers: int) -> MixtureOfExperts | None:
    """Mixtral has some in all layers, Qwen here in every layer but the first."""
    if family == "mixtral":
        return MixtureOfExperts(tuple(range(num_layers)), 4, 2, 160, normalizes=True)
    if not family.endswith("_moe"):
        return None
    shared = 64 if family == "qwen2_moe" else None
    return MixtureOfExperts(tuple(range(1, num_layers)), 5, 2, 96, family == "qwen3_moe", shared)


def tiny_config(family: str = "llama", **changes: Any) -> ModelConfig:
    """A small configuration of one family, with every feature of the family switched on."""
    num_layers = changes.get("num_layers", 2)
    changes = SPECIAL.get(family, {}) | changes
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_layers": num_layers,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "windows": windows_of(family, num_layers),
        "rope_layers": tuple(family != "smollm3" or layer % 2 == 0 for layer in range(num_layers)),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "qkv_bias": family in ("qwen2", "qwen2_moe"),
        "qk_norm": family in ("qwen3", "qwen3_moe", "olmo2"),
        "experts": experts_of(family, num_layers),
        "bos_token_id": 0,
        "eos_token_ids": (1,),
        # Wide enough that logits differ clearly from token to token.
        "initializer_range": 0.2,
    }
    return ModelConfig(**(fields | changes))


def tiny_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Transformer:
    """A tiny model with random weights, fp32, on the CPU."""
    model = Transformer(tiny_config(family, **changes))
    model.initialize(seed)
    return model.eval()


def full_logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """Logits `[T, V]` of one document, the plain way: the oracle for everything that caches or batches."""
    ids = torch.tensor(tokens)
    attention = PackedAttention(model.config, torch.tensor([0, len(tokens)], dtype=torch.int32))
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(len(tokens)), attention))
