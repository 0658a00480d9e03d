"""Files that a crash leaves whole."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file; a crash leaves the old content or the new."""
    staging = path.with_name(f".{path.name}.staging")
    with open(staging, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, path)
