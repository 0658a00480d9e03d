"""Mistral: every layer may see only a sliding window of keys; no biases."""

from typing import Any

from model.families.base import Family, Fields, Raw, all_layers, one_window


def _read(raw: Raw) -> dict[str, Any]:
    return {"windows": all_layers(raw, raw.get("sliding_window"))}


def _write(fields: Fields) -> dict[str, Any]:
    return {"sliding_window": one_window(fields)}


MISTRAL = Family("mistral", "MistralForCausalLM", _read, _write)
