"""What each field of a GGUF file's metadata may hold, so that a stranger's file is one sentence and never a traceback.

What a field's absence means is for its readers to say.
"""

from collections.abc import Callable, Mapping
from typing import Any

from model.config_fields import MOST_CHANNELS, is_count, shown
from model.formats.gguf.names import ROPE_SCALING
from model.text.gguf_tokenizer import GGUFError

TOKENS, TYPES, SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores"))
COUNTS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "rope.dimension_count"),
    *("attention.head_count", "attention.key_length"),
)
"""Fields that begin with the architecture's name."""


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises GGUFError for the first field that holds something else than its kind."""
    for name, (what, fits) in _KINDS.items():
        if name in metadata and not fits(metadata[name]):
            raise GGUFError(f"{name} is {shown(metadata[name])}; it must be {what}.")
    family = metadata.get("general.architecture")
    for name in (f"{family}.{count}" for count in COUNTS):
        if name in metadata and not is_count(metadata[name], 1 << 31):
            raise GGUFError(f"{name} is {shown(metadata[name])}; it must be a positive whole number.")
    if TOKENS in metadata:
        _check_tokens(metadata, len(metadata[TOKENS]))


def _check_tokens(metadata: Mapping[str, Any], num_tokens: int) -> None:
    for name in (TYPES, SCORES):
        if name in metadata and len(metadata[name]) != num_tokens:
            raise GGUFError(f"{name} has {len(metadata[name])} entries for {num_tokens} tokens.")
    for name, value in metadata.items():
        is_token = name.startswith("tokenizer.ggml.") and name.endswith("_token_id")
        if is_token and not (value == 0 or is_count(value, num_tokens - 1)):
            raise GGUFError(f"{name} is {shown(value)}; it must be one of {num_tokens} tokens.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are(*kinds: type) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= MOST_CHANNELS and all(isinstance(one, kinds) for one in value)

    return fits


_TEXT, _TEXTS, _NUMBERS = ("text", _is_text), ("a list of texts", _are(str)), ("a list of numbers", _are(int, float))
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "general.architecture": _TEXT,
    "tokenizer.ggml.model": _TEXT,
    "tokenizer.ggml.pre": _TEXT,
    "tokenizer.chat_template": _TEXT,
    ROPE_SCALING: _TEXT,
    TOKENS: _TEXTS,
    "tokenizer.ggml.merges": _TEXTS,
    TYPES: _NUMBERS,
    SCORES: _NUMBERS,
}
