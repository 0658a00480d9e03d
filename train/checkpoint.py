"""Resumable training state on disk: safetensors and JSON, published whole or not at all.

    checkpoints/step-00000050/
        model.safetensors        weights under their own names
        optimizer.safetensors    exp_avg.NAME and exp_avg_sq.NAME
        state.json               counters, sampler position, seed
        manifest.json            size and SHA-256 of the three, and a SHA-256 of itself; written last

Writing: staging folder, fsync, rename, then the published files are read back and verified, and only then are older
checkpoints purged. Reading: newest first; one that fails verification is set aside with a loud message.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.files import read_json_object, sha256_of, sync_file, sync_tree, write_json

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST, STATE = "manifest.json", "state.json"
# Whole names only: `step-00000050.damaged` or `step-00000050-copy` is somebody else's folder.
NAME = re.compile(r"step-(\d{8})")
STAGING = re.compile(r"\.staging-step-\d{8}")


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

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of `NAME.safetensors`, on the CPU."""
        try:
            return load_file(self.folder / f"{name}.safetensors")
        except (OSError, SafetensorError) as reason:
            raise TrainingStateError(f"{self.folder / name}.safetensors cannot be read: {reason}.") from None


def save_checkpoint(
    folder: Path, step: int, *, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], keep: int
) -> Path:
    """Publishes a checkpoint below `folder`, verifies it, and purges all but the newest `keep`. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _check_room(folder, tensors)
    staging, target = folder / f".staging-step-{step:08d}", folder / f"step-{step:08d}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        _write(staging, tensors, state)
        if target.exists():
            shutil.rmtree(target)
        os.rename(staging, target)
        sync_file(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _verify(target)
    for old in published(folder)[keep:]:
        shutil.rmtree(old)
    return target


def newest_checkpoint(folder: Path, *, set_aside: bool = True) -> Checkpoint | None:
    """The newest checkpoint that passes verification, or None.

    Damaged ones are reported; with `set_aside` (one process only) they are renamed to `NAME.damaged`, out of the way of
    the step that will be published again, and what a killed process left in staging is removed.
    """
    if set_aside and folder.exists():
        for path in folder.iterdir():
            if STAGING.fullmatch(path.name):
                shutil.rmtree(path)
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


def published(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, verified or not."""
    if not folder.exists():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)


def _check_room(folder: Path, tensors: dict[str, dict[str, Tensor]]) -> None:
    """A tenth more than the tensors: headers, JSON, and room to finish the log."""
    needed = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    free = shutil.disk_usage(folder).free
    if free < 1.1 * needed:
        raise DiskFullError(f"A checkpoint of {needed:,} bytes does not fit {folder}: {free:,} bytes are free.")


def _write(staging: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    for name, group in tensors.items():
        save_file(group, staging / f"{name}.safetensors")
    write_json(staging / STATE, state)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(staging.iterdir())}
    sync_tree(staging)
    manifest = {"format": FORMAT_VERSION, "files": files}
    write_json(staging / MANIFEST, manifest | {"sha256": _digest(manifest)})
    sync_file(staging)


def _verify(folder: Path) -> Checkpoint:
    """Raises TrainingStateError naming the first file that is missing, short or altered."""
    manifest = read_json_object(folder / MANIFEST, TrainingStateError)
    expected = manifest.pop("sha256", None)
    if expected != _digest(manifest):
        raise TrainingStateError(f"{folder / MANIFEST} has been altered: its SHA-256 is not the recorded one.")
    if manifest["format"] != FORMAT_VERSION:
        raise TrainingStateError(f"{folder} has checkpoint format {manifest['format']}; this is {FORMAT_VERSION}.")
    for name, entry in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != entry["bytes"]:
            raise TrainingStateError(f"{path} ends at byte {size} instead of {entry['bytes']}.")
        if sha256_of(path) != entry["sha256"]:
            raise TrainingStateError(f"{path} has been altered: its SHA-256 is not the recorded one.")
    state = read_json_object(folder / STATE, TrainingStateError)
    return Checkpoint(folder, int(folder.name.removeprefix("step-")), state)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
