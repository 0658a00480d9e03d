"""A published model: a folder that Hugging Face tools can open, plus `potstill.json`, which proves it whole.

Publishing: staging folder -> files -> fsync -> manifest -> fsync -> rename. The manifest comes last and names the
SHA-256 of every other file, so a folder without a valid manifest does not exist, whatever a crash left behind.

One process publishes a given folder at a time; the lock of the run directory sees to that.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from model.files.safe_io import Heard, sha256_of, sync_file, sync_tree, write_text

MANIFEST_NAME = "potstill.json"
FORMAT_VERSION = 1
READERS = ("transformers", "vLLM")
"""Other programs that open folders in Hugging Face's layout."""
RECORDED_PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers")


class ArtifactError(ValueError):
    """A folder that is not a whole, unaltered artifact; the sentence names the file."""


@dataclass(frozen=True)
class FileRecord:
    """What one file must hold: hexadecimal SHA-256 of its contents and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """What an artifact holds and where it came from."""

    stage: str
    """The kind of stage that published it, such as "distill"."""
    recipe: dict[str, Any]
    """The stage's part of the resolved recipe."""
    parents: tuple[str, ...]
    """Digests of the artifacts it was made from."""
    files: dict[str, FileRecord]
    """Every file but the manifest, by its path inside the folder with forward slashes."""
    gates: dict[str, Any]
    """Each gate's bound, measured value and verdict."""
    versions: dict[str, str]
    created: str
    """UTC time of publishing, ISO 8601."""
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """Identity of the artifact: the same stage, recipe, parents and file contents give the same digest.

        Time, library versions and measured gate values are left out: a repetition that gave the same files is the same.
        """
        identity = asdict(self)
        for name in ("created", "versions", "gates"):
            del identity[name]
        return _hash_of(identity)

    def repeatable(self) -> "Manifest":
        """What any repetition says too, of the same digest: for an artifact that becomes files of another one."""
        return replace(self, created="", versions={}, gates={})

    def to_json(self) -> str:
        """The one spelling of this manifest, closed by a hash over all of it."""
        fields = asdict(self)
        return json.dumps(fields | {"manifest_sha256": _hash_of(fields)}, indent=2, sort_keys=True) + "\n"


def publish(
    folder: str | Path,
    write: Callable[[Path], None],
    *,
    stage: str,
    recipe: Mapping[str, Any],
    parents: Sequence[str] = (),
    gates: Mapping[str, Any] | None = None,
) -> Manifest:
    """Lets `write` fill an empty folder and gives it the name `folder` once everything in it is on the disk.

    An artifact that already has the name is replaced. When anything fails, the name keeps what it had and the error
    goes on to the caller. Folders that a killed process left beside the target are cleared away first.
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging, retired = _beside(folder, "staging"), _beside(folder, "retired")
    _recover(folder, staging, retired)
    staging.mkdir()
    try:
        write(staging)
        manifest = Manifest(
            stage=stage,
            recipe=_plain_json(recipe, "recipe"),
            parents=tuple(parents),
            files={name: _record(staging / name) for name in sorted(_file_names(staging))},
            gates=_plain_json(gates or {}, "gates"),
            versions=_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        sync_tree(staging)
        write_text(staging / MANIFEST_NAME, manifest.to_json())
        sync_file(staging)
        _move_into_place(staging, folder, retired)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    shutil.rmtree(retired, ignore_errors=True)
    return manifest


def open_artifact(folder: str | Path, *, verify: bool = True, heard: Heard = lambda num_bytes: None) -> Manifest:
    """Reads the manifest and checks that the folder holds exactly the files it names.

    With `verify`, the SHA-256 of every file is computed anew, and `heard` told how far; else names and sizes are read.
    Raises ArtifactError naming the first file that is missing, extra, of another size or altered.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder / MANIFEST_NAME)
    present = _file_names(folder)
    if missing := sorted(manifest.files.keys() - present):
        raise ArtifactError(f"{folder / missing[0]} is missing, though {MANIFEST_NAME} names it.")
    if extra := sorted(present - manifest.files.keys()):
        raise ArtifactError(f"{folder / extra[0]} is not named in {MANIFEST_NAME}; an artifact holds nothing else.")
    for name, record in manifest.files.items():
        _check_file(folder / name, record, heard if verify else None)
    return manifest


def is_artifact(folder: str | Path) -> bool:
    """Whether the folder has a valid manifest and the files it names, by name and size; contents are not hashed."""
    try:
        open_artifact(folder, verify=False)
    except ArtifactError:
        return False
    return True


