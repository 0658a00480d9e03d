"""Stage `precompute`: a teacher's distributions, drawn and stored shard by shard (train/distributions.py).

A shard is some whole documents. Each process computes its share of them; a kill costs those that are not finished.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.errors import RunInterrupted
from pipeline.measure.quality import load_published
from pipeline.results import Result
from pipeline.stages.precompute.config import Precompute
from pipeline.stages.precompute.report import PrecomputeDetails
from pipeline.stages.shared.context import StageContext, prepare_data
from train.distributions import Sampled, sample, shard_name, write_index, write_shard
from train.objectives import teacher_states
from train.packing import IGNORE_LABEL, Pieces, cut, pack, plan_batches
from train.progress import Progress
from train.sampler import hashed_numbers
from train.signals import StopSignals

SHARD_TOKENS = 32_768
BATCH_TOKENS = 2_048


def run(context: StageContext) -> Result[PrecomputeDetails] | None:
    """All processes compute; the main one publishes and returns the result."""
    store, processes = _Store(context), context.processes
    missing = [number for number in range(store.num_shards) if not store.path(number).exists()]
    began = time.monotonic()
    processes.wait()  # nobody writes before all have looked
    store.write(missing[processes.index :: processes.count], done=store.num_shards - len(missing))
    processes.wait()
    if not processes.is_main:
        return None
    shards = [store.path(number) for number in range(store.num_shards)]
    details = PrecomputeDetails(
        positions=int(store.pieces.num_labels.sum()),
        stored_tokens=sum(_num_stored(path) for path in shards),
        stored_bytes=sum(path.stat().st_size for path in shards),
        draws=store.config.draws,
        computed_tokens=sum(store.num_tokens(number) for number in missing),
        seconds=time.monotonic() - began,
    )
    output = context.publish_data(store.publish)
    shutil.rmtree(store.folder)
    return context.result(output=output, details=details)


class _Store:
    """The documents in shards, the teacher, and where shards lie while the stage is at work."""

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.config: Precompute = context.stage.config
        tokenizer = Tokenizer.load(context.model(self.config.model))
        source = replace(context.data_set(self.config.data), distributions=None)
        self.documents = prepare_data(source, tokenizer, context.cache, context.processes).train
        self.pieces = cut(self.documents, source.sequence_length)
        self.first_documents = _shards(self.documents.offsets)
        self.num_shards = len(self.first_documents) - 1
        self.folder = context.folder / "shards"
        self.folder.mkdir(exist_ok=True)

    @cached_property
    def teacher(self) -> Transformer:
        return load_published(self.context.model(self.config.model)).eval()

    def path(self, number: int) -> Path:
        return self.folder / shard_name(number)

    def num_tokens(self, number: int) -> int:
        first, end = self.first_documents[number : number + 2]
        return int(self.documents.offsets[end] - self.documents.offsets[first])

    def write(self, numbers: Sequence[int], *, done: int) -> None:
        """Computes these shards. Raises RunInterrupted after a signal."""
        share, name = self.context.processes.count, self.context.stage.name
        total = done + share * len(numbers)
        with StopSignals() as signals, Progress("storing", total, done=done, enabled=share * len(numbers) > 0) as bar:
            for number in numbers:
                tokens, found = self.num_tokens(number), []
                for batch in self._batches(number):
                    found.append(self._sample(number, batch))
                    bar.advance(share * sum(self.pieces.length[batch]) / max(tokens, 1), f"shard {number}")
                    if signals.requested:
                        raise RunInterrupted(f"{name} keeps its shards; the same command goes on from here")
                start = self.documents.offsets[self.first_documents[number]]
                text = self.documents.tokens[start : start + tokens]
                write_shard(self.path(number), text, found, len(self.teacher.head_weight))

    def _batches(self, number: int) -> list[np.ndarray]:
        first, end = self.first_documents[number : number + 2]
        own = np.flatnonzero((self.pieces.document >= first) & (self.pieces.document < end))
        longest = max(int(self.pieces.length[own].max(initial=1)), BATCH_TOKENS)
        return [own[chosen] for chosen in plan_batches(self.pieces.length[own], longest)]

    @torch.no_grad()
    def _sample(self, number: int, pieces: np.ndarray) -> tuple[np.ndarray, Sampled]:
        """Positions within the shard that have a label, and what the teacher says there."""
        batch = pack(self.documents, self.pieces, pieces)
        labelled = (batch.labels != IGNORE_LABEL).nonzero()[:, 0]
        positions = _positions(self.pieces, pieces)[labelled.numpy()]
        hidden = teacher_states(self.teacher, batch.to(self.teacher.device))
        head = self.teacher.head_weight.detach()
        shifts = self._shifts(positions)
        start = self.documents.offsets[self.first_documents[number]]
        return positions - start, sample(hidden[labelled.to(hidden.device)], head, shifts, self.config.draws)

    def _shifts(self, positions: np.ndarray) -> torch.Tensor:
        """A uniform number for each position, the same in whatever batch it is computed."""
        hashed = hashed_numbers(positions, f"{self.config.seed}:shifts")
        return torch.from_numpy((hashed >> np.uint64(11)).astype(np.float64) / 2**53)

    def publish(self, folder: Path) -> None:
        """Puts all shards into `folder`, and says what they are."""
        for number in range(self.num_shards):
            os.link(self.path(number), folder / shard_name(number))
        write_index(
            folder,
            first_tokens=self.documents.offsets[self.first_documents[:-1]].tolist(),
            draws=self.config.draws,
            documents=self.documents.digest,
            teacher=self.context.inputs[self.config.model].digest,
        )


def _shards(offsets: np.ndarray) -> list[int]:
    """The first document of each shard, and the number of documents."""
    firsts = [0]
    for document in range(1, len(offsets) - 1):
        if offsets[document] - offsets[firsts[-1]] >= SHARD_TOKENS:
            firsts.append(document)
    return [*firsts, len(offsets) - 1]


def _positions(pieces: Pieces, numbers: np.ndarray) -> np.ndarray:
    """Of a packed batch: where its positions stand among all tokens."""
    return np.concatenate([np.arange(pieces.length[one]) + pieces.start[one] for one in numbers])


def _num_stored(shard: Path) -> int:
    with safe_open(shard, framework="np") as file:
        return int(file.get_slice("ids").get_shape()[0])
