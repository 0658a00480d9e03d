"""Labels for training that serving brings for free: what the model said where it drew a token of its own.

At such a position its draft was wrong, or was not asked: what a draft learns most from. Of the model's distribution
there, without penalties, masks and temperature, N tokens are drawn (model/files/distributions.py), and kept with the
tokens of requests that consent (`SamplingParams.store`) until these have ended. A thread writes them: a step hands its
documents over, and where the thread is behind, they are dropped and counted. Source: Online Speculative Decoding,
https://arxiv.org/abs/2310.07177, which keeps the positions that the target rejects.

g sequences that are sampled at once, k draft tokens, N draws, V vocabulary, r labels of a sequence.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.files.artifact import MANIFEST_NAME, open_artifact
from model.files.distributions import LOGITS_PER_BLOCK, counted, draw
from model.files.labels import LabelFolder, LabelledDocument, Origin, vocabulary_digest
from model.text.tokenizer import Tokenizer
from serve.config import EngineConfig
from serve.engine.batch_state import Download, upload
from serve.engine.requests import Label, Sequence

DRAWS = 50
"""As many as the stage `precompute` draws; about 12 of them differ."""
QUEUE_DOCUMENTS = 256
"""Most that may wait for the thread."""
SHARD_TOKENS = 32_768
"""Tokens of a shard; one takes about 2 MB."""
FLUSH_S = 30.0
"""How long the first document of a shard waits for others."""
log = logging.getLogger("potstill.engine")


class _Ended(NamedTuple):
    """A sequence that has ended, as the step hands it over."""

    tokens: list[int]
    labels: list[Label]


@dataclass(frozen=True, slots=True)
class PendingLabels:
    """What was drawn for some of the sequences that are sampled at once, on its way to the host."""

    numbers: list[int]
    """Of those sequences among all."""
    drawn: Download
    """`[g, N]` int32 and `[g]` fp32."""

    def read(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Tokens [N] and entropy [] of each; waits for the device."""
        tokens, entropies = self.drawn.wait()
        return dict(zip(self.numbers, zip(tokens, entropies, strict=True), strict=True))


class Labels:
    """Draws labels in the step, and has a thread store them."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, device: torch.device) -> None:
        """Raises LabelsError, one sentence, where the folder cannot be written to or is another model's."""
        has_manifest = (Path(config.model) / MANIFEST_NAME).exists()
        teacher = open_artifact(config.model, verify=False).digest if has_manifest else ""
        origin = Origin(teacher, vocabulary_digest(tokenizer), DRAWS)
        self._folder = LabelFolder(Path(config.label_folder or ""), origin, max_bytes=config.label_bytes)
        self._random = torch.Generator(device)
        self._random.seed()
        self._ended: queue.Queue[_Ended | None] = queue.Queue(QUEUE_DOCUMENTS)
        self.num_stored = self.num_dropped = 0
        """Labels on the disk since the start; documents that are lost."""
        self._thread = threading.Thread(target=self._write_all, name="labels", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """Fields of EngineStats."""
        return {
            "num_labels": self.num_stored,
            "num_dropped_labels": self.num_dropped,
            "label_bytes": self._folder.num_bytes,
        }

    def draw(self, sequences: SequenceType[Sequence], found: Tensor, logits: Tensor) -> PendingLabels | None:
        """Launch the draws. `found [g, k + 3]` as `PendingSamples.emitted` has it, `logits [g · (k + 1), V]`."""
        numbers = [n for n, one in enumerate(sequences) if _is_kept(one)]
        if not numbers:
            return None
        chosen = upload(np.array(numbers), logits.device)
        rows = chosen * (found.shape[1] - 2) + found[chosen, -2]
        shifts = torch.rand(len(numbers), generator=self._random, dtype=torch.float64, device=logits.device)
        size = max(LOGITS_PER_BLOCK // logits.shape[1], 1)
        parts = [draw(logits[some], own, DRAWS) for some, own in zip(rows.split(size), shifts.split(size), strict=True)]
        tokens, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        return PendingLabels(numbers, Download([tokens.int(), entropies]))

    def offer(self, sequence: Sequence) -> None:
        """Have what a sequence has brought stored; never waits."""
        if not sequence.labels:
            return
        try:
            self._ended.put_nowait(_Ended(sequence.tokens, sequence.labels))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Store what is still waiting."""
        self._ended.put(None)
        self._thread.join()
        self._folder.close()

    def _write_all(self) -> None:
        is_open = True
        while is_open and (first := self._ended.get()) is not None:
            documents = [first]
            is_open = self._gather(documents)
            self._write(documents)

    def _gather(self, documents: list[_Ended]) -> bool:
        """Wait for more, up to a shard. Returns whether any may come behind."""
        num_tokens, deadline = len(documents[0].tokens), time.monotonic() + FLUSH_S
        while num_tokens < SHARD_TOKENS:
            try:
                ended = self._ended.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if ended is None:
                return False
            documents.append(ended)
            num_tokens += len(ended.tokens)
        return True

    def _write(self, documents: list[_Ended]) -> None:
        try:
            self._folder.write([_document(ended) for ended in documents])
        except Exception as error:  # of any kind: this thread has to go on
            self.num_dropped += len(documents)
            log.error("labels of %d answers are lost: %s: %s", len(documents), type(error).__name__, error)
        else:
            self.num_stored += sum(len(ended.labels) for ended in documents)


def _is_kept(sequence: Sequence) -> bool:
    """With consent; what an adapter says is not the model's, and an embedding is no answer."""
    return sequence.params.store and sequence.adapter is None and sequence.params.pooling is None


def _document(ended: _Ended) -> LabelledDocument:
    positions, drawn, entropies = zip(*ended.labels, strict=True)
    sampled = counted(torch.stack(drawn).long(), torch.stack(entropies))
    return LabelledDocument(np.array(ended.tokens, np.int32), np.array(positions, np.int64), sampled)
