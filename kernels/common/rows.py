"""How many rows over a vocabulary the CPU forms work on at a time."""

from torch import Tensor


def rows_per_block(vocabulary: int) -> int:
    """Large temporaries cost page faults that dwarf the arithmetic; a few rows stay in the cache."""
    return max(4, 2**16 // vocabulary)


def blocks_of_rows(chosen: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """Indices of the rows where `chosen` [N] is true, a block at a time; of none no block."""
    rows = chosen.nonzero()[:, 0]
    return rows.split(rows_per_block(vocabulary)) if len(rows) else ()
