"""What a draft proposes for one sequence."""

from dataclasses import dataclass
from typing import NamedTuple

from serve.engine.requests import Sequence


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens behind a sequence's last one; they are in the feed (batch_state.py). Today all trees are chains."""

    num_tokens: int = 0
    """As many as the target looks at."""
    is_counted: bool = False
    """Whether only the device knows how many of them are meant, in `BatchState.draft_counts`; else all are."""
    by_rejection: bool = False
    """Whether they are verified so, against what each was drawn from, in `BatchState.draft_p`; else by matching."""


class AtHand(NamedTuple):
    """A guess that takes no pass of a model."""

    num_tokens: int
    acceptance: float
    """Estimated probability that each is accepted, if those before it were."""


class Wanted(NamedTuple):
    """What a draft is asked for."""

    sequence: Sequence
    num_tokens: int
    """As many as there is room for, at least 1."""
    at_hand: bool
    """Whether what it has at hand is wanted, without a pass."""


NO_DRAFT = DraftTree()
