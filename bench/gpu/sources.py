"""Which sources stand behind a figure."""

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTED = ("kernels", "model", "serve", "tests")
"""By the tests that need a GPU."""


@cache
def digest(sources: tuple[str, ...]) -> str:
    """Of all Python and C files below these folders and files of the repository."""
    found = hashlib.sha256()
    roots = [ROOT / source for source in sources]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*.[pch]*"))]
    for path in sorted(path for path in paths if path.suffix in (".py", ".c", ".h")):
        found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]
