"""Resumable training state on disk: safetensors and JSON, published whole or not at all.

    checkpoints/step-00000050/
        model.safetensors        trained weights under their own names
        optimizer.safetensors    exp_avg.NAME and exp_avg_sq.NAME, in 8 bits with their absmax
        state.json               counters, sampler position, seed
        manifest.json            size and SHA-256 of the three, and a SHA-256 of itself; written last

Where processes hold a part each, so do files: `model-00001-of-00004.safetensors` has the first rows of every matrix,
or of a block of it, and the vectors. Any number of processes reads them (train/saved_tensors.py).

Writing (behind training, train/checkpoint_writer.py): staging folder, fsync, rename, then the published files are read
back and verified, and only then are older checkpoints purged. Reading: newest first; one that fails verification is set
aside with a loud message.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from model.files.safe_io import HASH_CHUNK_BYTES, Heard, read_json_object, sync_file, unheard, write_json
from model.files.sealed_folder import check, seal

log = logging.getLogger(__name__)

STATE = "state.json"
# Whole names only: `step-00000050.damaged` or `step-00000050-copy` is somebody else's folder.
NAME = re.compile(r"step-(\d{8})")
STAGING = re.compile(r"\.staging-step-\d{8}")
RETIRED = re.compile(r"\.retired-(step-\d{8})")
# What trained weights and their moments are kept in, as safetensors spells it.
DTYPES = {torch.float32: "F32", torch.uint8: "U8"}

Files = dict[str, dict[str, Tensor]]
"""The tensors of each file by their names, contiguous and on the CPU."""


class TrainingStateError(ValueError):
    """A checkpoint that is incomplete, altered, or of another model; the sentence names the file or the tensor."""


class DiskFullError(OSError):
    """There is no room for a checkpoint; the last good one is untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint whose files have been verified."""

    folder: Path
    step: int
    state: dict[str, Any]


class Writers(Protocol):
    """The processes that write a checkpoint; each of them calls `save_checkpoint`."""

    is_main: bool
    parts: int
    """Files of each kind."""
    part: int | None
    """This process's, from 0; None where another one holds the same."""

    def together(self, work: Callable[[], None]) -> None:
        """Does this process's work, and returns when all have done theirs. Raises in all of them where one failed."""
        ...

    def moved(self, num_bytes: int) -> None:
        """Told after each piece that was written or read back."""
        ...


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    files: Files,
    state: dict[str, Any],
    keep: int,
    writers: Writers,
) -> None:
    """Publishes a checkpoint below `folder`, verifies it, and purges all but the newest `keep`.

    `files`: what this process is to write. Raises OSError, DiskFullError among it, where it cannot be written; what was
    published before stays.
    """
    staging, target = folder / f".staging-step-{step:08d}", folder / f"step-{step:08d}"

    def prepare() -> None:
        if writers.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()

    def write() -> None:
        if writers.part is None:
            return
        _check_room(folder, files, writers.parts)
        for name, tensors in files.items():
            _write_tensors(staging / part_name(name, writers.part, writers.parts), tensors, writers.moved)

    def publish() -> None:
        if writers.is_main:
            _publish(staging, target, state, writers.moved)
            for old in published(folder)[keep:]:
                shutil.rmtree(old)

    try:
        for work in (prepare, write, publish):
            writers.together(work)
    except BaseException as reason:
        if writers.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        if isinstance(reason, OSError) and reason.strerror:
            sentence = f"The checkpoint of step {step} cannot be written to {folder}: {reason.strerror}"
            raise type(reason)(f"{sentence}. The one before it is untouched.") from reason
        raise


def part_name(name: str, part: int, parts: int) -> str:
    """The file that holds one of so many parts of what is called `name`."""
    return f"{name}.safetensors" if parts == 1 else f"{name}-{part + 1:05d}-of-{parts:05d}.safetensors"


def _write_tensors(path: Path, tensors: dict[str, Tensor], moved: Heard) -> None:
    """A safetensors file, forced to the disk; written by pieces, during which other threads run."""
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    header = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        for (name, tensor), start, stop in zip(tensors.items(), ends, ends[1:], strict=False)
    }
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with open(path, "wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for tensor in tensors.values():
            content = tensor.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(content), HASH_CHUNK_BYTES):
                moved(file.write(content[start : start + HASH_CHUNK_BYTES]))
    sync_file(path)


def _publish(staging: Path, target: Path, state: dict[str, Any], moved: Heard) -> None:
    write_json(staging / STATE, state)
    seal(staging, moved)
    retired = target.with_name(f".retired-{target.name}")
    if target.exists():  # of the same step, before an evaluation; it steps aside until the new one is proved whole
        os.rename(target, retired)
    try:
        os.rename(staging, target)
        sync_file(target.parent)
        _verify(target, moved)
    except BaseException:
        if retired.exists():
            shutil.rmtree(target, ignore_errors=True)
            os.rename(retired, target)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def newest_checkpoint(folder: Path, *, set_aside: bool = True) -> Checkpoint | None:
    """The newest checkpoint that passes verification, or None.

    Damaged ones are reported; with `set_aside` (one process only) they are renamed to `NAME.damaged`, out of the way of
    the step that will be published again, and what a killed process left in staging or retired is removed, or put back.
    """
    if set_aside and folder.exists():
        for path in list(folder.iterdir()):
            if STAGING.fullmatch(path.name):
                shutil.rmtree(path)
            elif retired := RETIRED.fullmatch(path.name):
                _put_back_or_remove(path, folder / retired[1])
    for path in published(folder):
        try:
            return _verify(path)
        except TrainingStateError as damage:
            log.warning("%s Falling back to the checkpoint before it.", damage)
            if set_aside:
                aside = path.with_name(f"{path.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(path, aside)
    return None


def _put_back_or_remove(retired: Path, target: Path) -> None:
    """A kill left both or, between two renames, the retired one alone."""
    try:
        _verify(target)
    except TrainingStateError:
        shutil.rmtree(target, ignore_errors=True)
        os.rename(retired, target)
    else:
        shutil.rmtree(retired)


def published(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, verified or not."""
    if not folder.exists():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)


def open_checkpoint(folder: Path, step: int) -> Checkpoint:
    """One that another process has verified."""
    target = folder / f"step-{step:08d}"
    return Checkpoint(target, step, read_json_object(target / STATE, TrainingStateError))


def _check_room(folder: Path, files: Files, parts: int) -> None:
    """A tenth more than the tensors: headers, JSON, and room to finish the log. Parts are of about the same size."""
    needed = parts * sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    free = shutil.disk_usage(folder).free
    if free < 1.1 * needed:
        raise DiskFullError(f"A checkpoint of {needed:,} bytes does not fit {folder}: {free:,} bytes are free.")


def _verify(folder: Path, moved: Heard = unheard) -> Checkpoint:
    """Raises TrainingStateError naming the first file that is missing, short or altered."""
    check(folder, TrainingStateError, moved)
    state = read_json_object(folder / STATE, TrainingStateError)
    return Checkpoint(folder, int(folder.name.removeprefix("step-")), state)
