"""What Gemma 2 and 3 have in common: four norms a layer with weights around 0, GeGLU, scaled embeddings, windows."""

import math
from typing import Any

from model.config_fields import ConfigError
from model.families.base import Fields, Raw, layer_type_fields, windows_of_layer_types

ACTIVATION = "gelu_pytorch_tanh"
NORM_OFFSET = 1.0
_WINDOW, _SCALAR = 4096, 256
"""What files that leave them out mean."""


def read_gemma(raw: Raw, family: str, *, pattern: int, unsupported: tuple[str, ...]) -> dict[str, Any]:
    """Their fields; without `layer_types` every layer but each `pattern`-th has a window."""
    for name in unsupported:
        if raw.get(name):
            raise ConfigError(f"config.json sets {name}, which is not supported in {family} models.")
    layers = range(1, raw["num_hidden_layers"] + 1)
    kinds = raw.get("layer_types") or ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]
    window = raw.get("sliding_window", _WINDOW)
    if window is None and "sliding_attention" in kinds:
        raise ConfigError(f"config.json has no sliding_window, which {family} models need.")
    return {
        "windows": windows_of_layer_types({**raw, "sliding_window": window, "layer_types": kinds}),
        "embedding_multiplier": math.sqrt(raw["hidden_size"]),
        "attention_scale": (raw.get("query_pre_attn_scalar") or _SCALAR) ** -0.5,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def write_gemma(fields: Fields) -> dict[str, Any]:
    """To be read back by `read_gemma`."""
    return layer_type_fields(fields) | {
        "hidden_act": ACTIVATION,
        "hidden_activation": ACTIVATION,
        "attention_bias": fields["qkv_bias"],
        "query_pre_attn_scalar": round(fields["attention_scale"] ** -2),
    }
