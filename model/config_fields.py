"""What each field of a `config.json` may hold: a stranger's file is one clear sentence, never a traceback or a hang."""

import math
from collections.abc import Mapping
from typing import Any

MOST_LAYERS, MOST_HEADS, MOST_CHANNELS, MOST_POSITIONS = 4096, 1 << 16, 1 << 24, 1 << 31
"""Far above every model that exists; far below what takes minutes only to describe."""
SIZES = {
    "vocab_size": MOST_CHANNELS,
    "hidden_size": MOST_CHANNELS,
    "intermediate_size": MOST_CHANNELS,
    "num_hidden_layers": MOST_LAYERS,
    "num_attention_heads": MOST_HEADS,
    "head_dim": MOST_HEADS,
    "max_position_embeddings": MOST_POSITIONS,
    "original_max_position_embeddings": MOST_POSITIONS,
    "sliding_window": MOST_POSITIONS,
    "no_rope_layer_interval": MOST_LAYERS,
    "sliding_window_pattern": MOST_LAYERS,
}
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_ROTARY = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
POSITIVE = ("rms_norm_eps", "initializer_range", "query_pre_attn_scalar", *_ROTARY, *MULTIPLIERS, *SOFT_CAPS)
OBJECTS = ("rope_parameters", "rope_scaling", "mixture_of_depths", "quantization_config")
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_bidirectional_attention")
NAMES = ("model_type", "hidden_act", "hidden_activation")
LISTS = ("layer_types", "no_rope_layers")
_POSITIONS = ("max_position_embeddings", "original_max_position_embeddings")
_NULL_SIZES = ("head_dim", "sliding_window", "sliding_window_pattern", *_POSITIONS)
MAY_BE_NULL = {*_NULL_SIZES, *POSITIVE, *OBJECTS, *SWITCHES, *NAMES, *LISTS}


class ConfigError(ValueError):
    """A `config.json` that this version cannot serve faithfully; the sentence names the field."""


def check_fields(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first field that holds something else than its kind; what is absent is not looked at.

    Where lists must be as long as there are layers, whoever makes the configuration says so.
    """
    _check_kinds(raw)
    for name, most in SIZES.items():
        if name in raw and not (raw[name] is None and name in MAY_BE_NULL) and not is_count(raw[name], most):
            raise ConfigError(f"config.json has {name} {shown(raw[name])}; it must be a whole number from 1 to {most}.")
    if "num_key_value_heads" in raw:
        _check_kv_heads(raw["num_key_value_heads"])
    if "max_window_layers" in raw and not _is_whole(raw["max_window_layers"]):
        raise _wrong(raw, "max_window_layers", "a whole number")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        check_token_ids(name, raw.get(name))
    for name in POSITIVE:
        if raw.get(name) is not None and not is_positive(raw[name]):
            raise _wrong(raw, name, "a positive number")
    _check_rope(raw.get("rope_parameters") or raw.get("rope_scaling") or {})


def check_token_ids(name: str, value: Any, file: str = "config.json") -> None:
    """Raises ConfigError unless the value is a token id, a list of them, or nothing."""
    if value is not None and not all(map(_is_whole, value if isinstance(value, list) else [value])):
        raise ConfigError(f"{file} has {name} {shown(value)}; it must be a whole number or a list of them.")


def is_count(value: Any, most: int) -> bool:
    """A whole number from 1 to `most`; True and False are none."""
    return _is_whole(value) and 1 <= value <= most


def is_positive(value: Any) -> bool:
    """A finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value < 1e300 and math.isfinite(value)


def shown(value: Any) -> str:
    """A value in a sentence: one line, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_kinds(raw: Mapping[str, Any]) -> None:
    kinds: tuple[tuple[tuple[str, ...], type, str], ...] = (
        (OBJECTS, dict, "an object"),
        (SWITCHES, bool, "true or false"),
        (NAMES, str, "text"),
        (LISTS, list, "a list"),
    )
    for names, kind, what in kinds:
        for name in names:
            if raw.get(name) is not None and not isinstance(raw[name], kind):
                raise _wrong(raw, name, what)


def _check_kv_heads(value: Any) -> None:
    several = value if isinstance(value, list) and value else [value]
    if value is not None and not all(is_count(heads, MOST_HEADS) for heads in several):
        raise ConfigError(
            f"config.json has num_key_value_heads {shown(value)}; it must be a positive whole number, or one a layer."
        )


def _check_rope(rope: Mapping[str, Any]) -> None:
    for name, value in rope.items():
        if isinstance(value, dict):  # of one type of layers
            _check_rope(value)
            continue
        is_name = name in ("rope_type", "type")
        if value is not None and is_name and not isinstance(value, str):
            raise ConfigError(f"config.json has the rope's {name} {shown(value)}; it must be text.")
        if value is not None and not is_name and not isinstance(value, bool | list) and not is_positive(value):
            raise ConfigError(f"config.json has the rope's {name} {shown(value)}; it must be a positive number.")


def _wrong(raw: Mapping[str, Any], name: str, what: str) -> ConfigError:
    return ConfigError(f"config.json has {name} {shown(raw[name])}; it must be {what}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
