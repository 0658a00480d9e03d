"""How often a promise is tried: a few times in every run of the tests, in full with `--all-trials` (`make soak`)."""

in_full = False
"""Set by conftest.py before any test is imported."""


def trials(fast: int, full: int) -> int:
    return full if in_full else fast
