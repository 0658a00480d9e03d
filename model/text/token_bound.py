"""A lower bound of how many tokens a text has, without tokenizing it.

    least(text) = ceil(sum of 2^-k(b) over the bytes b of the text),  2^k(b) ≥ length of the longest token that holds b

A token of n bytes has n terms of at most 1/n each, so it counts at most 1. That takes one pass over the bytes; English
text comes out at about an eighth of its tokens.
"""

import math
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any

LOSSLESS_SPLITS = {"ByteLevel", "Digits", "Metaspace", "Split"}
UNKNOWN = 255
"""Class of bytes without a token of their own: a tokenizer may drop them, so they count nothing."""


class TokenBound:
    """The bound for one tokenizer."""

    def __init__(self, tokens: Collection[bytes], *, composes: bool = False) -> None:
        """`tokens`: the bytes that each token stands for; `composes`: text is brought into NFC before it is split."""
        longest = [0] * 256
        for token in tokens:
            for byte in set(token):
                longest[byte] = max(longest[byte], len(token))
        alone = {token[0] for token in tokens if len(token) == 1}
        self._classes = bytes((longest[b] - 1).bit_length() if b in alone else UNKNOWN for b in range(256))
        self._composes = composes

    @classmethod
    def of(cls, tokenizer_json: Mapping[str, Any], tokens: Collection[bytes]) -> "TokenBound | None":
        """None unless all bytes of a text that have a token are in its tokens: no step drops or changes any."""
        changes, splits = _steps(tokenizer_json, "normalizer"), _steps(tokenizer_json, "pre_tokenizer")
        changed = [step for step in changes if step["type"] not in ("NFC", "Prepend") and not _marks_spaces(step)]
        removed = [step for step in splits if step["type"] not in LOSSLESS_SPLITS or step.get("behavior") == "Removed"]
        spells_bytes = tokenizer_json["model"].get("byte_fallback") or any(one["type"] == "ByteLevel" for one in splits)
        if changed or removed or not spells_bytes:
            return None
        return cls(tokens, composes=any(step["type"] == "NFC" for step in changes))

    def least(self, text: str) -> int:
        """A text has at least so many tokens."""
        composed = unicodedata.normalize("NFC", text) if self._composes else text
        classes = composed.encode().translate(self._classes)
        return math.ceil(sum(classes.count(k) * 2.0**-k for k in set(self._classes) - {UNKNOWN}))


def _steps(tokenizer_json: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    whole = tokenizer_json.get(part)
    if whole is None:
        return []
    return whole.get("normalizers", whole.get("pretokenizers", [whole]))


def _marks_spaces(step: Mapping[str, Any]) -> bool:
    """Whether a step of SentencePiece spells a space as "▁", which its tokens' bytes undo."""
    return step["type"] == "Replace" and (step["pattern"].get("String"), step["content"]) == (" ", "▁")
