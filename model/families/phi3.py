"""Phi-3 and Phi-4: q, k, v in one matrix, gate and up in another; only part of a head may be rotated; LongRoPE."""

from typing import Any

from model.config_fields import ConfigError, shown
from model.families.base import Family, Fields, Raw, all_layers, one_window

_LONGROPE = ("longrope", "su", "yarn")
"""What files have called it."""


def _read(raw: Raw) -> dict[str, Any]:
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.pop("rope_theta", None)
    own, kind = rope.pop("partial_rotary_factor", None), rope.pop("rope_type", None) or rope.pop("type", None)
    factor, rope_scaling = own or raw.get("partial_rotary_factor") or 1.0, None
    if kind in _LONGROPE:
        length = rope.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
        rope_scaling = rope | {"rope_type": "longrope", "original_max_position_embeddings": length}
    elif kind not in (None, "default"):
        raise ConfigError(f"config.json has the rope type {shown(kind)}; phi3 models have default or longrope.")
    return {
        "windows": all_layers(raw, raw.get("sliding_window")),
        "rotary_factor": float(factor),
        "rope_scaling": rope_scaling,
    }


def _write(fields: Fields) -> dict[str, Any]:
    scaling = fields["rope_scaling"]
    own = {"rope_theta": fields["rope_theta"], "partial_rotary_factor": fields["rotary_factor"]}
    return {
        "sliding_window": one_window(fields),
        "partial_rotary_factor": fields["rotary_factor"],
        "rope_parameters": {"rope_type": "default", **(scaling or {}), **own},
    } | ({"original_max_position_embeddings": scaling["original_max_position_embeddings"]} if scaling else {})


PHI3 = Family("phi3", "Phi3ForCausalLM", _read, _write, joins_projections=True)
