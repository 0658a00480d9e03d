"""A product of few rows as the C functions that compute it, for C that calls them (`_experts.c`).

Legend: T tokens, K input features, N output features.
"""

import ctypes
from typing import Any, NamedTuple

ANY_ROWS = 1 << 62


class CProduct(NamedTuple):
    """What multiplies rows in one dtype with one weight."""

    at: ctypes.Structure
    """The weight; what it points at is held by whoever prepared it."""
    shape: tuple[int, int]
    """N and K."""
    one: Any
    """For one row, None where `rounded` multiplies any; of the weight, x [T, K], from row to row, y [T, N], T, threads:
    0, or 1 without memory."""
    more: Any
    """For several."""
    most_rows: int
    """More of them are multiplied faster otherwise."""
    rounded: Any = None
    """`rounded_product` of `_rounded_cpu`."""
    most_rounded: int = 0
    """So many rows `rounded` multiplies."""
    round: Any = None
    """`rounded_rows` of `_rounded_cpu`, for rows that `one` and `more` multiply, if anything rounds them."""
    group: int = 0
    """Neighbours that are rounded together."""