def model_card(
    *,
    name: str,
    stage: str,
    recipe: Mapping[str, Any],
    parents: Mapping[str, str],
    metrics: Mapping[str, Any],
    readers: Sequence[str] = READERS,
) -> str:
    """The text of an artifact's README.md: lineage, metrics and how to serve it.

    `parents` maps a parent's name to its digest or source; `metrics` maps a metric's name to its value; `readers`
    are the other programs that open it. The text depends on nothing else, so that the same artifact always has the same
    card.
    """
    library = "transformers" if "transformers" in readers else "potstill"
    sections = [
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [potstill]\n---",
        f"# {name}",
        f"Made by the `{stage}` stage of potstill.",
        "## Lineage\n\n" + _table(("parent", "digest or source"), parents),
        "## Metrics\n\n" + _table(("metric", "value"), metrics),
        "## Recipe\n\n```json\n" + json.dumps(recipe, indent=2, ensure_ascii=False) + "\n```",
        "## Use\n\n```sh\npotstill serve PATH      # this folder\n```\n\n"
        + (
            f"The folder also opens in {' and '.join(readers)}."
            if readers
            else "Only potstill reads it: no other tool knows layers such as some of its own."
        ),
    ]
    return "\n\n".join(sections) + "\n"


def _table(header: tuple[str, str], rows: Mapping[str, Any]) -> str:
    if not rows:
        return "None."
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    lines += [f"| {key} | {f'{value:.6g}' if isinstance(value, float) else value} |" for key, value in rows.items()]
    return "\n".join(lines)


def _beside(folder: Path, purpose: str) -> Path:
    return folder.with_name(f".{folder.name}.{purpose}")


def _recover(folder: Path, staging: Path, retired: Path) -> None:
    """Puts back an artifact that a kill caught between its two renames, and drops what is left of staging."""
    if retired.exists():
        if folder.exists():
            shutil.rmtree(retired)
        else:
            os.replace(retired, folder)
    if staging.exists():
        shutil.rmtree(staging)


def _move_into_place(staging: Path, folder: Path, retired: Path) -> None:
    """A folder with files in it cannot be renamed over, so the old one steps aside first and returns on failure."""
    if folder.exists():
        os.replace(folder, retired)
    try:
        os.replace(staging, folder)
    except BaseException:
        if retired.exists():
            os.replace(retired, folder)
        raise
    sync_file(folder.parent)


def _read_manifest(path: Path) -> Manifest:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path.parent} is not an artifact: it has no {MANIFEST_NAME}.") from None
    except UnicodeDecodeError:
        raise ArtifactError(f"{path} is damaged: it is not UTF-8.") from None
    try:
        fields = json.loads(text)
        version = fields["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ArtifactError(f"{path} is damaged: it is not a manifest in JSON.") from None
    if version != FORMAT_VERSION:
        raise ArtifactError(f"{path} has format version {version!r}; this release reads version {FORMAT_VERSION}.")
    try:
        del fields["manifest_sha256"]
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        manifest = Manifest(files=files, parents=tuple(fields.pop("parents")), **fields)
        intact = manifest.to_json() == text
    except (KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise ArtifactError(f"{path} is damaged: its contents do not match its own hash.")
    return manifest


def _check_file(path: Path, record: FileRecord, heard: Heard | None) -> None:
    size = path.stat().st_size
    if size != record.size:
        raise ArtifactError(f"{path} has {size} bytes; {MANIFEST_NAME} says {record.size}.")
    if heard is not None and sha256_of(path, heard) != record.sha256:
        raise ArtifactError(f"{path} is damaged: its SHA-256 differs from the one in {MANIFEST_NAME}.")


def _file_names(folder: Path) -> set[str]:
    """Paths of all files below `folder` but the manifest, relative to it."""
    names = set()
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ArtifactError(f"{path} is not a regular file; artifacts hold regular files only.")
        if path.is_file():
            names.add(path.relative_to(folder).as_posix())
    return names - {MANIFEST_NAME}


def _record(path: Path) -> FileRecord:
    return FileRecord(sha256=sha256_of(path), size=path.stat().st_size)


def _plain_json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A copy of `value` as JSON would return it, so that what is written equals what is read back."""
    try:
        return json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as reason:
        raise ArtifactError(f"The {what} of an artifact must be plain JSON values: {reason}.") from None


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("potstill", *RECORDED_PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
