"""SmolLM3: every fourth layer, or those that the file names, has no rotary embedding; windows by layer; tied."""

from typing import Any

from model.families.base import Family, Fields, Raw, layer_type_fields, windows_of_layer_types
from model.families.llama import bias_fields


def _read(raw: Raw) -> dict[str, Any]:
    return {
        "windows": windows_of_layer_types(raw),
        "rope_layers": _rope_layers(raw),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _rope_layers(raw: Raw) -> tuple[bool, ...]:
    if raw.get("no_rope_layers"):
        return tuple(bool(rotates) for rotates in raw["no_rope_layers"])
    interval = raw.get("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(raw["num_hidden_layers"]))


def _write(fields: Fields) -> dict[str, Any]:
    no_rope_layers = [int(rotates) for rotates in fields["rope_layers"]]
    return layer_type_fields(fields) | bias_fields(fields) | {"no_rope_layers": no_rope_layers}


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read, _write)
