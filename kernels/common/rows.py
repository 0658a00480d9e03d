"""How many rows over a vocabulary the CPU forms work on at a time."""

ROWS_PER_BLOCK = 4
"""Large temporaries cost page faults that dwarf the arithmetic; a few rows stay in the cache."""
