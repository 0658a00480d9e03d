"""From token ids back to text, all at once or as they arrive.

Every token stands for a fixed sequence of bytes; text is those bytes, joined and read as UTF-8. That holds for
byte-level BPE and for SentencePiece models alike, takes linear time, and lets a stream wait exactly for the bytes of an
unfinished character and no longer.
"""

import codecs
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderError(ValueError):
    """A tokenizer whose decoding does not consist of joining bytes; the sentence names the step."""


@dataclass(frozen=True)
class DecodingRule:
    """How the spelling of a token becomes bytes, from the "decoder" of a tokenizer.json."""

    byte_level: bool
    """Each character of a spelling stands for one byte, as in GPT-2."""
    byte_tokens: bool
    """A token spelled "<0x0A>" is that byte."""
    replacements: tuple[tuple[str, str], ...]
    """Applied in order to all other tokens, such as "▁" by a space."""
    drops_first_space: bool
    """The text begins with a space that the tokenizer put there."""

    @classmethod
    def from_json(cls, decoder: dict[str, Any] | None) -> "DecodingRule":
        if not isinstance(decoder, dict | None):
            raise DecoderError(f"tokenizer.json has a decoder that is not supported: {decoder!r}.")
        steps = (decoder or {}).get("decoders") or ([decoder] if decoder else [])
        kinds = {step["type"]: step for step in steps}
        metaspace = kinds.get("Metaspace")
        replacements = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        if metaspace:
            replacements.append((metaspace["replacement"], " "))
        known = kinds.keys() <= {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
        strips = kinds.get("Strip")
        plain_strip = strips is None or (strips["content"], strips["start"], strips["stop"]) == (" ", 1, 0)
        if not steps or not known or not plain_strip:
            raise DecoderError(f"tokenizer.json has a decoder that is not supported: {decoder}.")
        return cls(
            byte_level="ByteLevel" in kinds,
            byte_tokens="ByteFallback" in kinds,
            replacements=tuple(replacements),
            drops_first_space=strips is not None or bool(metaspace and metaspace["prepend_scheme"] != "never"),
        )

    def bytes_of(self, spelling: str) -> bytes:
        if self.byte_level:
            # Added tokens are spelled plainly; one that has characters outside the alphabet is not encoded.
            codes = [BYTE_OF_CHARACTER.get(character) for character in spelling]
            return spelling.encode() if None in codes else bytes(code for code in codes if code is not None)
        if self.byte_tokens and (match := BYTE_TOKEN.fullmatch(spelling)):
            return bytes.fromhex(match.group(1))
        for old, new in self.replacements:
            spelling = spelling.replace(old, new)
        return spelling.encode()


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, worked out at first use. Ids without a token have none."""

    def __init__(
        self, spelling_of: Callable[[int], str | None], rule: DecodingRule, hidden: Iterable[int] = ()
    ) -> None:
        """`hidden` tokens have no bytes."""
        super().__init__(dict.fromkeys(hidden, b""))
        self._spelling_of, self._rule = spelling_of, rule

    def __missing__(self, token: int) -> bytes:
        spelling = self._spelling_of(token)
        found = b"" if spelling is None else self._rule.bytes_of(spelling)
        self[token] = found
        return found


class SpelledTokens(Protocol):
    """What a tokenizer says of its tokens."""

    drops_first_space: bool

    def token_bytes(self, *, skip_special_tokens: bool) -> TokenBytes: ...


class StreamDecoder:
    """Text from tokens as they arrive.

    The texts returned by `push`, joined, with `flush` at the end, equal `tokenizer.decode` of all ids. No character is
    ever split: bytes of an unfinished one wait for the next token. With `continues`, the ids go on from other text, so
    a space at their beginning is kept.
    """

    def __init__(
        self,
        tokenizer: SpelledTokens,
        *,
        skip_special_tokens: bool = True,
        shown_special_tokens: Iterable[int] = (),
        continues: bool = False,
    ) -> None:
        """`shown_special_tokens` are in the text even with `skip_special_tokens`."""
        self._token_bytes = tokenizer.token_bytes(skip_special_tokens=skip_special_tokens)
        spelled = tokenizer.token_bytes(skip_special_tokens=False)
        self._shown = {token: spelled[token] for token in shown_special_tokens}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drops_space = tokenizer.drops_first_space and not continues

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        spelled = [self._shown[token] if token in self._shown else self._token_bytes[token] for token in ids]
        return self._take(self._utf8.decode(b"".join(spelled)))

    def flush(self) -> str:
        """What is left when no more tokens come: a replacement character for an unfinished one, or nothing."""
        return self._take(self._utf8.decode(b"", final=True))

    def _take(self, text: str) -> str:
        if not self._drops_space or not text:
            return text
        self._drops_space = False
        return text.removeprefix(" ")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
