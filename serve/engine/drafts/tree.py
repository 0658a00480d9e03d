"""What a draft proposes for one sequence."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens behind a sequence's last one; they are in the feed (batch_state.py). Today all trees are chains."""

    num_tokens: int = 0
    """As many as the target looks at."""
    count: Tensor | None = None
    """Int32 without dimensions: how many of them are meant, where the host does not know; None: all."""
    distributions: list[Tensor] = field(default_factory=list)
    """`[V]` fp32 each, what each token was drawn from; empty: verify by matching."""


NO_DRAFT = DraftTree()
