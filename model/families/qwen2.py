"""Qwen2: biases on q, k and v alone; layers from some on may have a sliding window."""

from typing import Any

from model.families.base import Family, Raw, layer_type_fields, windows_of_layer_types

FIRST_WINDOW = 28
"""The default of `max_window_layers`, also in Qwen3."""


def _read(raw: Raw) -> dict[str, Any]:
    windows = windows_of_layer_types(raw, first=raw.get("max_window_layers", FIRST_WINDOW))
    return {"windows": windows, "qkv_bias": True, "output_bias": False}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read, layer_type_fields)
