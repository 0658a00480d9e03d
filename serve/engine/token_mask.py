"""Which tokens may come next: the way in for grammars and schemas, and what a request itself says by lists of words.

A mask is a function of a sequence's output alone, so preemption, forks and the roll-back of draft tokens concern nobody
but the mask, which may remember what it likes. It holds in the target's distribution and in the draft's, for each row
after the draft tokens before that row; so with draft tokens the output is distributed as without.

The host must know a token before it can say what may follow: while a request with a mask runs, each step is read before
the next is launched, and draft tokens are read between two passes of the draft. Without masks nothing here is entered.

On its way to the scores a row of a mask is words of 32 bits, the lowest bit of the first for token 0.

V vocabulary, M rows with a mask, W words of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

WORD_BITS = 32


class TokenMask(ABC):
    """What may follow; `Engine.set_token_mask` gives one to a request."""

    @abstractmethod
    def fill(self, row: np.ndarray, output: SequenceOf[int], drafted: SequenceOf[int]) -> None:
        """Write into `row [W]` int32 which tokens may follow these output and draft tokens; at least one must.

        Behind a draft token that was not allowed it may be anything: nobody looks at what follows.
        """


class PlainMask(TokenMask):
    """A mask that is worked out anew for every row."""

    @abstractmethod
    def allowed(self, output: SequenceOf[int]) -> np.ndarray:
        """`[V]` bool: which tokens may follow these output tokens, all allowed ones; at least one must be."""

    def fill(self, row: np.ndarray, output: SequenceOf[int], drafted: SequenceOf[int]) -> None:
        allowed = self.allowed(output)
        for number, token in enumerate(drafted, 1):
            if not allowed[token]:
                row.fill(-1)
                return
            allowed = self.allowed([*output, *drafted[:number]])
        bits = np.packbits(allowed, bitorder="little")
        row.view(np.uint8)[: len(bits)] = bits


class WordMask(PlainMask):
    """`allowed_token_ids` and `bad_words` of a request: the last token of a word may not follow those before it.

    Where that would leave nothing, a bad word is written: some token must follow.
    """

    def __init__(
        self, allowed: np.ndarray, words: Iterable[SequenceOf[int]], *, min_tokens: int, ends: SequenceOf[int]
    ) -> None:
        """`allowed [V]` bool: what may be emitted at all; `words`: the bad ones, as tokens, in every spelling.

        The first `min_tokens` are none of the `ends`; ValueError when only those are allowed.
        """
        self._allowed, self._min_tokens = allowed, min_tokens
        self._early = allowed.copy()
        self._early[list(ends)] = False
        if min_tokens and not self._early.any():
            raise ValueError(f"min_tokens is {min_tokens}, but allowed_token_ids names only tokens that end the text")
        self._words = [(list(word[:-1]), word[-1]) for word in words]

    def allowed(self, output: SequenceOf[int]) -> np.ndarray:
        base = self._early if len(output) < self._min_tokens else self._allowed
        bad = [last for before, last in self._words if list(output[max(len(output) - len(before), 0) :]) == before]
        free = base.copy()
        free[bad] = False
        return free if free.any() else base


class BothMasks(TokenMask):
    """What both masks allow; where they allow nothing in common, what the second does."""

    def __init__(self, first: TokenMask, second: TokenMask) -> None:
        self._first, self._second = first, second

    def fill(self, row: np.ndarray, output: SequenceOf[int], drafted: SequenceOf[int]) -> None:
        other = np.zeros_like(row)
        self._first.fill(other, output, drafted)
        self._second.fill(row, output, drafted)
        if (row & other).any():
            row &= other


def forbid(scores: Tensor, rows: list[int], words: np.ndarray) -> Tensor:
    """`scores [N, V]` with minus infinity for what `words [M, W]` forbid in each of `rows`; other rows unchanged."""
    penalties = _penalties(words, scores)
    if len(rows) == len(scores):
        return scores + penalties
    index = torch.tensor(rows, device=scores.device)
    return scores.index_copy(0, index, scores.index_select(0, index) + penalties)


def _penalties(words: np.ndarray, scores: Tensor) -> Tensor:
    """`[M, V]`: 0 for what is allowed, else minus infinity; eight at a time, out of a table of all bytes."""
    octets = torch.from_numpy(words.view(np.uint8))
    if scores.is_cuda:
        octets = octets.pin_memory().to(scores.device, non_blocking=True)
    return F.embedding(octets.int(), _table(scores.dtype, scores.device)).flatten(1)[:, : scores.shape[1]]


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[256, 8]`: of each byte, its bits' penalties, the lowest first."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.zeros(256, 8, dtype=dtype).masked_fill(bits == 0, -torch.inf).to(device)
