"""The order in which pieces of documents are trained on: shuffled anew each epoch, a pure function of the seed. What an
epoch of several weighted sources is, `train.mixture` says.

The sampler counts micro-batches for all processes together: micro-batch g of a step goes to process g % world, so the
same data is seen in the same steps by any number of processes, and the position to save is one epoch and one index.
"""

import hashlib
from typing import Any

import numpy as np

from train.data import TokenizedDocuments
from train.mixture import epoch_order
from train.packing import Batch, cut, pack, plan_together

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def shuffled(count: int, *, seed: int | str, epoch: int) -> np.ndarray:
    """A permutation of `range(count)`, the same on every machine and with every numpy: sorted by a SplitMix64 hash."""
    return np.argsort(hashed_numbers(np.arange(count), f"{seed}:{epoch}"), kind="stable")


def hashed_numbers(numbers: np.ndarray, seed: str) -> np.ndarray:
    """Independent uniform uint64, one for each number from 0 on: SplitMix64 from where a hash of the seed begins."""
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(start & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Yields micro-batches for ever, epoch after epoch."""

    def __init__(
        self, documents: TokenizedDocuments, *, sequence_length: int, micro_batch_tokens: int, seed: int
    ) -> None:
        self.neighbours = 2 if documents.paired else 1
        if micro_batch_tokens < self.neighbours * sequence_length:
            times, what = ("twice the ", "a pair") if documents.paired else ("", "a sequence")
            raise ValueError(
                f"micro_batch_tokens ({micro_batch_tokens}) must be at least {times}sequence_length "
                f"({sequence_length}), since {what} is never split over micro-batches"
            )
        self.documents = documents
        self.pieces = cut(documents, sequence_length)
        if len(self.pieces) == 0:
            why = "every document is shorter than two tokens"
            if documents.paired:
                why = f"no pair has answers that begin within {sequence_length} tokens"
            raise ValueError(f"{documents.name} has no token to predict: {why}")
        self.micro_batch_tokens = micro_batch_tokens
        self.seed = seed
        self.identity = f"{documents.digest}/{sequence_length}/{micro_batch_tokens}/{seed}"
        self.epoch, self.index = 0, 0
        self._plan = self._plan_epoch()

    def take(self, count: int) -> list[np.ndarray]:
        """Moves on by `count` micro-batches and returns the piece numbers of each, for `batch` and `num_terms`."""
        taken = []
        for _ in range(count):
            if self.index == len(self._plan):
                self.epoch, self.index = self.epoch + 1, 0
                self._plan = self._plan_epoch()
            taken.append(self._plan[self.index])
            self.index += 1
        return taken

    def split(self, numbers: np.ndarray, count: int) -> list[np.ndarray]:
        """Pieces in their order in at most `count` parts of about as many tokens each, none of them empty.

        Pairs stay whole.
        """
        groups = numbers.reshape(-1, self.neighbours)
        lengths = self.pieces.length[groups].sum(axis=1)
        middles = np.cumsum(lengths) - lengths / 2
        part = (middles * count / lengths.sum()).astype(np.int64)
        return [groups[part == one].ravel() for one in np.unique(part)]

    def batch(self, numbers: np.ndarray) -> Batch:
        return pack(self.documents, self.pieces, numbers)

    def num_terms(self, numbers: np.ndarray) -> int:
        """Of the loss, which is their mean: labels, or pairs."""
        return len(numbers) // 2 if self.documents.paired else int(self.pieces.num_labels[numbers].sum())

    def state_dict(self) -> dict[str, Any]:
        return {"identity": self.identity, "epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the state belongs to another data set, packing or seed: its position means nothing."""
        if state["identity"] != self.identity:
            raise ValueError(
                f"the saved position belongs to other data or settings (data/sequence_length/micro_batch_tokens/seed "
                f"was {state['identity']}, now {self.identity})"
            )
        self.epoch, self.index = state["epoch"], state["index"]
        self._plan = self._plan_epoch()

    def _plan_epoch(self) -> list[np.ndarray]:
        how = {"neighbours": self.neighbours, "batch_tokens": self.micro_batch_tokens}
        return plan_together(self.pieces, self._order(), **how)

    def _order(self) -> np.ndarray:
        """The pieces of this epoch, or the pairs: each once, or of a mixture as the weights say."""
        mixture, pieces = self.documents.mixture, self.pieces
        if mixture is None:
            return shuffled(len(pieces) // self.neighbours, seed=self.seed, epoch=self.epoch)

        def shuffle(count: int, name: str, number: int) -> np.ndarray:
            return shuffled(count, seed=f"{self.seed}/{name}" if name else self.seed, epoch=number)

        sources = mixture.parts[pieces.document]
        return epoch_order(pieces.length, sources, mixture.weights, epoch=self.epoch, shuffle=shuffle)
