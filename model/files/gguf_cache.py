"""GGUF files as models to serve: each becomes a folder in the cache once, with its weights as they are stored."""

import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

from model.files.progress import ReadingProgress
from model.files.safe_io import default_cache

log = logging.getLogger(__name__)
_LAYOUT = 1
"""Of what is written; another one writes it anew."""


def folder_of_gguf(path: Path) -> Path:
    """The model folder of a GGUF file that is there. Raises GGUFError for what cannot be read."""
    file = path.resolve()
    folder = default_cache() / "gguf" / f"{file.stem}-{_stamp(file)}"
    if not folder.exists():
        log.info("unpacking %s into %s", path, folder)
        _unpack(file, folder)
    return folder


def _stamp(file: Path) -> str:
    status = file.stat()
    known = f"{_LAYOUT} {file} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _unpack(file: Path, folder: Path) -> None:
    """Beside its place first: nobody ever opens half a folder."""
    from model.formats.gguf.reader import import_gguf_blocks

    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with ReadingProgress(f"unpacking {file.name}", file.stat().st_size) as progress:
            import_gguf_blocks(file, part / "model", progress.heard)
        if not folder.exists():
            (part / "model").rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
