"""Which tokens may come next: the way in for grammars and schemas, and what a request itself says by lists of words.

A mask is a function of a sequence's output alone, so preemption, forks and the roll-back of draft tokens concern nobody
but the mask, which may remember what it likes. It holds in the target's distribution and in the draft's, for each row
after the draft tokens before that row; so with draft tokens the output is distributed as without.

The host must know a token before it can say what may follow: while a request with a mask runs, each step is read before
the next is launched, and draft tokens are read between two passes of the draft. Without masks nothing here is entered.

V vocabulary, M rows with a mask.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class TokenMask(Protocol):
    """What may follow; `Engine.set_token_mask` gives one to a request."""

    def allowed(self, output: SequenceOf[int]) -> np.ndarray:
        """`[V]` bool: which tokens may follow these output tokens, all allowed ones; at least one must be."""


class WordMask:
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


class BothMasks:
    """What both masks allow; where they allow nothing in common, what the second does."""

    def __init__(self, first: TokenMask, second: TokenMask) -> None:
        self._first, self._second = first, second

    def allowed(self, output: SequenceOf[int]) -> np.ndarray:
        second = self._second.allowed(output)
        both = self._first.allowed(output) & second
        return both if both.any() else second


def allowed_tokens(mask: TokenMask, output: SequenceOf[int], drafted: SequenceOf[int]) -> np.ndarray:
    """`[V]` bool: what may follow the output and draft tokens; everything behind a token that was not allowed.

    Such a token is never accepted, so nobody looks at what is behind it, and the mask is not asked.
    """
    allowed = mask.allowed(output)
    for number, token in enumerate(drafted, 1):
        if not allowed[token]:
            return np.ones_like(allowed)
        allowed = mask.allowed([*output, *drafted[:number]])
    return allowed


def forbid(scores: Tensor, rows: list[int], allowed: list[np.ndarray]) -> Tensor:
    """`scores [N, V]` with minus infinity for what is not allowed, `[V]` bool for each of `rows`; others unchanged."""
    index = torch.tensor(rows, device=scores.device)
    masks = torch.from_numpy(np.stack(allowed)).to(scores.device)
    return scores.index_copy(0, index, scores.index_select(0, index).masked_fill(~masks, -torch.inf))
