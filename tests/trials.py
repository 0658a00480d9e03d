"""How often a promise is tried: a few times in every run of the tests, in full with `--all-trials` (`make soak`)."""

from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import Any, TypeVar

Row = TypeVar("Row")

in_full = False
"""Set by conftest.py before any test is imported."""


def trials(fast: int, full: int) -> int:
    return full if in_full else fast


def by_column(row: Iterable[object]) -> Iterable[Hashable]:
    return enumerate(map(repr, row))


def by_pairs(row: Iterable[object]) -> Iterable[Hashable]:
    return combinations(by_column(row), 2)


def covering(rows: Iterable[Row], values: Callable[[Any], Iterable[Hashable]] = by_column) -> list[Row]:
    """Few rows in which each value of any column occurs, greedily; with `--all-trials` all of them.

    What a value breaks shows in any row that has it, and most faults are of one value; those of two that meet, all rows
    find, or `by_pairs`. `values`: of a row, with their columns. Of rows with equally many new values that of the rarer
    others is next.
    """
    rows = list(rows)
    counts, taken = dict.fromkeys((value for row in rows for value in values(row)), 0), list[Row]()
    while not all(counts.values()):
        given = [[counts[value] for value in values(row)] for row in rows]
        best = max(range(len(rows)), key=lambda number: (given[number].count(0), -sum(given[number])))
        taken.append(rows[best])
        for value in values(rows[best]):
            counts[value] += 1
    return rows if in_full else taken
