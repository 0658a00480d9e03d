"""Packing documents into flat ragged batches: no padding, no leak from one document to the next.

A document of n tokens has n - 1 positions that predict something. They are cut into pieces of at most
`sequence_length` positions; the label of a piece's last position is the first token of the next piece, so every token
but a document's first is predicted exactly once. Whole pieces are then packed into micro-batches of at most
`batch_tokens` positions, best fit first: a micro-batch is full or nearly so (98% and more once there are a few dozen
pieces; the last ones of an epoch take what is left). No piece is cut again: that would cost its end the context.

Legend: T tokens, B sequences, P pieces.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.losses.linear_sparse_distillation import SparseTargets
from model.collectives import Group
from model.context import ContextPart
from model.trained_split import taken_rows
from train.data import TokenizedDocuments

IGNORE_LABEL = -100
# Micro-batches that are being filled at once. More fill better and mix pieces from farther apart.
OPEN_BATCHES = 32


@dataclass(frozen=True)
class Batch:
    """Tokens of B sequences one after another, complete when built.

    tokens [T] int64
    positions [T] int64: restart at 0 for each sequence
    cu_seqlens [B+1] int32: where each sequence starts, and T
    labels [T] int64: the token that each position must predict, -100 where none
    num_labels: how many labels are not -100
    num_bytes: bytes of the text that the labels spell; 0 where it was not counted (training batches)
    targets: what a teacher says at each position, where that was stored with the documents
    part: where other processes have the rest of the batch's tokens, what is here; cu_seqlens are of the whole
    sharers: where losses are divided among processes that have all tokens, these; labels are then this one's
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    labels: Tensor
    num_labels: int
    num_bytes: int = 0
    targets: SparseTargets | None = None
    part: ContextPart | None = None
    sharers: Group | None = None

    def to(self, device: torch.device | str) -> "Batch":
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "positions", "cu_seqlens", "labels")}
        targets, part = self.targets and self.targets.to(device), self.part and self.part.to(device)
        return replace(self, **moved, targets=targets, part=part)

    def part_of(self, group: Group) -> "Batch":
        """What this process has of it when all of a group compute it together. Raises ValueError for targets."""
        if self.targets is not None:
            raise ValueError("stored distributions are not cut: context parallel needs the teacher itself, or none")
        part = ContextPart.of(group, self.cu_seqlens.tolist())
        labels = part.take(self.labels, IGNORE_LABEL)
        return replace(
            self,
            tokens=part.take(self.tokens, 0),
            positions=part.take(self.positions, 0),
            labels=labels,
            num_labels=int((labels != IGNORE_LABEL).sum()),
            part=part,
        )

    def losses_among(self, group: Group) -> "Batch":
        """With the labels of the rows that this process takes (`model.trained_split.take_rows`)."""
        labels = self.labels[taken_rows(group, len(self.labels))]
        return replace(self, labels=labels, num_labels=int((labels != IGNORE_LABEL).sum()), sharers=group)


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that fit a sequence; arrays of P int64.

    A piece's positions are `tokens[start : start + length]`, its labels `tokens[start + 1 : start + length + 1]`.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    num_labels: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


def cut(documents: TokenizedDocuments, sequence_length: int) -> Pieces:
    """Cuts all documents into pieces of at most `sequence_length` positions; pieces without any label are left out.

    Of paired documents each is one piece, which ends where the sequence does; a pair without a label on both sides
    is left out, so that pieces 2p and 2p + 1 are a pair again.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    first, end = np.asarray(documents.offsets[:-1]), np.asarray(documents.offsets[1:])
    positions = np.maximum(end - first - 1, 0)
    counts = -(-positions // sequence_length)
    if documents.paired:
        counts = np.ones_like(counts)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = first[document] + number * sequence_length
    length = np.minimum(sequence_length, end[document] - 1 - start)
    num_labels = _count_labels(documents.labels_mask, start, length)
    kept = num_labels > 0
    if documents.paired:
        kept = kept.reshape(-1, 2).all(axis=1).repeat(2)
    return Pieces(document[kept], start[kept], length[kept], num_labels[kept])


def _count_labels(mask: np.ndarray | None, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    if mask is None:
        return length
    ends = start + length
    counts = [int(np.count_nonzero(mask[a + 1 : b + 1])) for a, b in zip(start.tolist(), ends.tolist(), strict=True)]
    return np.array(counts, dtype=np.int64)


def plan_batches(lengths: Sequence[int] | np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Packs pieces of the given lengths, in the given order, into lists of piece numbers of at most `batch_tokens`.

    Best fit: a piece goes where it leaves the least room; a batch is closed when full, or when too many are open.
    """
    batches: list[list[int]] = []
    closed: list[list[int]] = []
    open_batches: list[tuple[int, int]] = []  # (room, index into batches), least room first
    for piece, length in enumerate(np.asarray(lengths).tolist()):
        at = bisect_left(open_batches, (length, -1))
        if at < len(open_batches):
            room, number = open_batches.pop(at)
        else:
            room, number = batch_tokens, len(batches)
            batches.append([])
        if length > room:
            raise ValueError(f"a piece of {length} tokens does not fit a micro-batch of {batch_tokens}")
        batches[number].append(piece)
        if length == room:
            closed.append(batches[number])
        else:
            insort(open_batches, (room - length, number))
        if len(open_batches) > OPEN_BATCHES:
            closed.append(batches[open_batches.pop(0)[1]])
    return closed + [batches[number] for _, number in open_batches]


