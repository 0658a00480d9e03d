"""Several sources in one data set, each with its weight: what comes when, as pure functions.

Weights count tokens. In an epoch of T tokens, as many as all sources hold together, source i with weight w_i / Σw gives
w_i / Σw · T of them. Each source is an endless stream: its pieces in one random order after another, all of them before
any comes again. Epoch e takes from the stream what begins between e and e + 1 times its part of T, and shuffles what it
takes from all streams; so every epoch follows from its number alone, and over any number of them the tokens of a source
are its part but for one piece.

Legend: D documents, P pieces, S sources.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Shuffle = Callable[[int, str, int], np.ndarray]
"""A permutation of that many numbers, by a name and the number of the pass."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Which documents are from which source."""

    parts: np.ndarray
    """[D] int32: the source of each document."""
    weights: np.ndarray
    """[S] float64."""


def document_order(lengths: Sequence[np.ndarray], weights: Sequence[float]) -> Iterator[tuple[int, int]]:
    """(source, document) so that any beginning holds the sources in their weights, as long as they last.

    `lengths`: tokens of the documents of each source, which keep their order.
    """
    ends = [np.cumsum(length) / weight for length, weight in zip(lengths, weights, strict=True)]
    source = np.repeat(np.arange(len(ends)), [len(end) for end in ends])
    number = np.concatenate([np.arange(len(end)) for end in ends])
    for at in np.argsort(np.concatenate(ends), kind="stable").tolist():
        yield int(source[at]), int(number[at])


def epoch_order(
    lengths: np.ndarray, sources: np.ndarray, weights: np.ndarray, *, epoch: int, shuffle: Shuffle
) -> np.ndarray:
    """The pieces of one epoch, in order; a piece may come several times.

    `lengths` and `sources` [P]: tokens of each piece and where it is from; `weights` [S].
    """
    present = np.unique(sources)
    total, weight = int(lengths.sum()), weights[present].sum()
    taken = []
    for source in present.tolist():
        numbers = np.flatnonzero(sources == source)
        share = weights[source] / weight * total
        taken.append(_between(numbers, lengths[numbers], share * epoch, share * (epoch + 1), str(source), shuffle))
    pieces = np.concatenate(taken)
    return pieces[shuffle(len(pieces), "", epoch)]


def _between(
    numbers: np.ndarray, lengths: np.ndarray, start: float, stop: float, name: str, shuffle: Shuffle
) -> np.ndarray:
    """Of an endless stream of these pieces those that begin from `start` to before `stop`, in tokens."""
    size = int(lengths.sum())
    found = [numbers[:0]]
    for again in range(int(start // size), int(stop // size) + 1):
        order = shuffle(len(numbers), name, again)
        begins = again * size + np.cumsum(lengths[order]) - lengths[order]
        found.append(numbers[order[(begins >= start) & (begins < stop)]])
    return np.concatenate(found)
