"""Pairwise designs: few rows in which every pair of values of any two factors occurs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = Mapping[str, Any]
Pair = tuple[str, Any, str, Any]


def is_possible(row: Row) -> bool:
    return True


def pairs_of(row: Row) -> Iterator[Pair]:
    """In the order of the row."""
    for (one, value), (other, second) in combinations(row.items(), 2):
        yield (one, value, other, second)


def pairwise(factors: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = is_possible) -> list[Row]:
    """Rows of all factors, greedily: each is, of all that are possible, the one with the most pairs not seen yet.

    What `possible` refuses does not occur, and pairs that occur in nothing else are left out.
    """
    candidates = [
        row for values in product(*factors.values()) if possible(row := dict(zip(factors, values, strict=True)))
    ]
    paired = [(row, set(pairs_of(row))) for row in candidates]
    missing = set().union(*(pairs for _, pairs in paired))
    rows: list[Row] = []
    while missing:
        row, pairs = max(paired, key=lambda candidate: len(candidate[1] & missing))
        rows.append(row)
        missing -= pairs
    return rows
