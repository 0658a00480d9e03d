"""Writing files so that a crash or a full disk never leaves half of one behind a good name.

The order that survives a power cut: write, fsync the file, fsync its folder, rename, fsync the parent folder.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

HASH_CHUNK_BYTES = 1 << 20
Heard = Callable[[int], None]
"""Told how many bytes more have been read."""


def unheard(num_bytes: int) -> None:
    """For whom nobody waits."""


def default_cache() -> Path:
    """Where downloads and what is made of them are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potstill"


class SourceError(ValueError):
    """A model that is not where it was said to be: one sentence that says what is wrong and what would be right."""


class CheckpointError(ValueError):
    """A model folder that cannot be read or written faithfully; the sentence names the file or the tensor."""


def sync_file(path: Path) -> None:
    """Forces a file's contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Forces every file below `folder`, and every folder entry that names one, to the disk."""
    for path in sorted(folder.rglob("*")):
        sync_file(path)
    sync_file(folder)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text and forces it to the disk."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Writes readable JSON, in the given key order, and forces it to the disk."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json_object(path: Path, error: type[ValueError]) -> dict[str, Any]:
    """The JSON object in `path`; raises `error` naming the file when it is missing or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path} does not exist.") from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} is not valid JSON: {reason}.") from None
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def sha256_of(path: Path, heard: Heard = unheard) -> str:
    """Hexadecimal SHA-256 of a file's contents; `heard` is told the bytes of each piece that was read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            heard(len(chunk))
    return digest.hexdigest()