def plan_together(
    pieces: Pieces, order: Sequence[int] | np.ndarray, *, neighbours: int, batch_tokens: int
) -> list[np.ndarray]:
    """Piece numbers of each micro-batch, where groups of so many neighbouring pieces stay together.

    `order`: of the groups, as they are packed.
    """
    lengths, within = pieces.length.reshape(-1, neighbours).sum(axis=1), np.arange(neighbours)
    chosen = np.asarray(order)
    plan = plan_batches(lengths[chosen], batch_tokens)
    return [(chosen[numbers][:, None] * neighbours + within).ravel() for numbers in plan]


def pack(documents: TokenizedDocuments, pieces: Pieces, numbers: Sequence[int] | np.ndarray) -> Batch:
    """Builds the batch of the pieces with these numbers, in this order."""
    starts, lengths = pieces.start[numbers], pieces.length[numbers]
    total = int(lengths.sum())
    tokens, labels, positions = (np.empty(total, dtype=np.int64) for _ in range(3))
    at = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        part, shifted = slice(at, at + length), slice(start + 1, start + length + 1)
        tokens[part] = documents.tokens[start : start + length]
        labels[part] = documents.tokens[shifted]
        if documents.labels_mask is not None:
            labels[part][documents.labels_mask[shifted] == 0] = IGNORE_LABEL
        positions[part] = np.arange(length)
        at += length
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    stored, spans = documents.distributions, list(zip(starts.tolist(), lengths.tolist(), strict=True))
    return Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        labels=torch.from_numpy(labels),
        num_labels=int(pieces.num_labels[numbers].sum()),
        targets=None if stored is None else stored.targets(spans, documents.tokens),
    )


def held_out_batches(
    documents: TokenizedDocuments, *, sequence_length: int, batch_tokens: int, max_tokens: int | None = None
) -> list[Batch]:
    """Returns batches of whole held-out documents, the first ones that fit `max_tokens`, in a fixed order.

    `prepare` cuts held-out text into documents of one window each, first windows first, so that the first `max_tokens`
    come from as many texts as possible. A document longer than `sequence_length` would be cut again.
    """
    pieces = cut(documents, sequence_length)
    fits = np.ones(len(pieces), dtype=bool) if max_tokens is None else np.cumsum(pieces.length) <= max_tokens
    if not fits.any():
        raise ValueError(
            f"no held-out text fits: {len(pieces)} pieces, the first of "
            f"{int(pieces.length[0]) if len(pieces) else 0} tokens, max_tokens is {max_tokens}"
        )
    chosen = np.flatnonzero(fits)
    plan = plan_batches(pieces.length[chosen], max(batch_tokens, sequence_length))
    batches = []
    for numbers in plan:
        batch = pack(documents, pieces, chosen[numbers])
        batches.append(replace(batch, num_bytes=_bytes_of(documents, pieces, chosen[numbers])))
    return batches


def calibration_batches(documents: TokenizedDocuments, *, sequence_length: int, max_tokens: int) -> list[Batch]:
    """Returns batches of about one sequence each, of pieces that lie evenly all over the text.

    The first `max_tokens` might be one long document, which says little of the others.
    """
    pieces = cut(documents, sequence_length)
    share = min(max(max_tokens, sequence_length) / pieces.length.sum(), 1.0)
    count = max(round(share * len(pieces)), 1)
    chosen = ((np.arange(count) + 0.5) * len(pieces) / count).astype(np.int64)
    plan = plan_batches(pieces.length[chosen], sequence_length)
    return [pack(documents, pieces, chosen[numbers]) for numbers in plan]


def _bytes_of(documents: TokenizedDocuments, pieces: Pieces, numbers: np.ndarray) -> int:
    """Bytes of the documents that these pieces are; a document in several pieces gives each its share by labels."""
    document = pieces.document[numbers]
    labels_of_document = np.bincount(pieces.document, weights=pieces.num_labels, minlength=documents.num_documents)
    share = pieces.num_labels[numbers] / labels_of_document[document]
    return round(float((documents.num_bytes_per_document[document] * share).sum()))
