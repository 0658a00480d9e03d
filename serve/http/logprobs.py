"""From the engine's log-probabilities to OpenAI's two shapes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from model.text.detokenizer import StreamDecoder
from serve.http.responses import ChatLogprobs, LegacyLogprobs, TokenLogprob, TopLogprob
from serve.outputs import TokenLogprobs

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot hold; vLLM writes the same."""


def token_text(tokenizer: "Tokenizer", token_id: int) -> str:
    """A token as text; bytes that are no character by themselves show as U+FFFD."""
    return tokenizer.token_bytes()[token_id].decode("utf-8", "replace")


def chat_logprobs(
    tokenizer: "Tokenizer", positions: Sequence[TokenLogprobs], drafted: Sequence[bool] | None
) -> ChatLogprobs:
    """Entries for /v1/chat/completions; `drafted` is None on a server that does not speculate."""
    token_bytes = tokenizer.token_bytes()
    marks: Sequence[bool | UnsetType] = drafted if drafted is not None else [UNSET] * len(positions)

    def top(token_id: int, logprob: float) -> TopLogprob:
        spelled = token_bytes[token_id]
        return TopLogprob(spelled.decode("utf-8", "replace"), max(logprob, LOWEST), list(spelled))

    entries = []
    for position, mark in zip(positions, marks, strict=True):
        own = top(position.token_id, position.logprob)
        tops = [top(token_id, logprob) for token_id, logprob in position.top]
        entries.append(TokenLogprob(own.token, own.logprob, own.bytes, tops, mark))
    return ChatLogprobs(entries)


class LegacyLogprobsWriter:
    """The lists of /v1/completions for one choice, made piece by piece as its tokens arrive."""

    def __init__(self, tokenizer: "Tokenizer", *, continues: bool) -> None:
        """`continues`: the choice's text does not begin with the prompt."""
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, continues=continues)
        self._offset = 0

    def write(
        self,
        token_ids: Sequence[int],
        positions: Sequence[TokenLogprobs | None],
        drafted: Sequence[bool] | None = None,
    ) -> LegacyLogprobs:
        """The next tokens of the choice. A position without log-probabilities (the first of a prompt) is null."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push([token_id]))
        return LegacyLogprobs(
            tokens=[token_text(self._tokenizer, token_id) for token_id in token_ids],
            token_logprobs=[None if position is None else max(position.logprob, LOWEST) for position in positions],
            top_logprobs=[None if position is None else self._top(position) for position in positions],
            text_offset=offsets,
            drafted=UNSET if drafted is None else list(drafted),
        )

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """By text, best first. Two tokens may spell alike: the better one stays, so that the maximum is right.

        The token itself is always there, as OpenAI has it, even when it is not among the most probable.
        """
        result: dict[str, float] = {}
        for token_id, logprob in (*position.top, (position.token_id, position.logprob)):
            result.setdefault(token_text(self._tokenizer, token_id), max(logprob, LOWEST))
        return result


def join(pieces: Sequence[LegacyLogprobs]) -> LegacyLogprobs:
    """Consecutive pieces of one choice as one."""
    drafted = [piece.drafted for piece in pieces if not isinstance(piece.drafted, UnsetType)]
    return LegacyLogprobs(
        tokens=[token for piece in pieces for token in piece.tokens],
        token_logprobs=[logprob for piece in pieces for logprob in piece.token_logprobs],
        top_logprobs=[top for piece in pieces for top in piece.top_logprobs],
        text_offset=[offset for piece in pieces for offset in piece.text_offset],
        drafted=[mark for marks in drafted for mark in marks] if drafted else UNSET,
    )
