"""How many rows over a vocabulary the CPU forms work on at a time."""


def rows_per_block(vocabulary: int) -> int:
    """Large temporaries cost page faults that dwarf the arithmetic; a few rows stay in the cache."""
    return max(4, 2**16 // vocabulary)
