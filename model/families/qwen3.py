"""Qwen3: an RMSNorm on each query and key head; windows as in Qwen2."""

from typing import Any

from model.families.base import Family, Fields, Raw, layer_type_fields, windows_of_layer_types
from model.families.qwen2 import FIRST_WINDOW


def _read(raw: Raw) -> dict[str, Any]:
    windows = windows_of_layer_types(raw, first=raw.get("max_window_layers", FIRST_WINDOW))
    return {"windows": windows, "qk_norm": True}


def _write(fields: Fields) -> dict[str, Any]:
    return layer_type_fields(fields) | {"attention_bias": fields["qkv_bias"]}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read, _write)
