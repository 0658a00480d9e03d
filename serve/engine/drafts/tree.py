"""What a draft is asked, and what it proposes for one sequence."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from serve.engine.requests import Sequence


class OtherWay(NamedTuple):
    """Another path from a sequence's last token, which parts from the first one somewhere."""

    tokens: tuple[int, ...]
    taken: float
    """Estimated probability that the target leaves the first path for it."""
    acceptance: float
    """And that each token behind that is accepted, if those before it were."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens behind a sequence's last one: a path, whose tokens are in the feed (batch_state.py), and others."""

    num_tokens: int = 0
    """As many as the target looks at."""
    is_counted: bool = False
    """Whether only the device knows how many of them are meant, in `BatchState.draft_counts`; else all are."""
    by_rejection: bool = False
    """Whether they are verified so, against what each was drawn from, in `BatchState.draft_p`; else by matching."""
    others: tuple[OtherWay, ...] = ()
    """Verified by matching, from where the target's own token behind the first path is the next of another."""


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


class Drafter(Protocol):
    """What is asked of a draft to choose how many of its tokens pay; `serve.engine.drafts.base.Draft` explains it."""

    runs_passes: bool
    first_tokens: int

    def at_hand(self, sequence: Sequence) -> AtHand | None: ...

    def num_missing(self, sequence: Sequence) -> int: ...


NO_DRAFT = DraftTree()
