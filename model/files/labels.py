"""What a server leaves for training: answers, and what its model said of tokens in them, in shards.

A folder holds `labels.json`, which says whose they are, and `labels-NNNNNN.SHA256.safetensors`, oldest first. A shard
is some whole documents in the arrays of stored distributions (model/files/distributions.py), and two more:

    documents  [D + 1] int64   where each begins
    token_ids  [P] int32       their tokens: prompt and answer

It is complete by itself, has its own SHA-256 in its name, and appears by one rename: whoever writes may die at any
time, and the oldest may go at any time.

Legend: D documents of a shard, P positions (one for each token), r positions of a document that have a distribution.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from model.files.distributions import Arrays, Sampled, shard_arrays, wide_ids
from model.files.label_shards import INDEX_NAME, is_label_folder, label_shards, shard_number
from model.files.safe_io import read_json_object, sha256_of, sync_file, write_json
from model.text.tokenizer import Tokenizer

FORMAT_VERSION = 1


class LabelsError(ValueError):
    """A folder of labels that is damaged or in use, or belongs to another model; the sentence names it."""


class LabelledDocument(NamedTuple):
    """The tokens of a request, and distributions of some of those that it emitted."""

    tokens: np.ndarray
    """[T] int32"""
    positions: np.ndarray
    """[r] int64, ascending: the distribution is that of the token behind it."""
    sampled: Sampled


@dataclass(frozen=True)
class Origin:
    """Whose labels a folder holds."""

    teacher: str
    """Digest of the model's artifact; empty where it is none."""
    vocabulary: str
    """Digest of what its tokens mean."""
    draws: int
    """Tokens drawn from each distribution."""


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 over the bytes of all tokens, in their order."""
    digest, bytes_of = hashlib.sha256(), tokenizer.token_bytes()
    for token in range(tokenizer.vocab_size):
        digest.update(len(bytes_of[token]).to_bytes(4, "little") + bytes_of[token])
    return digest.hexdigest()


class LabelFolder:
    """A folder that this process alone writes to, as long as it lives."""

    def __init__(self, folder: Path, origin: Origin, *, max_bytes: int) -> None:
        """`max_bytes`: of all shards together. Raises LabelsError for a folder of others, or of another model."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.max_bytes = folder, max_bytes
        self._lock = os.open(folder, os.O_RDONLY)  # of the folder itself; the system lets go of it with the process
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check(origin)
        except OSError:
            os.close(self._lock)
            raise LabelsError(f"{folder}: another server stores its labels there.") from None
        except LabelsError:
            os.close(self._lock)
            raise
        for half in folder.glob("*.staging"):
            half.unlink()
        shards = label_shards(folder)
        self._next = shard_number(shards[-1]) + 1 if shards else 0
        self.num_bytes = sum(shard.stat().st_size for shard in shards)

    def _check(self, origin: Origin) -> None:
        if not is_label_folder(self.folder):
            staging = self.folder / f"{INDEX_NAME}.staging"
            write_json(staging, {"format": FORMAT_VERSION} | vars(origin))
            staging.rename(self.folder / INDEX_NAME)
        elif read_origin(self.folder) != origin:
            raise LabelsError(f"{self.folder} holds labels of another model; name another folder.")

    def write(self, documents: Sequence[LabelledDocument]) -> None:
        """Adds a shard, whole or not at all, and removes the oldest ones beyond `max_bytes`.

        Raises OSError, or safetensors' own error for one, when the shard cannot be written.
        """
        staging = self.folder / f"labels-{self._next:06d}.staging"
        save_file(_arrays(documents), staging)
        sync_file(staging)
        shard = staging.with_name(f"labels-{self._next:06d}.{sha256_of(staging)}.safetensors")
        staging.rename(shard)
        self._next += 1
        sync_file(self.folder)
        self.num_bytes += shard.stat().st_size
        for oldest in label_shards(self.folder)[:-1]:
            if self.num_bytes <= self.max_bytes:
                break
            self.num_bytes -= oldest.stat().st_size
            oldest.unlink()

    def close(self) -> None:
        os.close(self._lock)


def _arrays(documents: Sequence[LabelledDocument]) -> Arrays:
    tokens = np.concatenate([document.tokens for document in documents]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum([len(document.tokens) for document in documents])]).astype(np.int64)
    found = [(one.positions + start, one.sampled) for one, start in zip(documents, starts, strict=False)]
    return shard_arrays(tokens, found) | {"token_ids": tokens, "documents": starts}


def read_origin(folder: Path) -> Origin:
    """Whose labels these are. Raises LabelsError."""
    index = read_json_object(folder / INDEX_NAME, LabelsError)
    if index.get("format") != FORMAT_VERSION:
        found = index.get("format")
        raise LabelsError(f"{folder / INDEX_NAME} has format {found}; this version reads {FORMAT_VERSION}.")
    return Origin(str(index["teacher"]), str(index["vocabulary"]), int(index["draws"]))


def read_labels(shard: Path) -> Iterator[LabelledDocument]:
    """Its documents, in order. Raises LabelsError where it is damaged, or has gone."""
    arrays = _checked(shard)
    starts = arrays["starts"].astype(np.int64)
    for first, end in zip(arrays["documents"][:-1].tolist(), arrays["documents"][1:].tolist(), strict=True):
        sizes, own = np.diff(starts[first : end + 1]), slice(starts[first], starts[end])
        positions = np.flatnonzero(sizes)
        sampled = Sampled(
            sizes[positions],
            wide_ids(arrays, own),
            arrays["counts"][own],
            arrays["entropies"][first:end][positions].astype(np.float32),
        )
        yield LabelledDocument(arrays["token_ids"][first:end], positions, sampled)


def _checked(shard: Path) -> Arrays:
    try:
        if sha256_of(shard) != shard.name.split(".")[1]:
            raise LabelsError(f"{shard} has been altered: its SHA-256 is not that in its name.")
        return load_file(shard)
    except FileNotFoundError:
        raise LabelsError(f"{shard} was removed by the server that writes there; run the command again.") from None
