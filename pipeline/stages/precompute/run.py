"""Stage `precompute`: a teacher's distributions, drawn and stored shard by shard (model/files/distributions.py).

A shard is some whole documents. Each process computes its share of them; a kill costs those that are not finished. A
teacher that lies in shards itself makes its passes in all processes at once: who has stored its share makes idle ones.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import safe_open

from model.collectives import ALONE
from model.files.distributions import LISTED_PARTS, Sampled, rounded, sample, shard_name, write_index, write_shard
from model.mesh import choose_device
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.errors import RunInterrupted
from pipeline.measure.quality import load_published
from pipeline.results import Result
from pipeline.stages.precompute.config import Precompute
from pipeline.stages.precompute.report import PrecomputeDetails
from pipeline.stages.shared.config import Server
from pipeline.stages.shared.context import StageContext, prepare_data
from pipeline.stages.shared.models import asking_mesh
from pipeline.stages.shared.served import ServedModel
from train.objectives import teacher_states
from train.packing import IGNORE_LABEL, Batch, Pieces, cut, pack, plan_batches
from train.progress import Progress
from train.sampler import hashed_numbers
from train.signals import StopSignals

SHARD_TOKENS = 32_768
BATCH_TOKENS = 2_048

Said = tuple[np.ndarray, np.ndarray, Sampled]
"""Numbers of pieces, positions of theirs that have a label among all tokens, and what the teacher says there."""


def run(context: StageContext) -> Result[PrecomputeDetails] | None:
    """All processes compute; the main one publishes and returns the result."""
    store, processes = _Store(context), context.processes
    missing = [number for number in range(store.num_shards) if not store.path(number).exists()]
    began = time.monotonic()
    processes.wait()  # nobody writes before all have looked
    if missing and store.group.count > 1:
        _ = store.teacher
    store.write(missing[processes.index :: processes.count], done=store.num_shards - len(missing))
    processes.wait()
    if not processes.is_main:
        return None
    shards = [store.path(number) for number in range(store.num_shards)]
    counts, positions = [_counts(path) for path in shards], int(store.pieces.num_labels.sum())
    details = PrecomputeDetails(
        positions=positions,
        stored_tokens=sum(map(len, counts)),
        stored_bytes=sum(path.stat().st_size for path in shards),
        draws=0 if store.config.server else store.config.draws,
        rest=1 - sum(int(of.sum()) for of in counts) / (store.parts * positions),
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
        self.tokenizer = Tokenizer.load(context.model(self.config.model))
        source = replace(context.data_set(self.config.data), distributions=None)
        self.documents = prepare_data(source, self.tokenizer, context.cache, context.processes).train
        self.pieces = cut(self.documents, source.sequence_length)
        self.first_documents = _shards(self.documents.offsets)
        self.num_shards = len(self.first_documents) - 1
        self.folder = context.folder / "shards"
        self.folder.mkdir(exist_ok=True)
        self.parts = LISTED_PARTS if self.config.server else self.config.draws
        self.mesh = None if self.config.server else asking_mesh()
        self.group = ALONE if self.mesh is None or self.mesh.is_whole else context.processes.group
        """The processes that have the teacher together."""
        self.signals = StopSignals()

    @cached_property
    def teacher(self) -> Transformer:
        return load_published(self.context.model(self.config.model), self.mesh).eval()

    def path(self, number: int) -> Path:
        return self.folder / shard_name(number)

    def num_tokens(self, number: int) -> int:
        first, end = self.first_documents[number : number + 2]
        return int(self.documents.offsets[end] - self.documents.offsets[first])

    def write(self, numbers: Sequence[int], *, done: int) -> None:
        """Computes these shards. Raises RunInterrupted after a signal."""
        share, total = self.context.processes.count, done + self.context.processes.count * len(numbers)
        with self.signals, Progress("storing", total, done=done, enabled=total > done) as bar:
            for number in numbers:
                tokens, found = self.num_tokens(number), []
                first, end = self.first_documents[number : number + 2]
                start, document = self.documents.offsets[first], self.pieces.document
                own = np.flatnonzero((document >= first) & (document < end))
                for pieces, positions, said in (self._drawn if self.config.server is None else self._listed)(own):
                    found.append((positions - start, said))
                    bar.advance(share * sum(self.pieces.length[pieces]) / max(tokens, 1), f"shard {number}")
                write_shard(self.path(number), self.documents.tokens[start : start + tokens], found)
            while self._goes_on(working=False):
                self._states(self._labelled(np.array([0]))[0])

    def _goes_on(self, *, working: bool) -> bool:
        """Whether one of the teacher's processes has work to do; RunInterrupted, then, in all once one is to stop."""
        said = torch.tensor([[working, self.signals.requested]], dtype=torch.int32, device=choose_device())
        works, stops = self.group.gather(said).flatten(0, 1).any(0).tolist()
        if works and stops:
            name = self.context.stage.name
            raise RunInterrupted(f"{name} keeps its shards; the same command goes on from here")
        return bool(works)

    @torch.no_grad()
    def _states(self, batch: Batch) -> torch.Tensor:
        return teacher_states(self.teacher, batch.to(self.teacher.device))

    def _drawn(self, own: np.ndarray) -> Iterator[Said]:
        """By the teacher's passes."""
        longest = max(int(self.pieces.length[own].max(initial=1)), BATCH_TOKENS)
        head, cap = self.teacher.head_weight.detach(), self.teacher.config.logit_soft_cap
        for chosen in plan_batches(self.pieces.length[own], longest):
            self._goes_on(working=True)
            batch, labelled, positions = self._labelled(own[chosen])
            hidden = self._states(batch)
            rows, shifts = hidden[labelled.to(hidden.device)], self._shifts(positions)
            yield own[chosen], positions, sample(rows, head, shifts, self.config.draws, soft_cap=cap)

    def _listed(self, own: np.ndarray) -> Iterator[Said]:
        """By the server, which scores each piece with its last label."""
        ends = zip(own.tolist(), self.pieces.start[own], self.pieces.length[own], strict=True)
        texts = {piece: self.documents.tokens[start : start + length + 1] for piece, start, length in ends}
        server = ServedModel(cast("Server", self.config.server))
        for piece, places in server.listed(texts, self.config.top, self.tokenizer):
            self._goes_on(working=True)
            _, labelled, positions = self._labelled(np.array([piece]))
            yield np.array([piece]), positions, rounded([places[at] for at in labelled.tolist()])

    def _labelled(self, pieces: np.ndarray) -> tuple[Batch, torch.Tensor, np.ndarray]:
        """A batch of pieces, which of its positions have a label, and where those stand among all tokens."""
        batch = pack(self.documents, self.pieces, pieces)
        labelled = (batch.labels != IGNORE_LABEL).nonzero()[:, 0]
        return batch, labelled, _positions(self.pieces, pieces)[labelled.numpy()]

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
            draws=self.parts,
            documents=self.documents.digest,
            teacher=self.config.server.model if self.config.server else self.context.inputs[self.config.model].digest,
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


def _counts(shard: Path) -> np.ndarray:
    with safe_open(shard, framework="np") as file:
        return file.get_tensor("counts")
