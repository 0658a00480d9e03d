"""Folders with a manifest: the size and SHA-256 of every file, and of the manifest itself.

`seal` is the last write before a folder is published; `check` is the first read after it is found.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from model.files.safe_io import Heard, read_json_object, sha256_of, sync_file, sync_tree, unheard, write_json

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


def seal(folder: Path, heard: Heard = unheard) -> None:
    """Forces all files of `folder` to the disk, then writes its manifest."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path, heard)} for path in sorted(folder.iterdir())
    }
    sync_tree(folder)
    manifest = {"format": FORMAT_VERSION, "files": files}
    write_json(folder / MANIFEST, manifest | {"sha256": _digest(manifest)})
    sync_file(folder)


def check(folder: Path, error: type[ValueError], heard: Heard = unheard) -> dict[str, dict[str, Any]]:
    """The size and hash of each file, all verified; raises `error` naming the first that is missing or altered."""
    manifest = read_json_object(folder / MANIFEST, error)
    expected = manifest.pop("sha256", None)
    if expected != _digest(manifest):
        raise error(f"{folder / MANIFEST} has been altered: its SHA-256 is not the recorded one.")
    if manifest["format"] != FORMAT_VERSION:
        raise error(f"{folder / MANIFEST} has format {manifest['format']}; this version reads {FORMAT_VERSION}.")
    for name, entry in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != entry["bytes"]:
            raise error(f"{path} ends at byte {size} instead of {entry['bytes']}.")
        if sha256_of(path, heard) != entry["sha256"]:
            raise error(f"{path} has been altered: its SHA-256 is not the recorded one.")
    return manifest["files"]


def folder_digest(folder: Path, error: type[ValueError]) -> str:
    """SHA-256 over what `check` has verified: equal digests mean equal files."""
    return _digest(check(folder, error))


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
