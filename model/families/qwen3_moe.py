"""Qwen3 with experts in the layers that the file names; a window, where there is one, is every layer's."""

from typing import Any

from model.families.base import Family, Fields, Raw, all_layers, one_window
from model.families.qwen2_moe import qwen_expert_fields, qwen_experts


def _read(raw: Raw) -> dict[str, Any]:
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return {"windows": all_layers(raw, window), "qk_norm": True, "experts": qwen_experts(raw)}


def _write(fields: Fields) -> dict[str, Any]:
    window = one_window(fields)
    attention = {"use_sliding_window": window is not None, "sliding_window": window}
    return attention | qwen_expert_fields(fields) | {"attention_bias": fields["qkv_bias"]}


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read, _write)
