"""Gemma 3, text alone: four norms a layer with weights around 0, GeGLU, scaled embeddings; windowed layers have a
rotary base of their own."""

import math
from typing import Any

from model.config_fields import ConfigError
from model.families.base import NORMS_AROUND, Family, Fields, Raw, layer_type_fields, windows_of_layer_types

_PATTERN, _WINDOW, _GLOBAL_THETA, _LOCAL_THETA, _SCALAR = 6, 4096, 1e6, 1e4, 256
"""What files that leave them out mean: every sixth layer has no window."""
_UNKNOWN = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def _read(raw: Raw) -> dict[str, Any]:
    for name in _UNKNOWN:
        if raw.get(name):
            raise ConfigError(f"config.json sets {name}, which is not supported in gemma3_text models.")
    windows = windows_of_layer_types({"sliding_window": _WINDOW, "layer_types": _layer_types(raw)} | dict(raw))
    if raw.get("sliding_window", _WINDOW) is None:
        raise ConfigError("config.json has no sliding_window, which gemma3_text models need.")
    everywhere, local = _ropes(raw)
    kind = everywhere.pop("rope_type", None) or everywhere.pop("type", None) or "default"
    return {
        "windows": windows,
        "rope_theta": float(everywhere.pop("rope_theta", None) or raw.get("rope_theta") or _GLOBAL_THETA),
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **everywhere},
        "local_rope_theta": float(local.get("rope_theta") or raw.get("rope_local_base_freq") or _LOCAL_THETA),
        "embedding_multiplier": math.sqrt(raw["hidden_size"]),
        "attention_scale": (raw.get("query_pre_attn_scalar") or _SCALAR) ** -0.5,
        "qk_norm": True,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _layer_types(raw: Raw) -> list[str]:
    pattern = raw.get("sliding_window_pattern") or _PATTERN
    layers = range(1, raw["num_hidden_layers"] + 1)
    return ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]


def _ropes(raw: Raw) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of layers without and with a window; before transformers 5 the only block is of those without."""
    both = raw.get("rope_parameters") or {}
    everywhere = both.get("full_attention") or raw.get("rope_scaling") or {}
    return dict(everywhere), dict(both.get("sliding_attention") or {})


def _write(fields: Fields) -> dict[str, Any]:
    scaling = fields["rope_scaling"] or {}
    return layer_type_fields(fields) | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": fields["qkv_bias"],
        "query_pre_attn_scalar": round(fields["attention_scale"] ** -2),
        "rope_local_base_freq": fields["local_rope_theta"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **scaling, "rope_theta": fields["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": fields["local_rope_theta"]},
        },
    }


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read,
    _write,
    norms=NORMS_AROUND,
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
)
