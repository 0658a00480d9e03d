"""Which tokens may come next, said from outside: the way in for grammars, schemas and lists of words.

A mask is a function of a sequence's output alone, so preemption, forks and the roll-back of draft tokens concern nobody
but the mask, which may remember what it likes. It holds in the target's distribution and in the draft's, for each row
after the draft tokens before that row; so with draft tokens the output is distributed as without.

The host must know a token before it can say what may follow: while a request with a mask runs, each step is read before
the next is launched, and draft tokens are read between two passes of the draft. Without masks nothing here is entered.

V vocabulary, M rows with a mask.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class TokenMask(Protocol):
    """What may follow; `Engine.set_token_mask` gives one to a request."""

    def allowed(self, output: SequenceOf[int]) -> np.ndarray:
        """`[V]` bool: which tokens may follow these output tokens, all allowed ones; at least one must be."""


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
