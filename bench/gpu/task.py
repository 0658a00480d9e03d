"""What a part is asked for, and the ways in which it may end without all its figures."""

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """What a part is asked for."""

    results: str
    """Folder of all results."""
    tiny: bool
    seconds: float
    """After which the part is killed."""
    again: bool = False
    """Measure what it has found in earlier runs anew."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.results)

    def measured(self, part: str) -> dict[str, float]:
        """Figures of ours that an earlier part of this run has found, by name."""
        path = part_file(self.folder, part)
        figures = json.loads(path.read_text())["figures"] if path.exists() else []
        return {figure["name"]: figure["ours"] for figure in figures if figure["ours"] is not None}


class NotDone(Exception):
    """A part that ends in another way than by finding all its figures; those that it has found stay."""

    status = "failed"


class Unfinished(NotDone):
    """It was out of time, and goes on where it stopped when it is started again."""

    status = "unfinished"


class Skipped(NotDone):
    """Something that it needs is not here."""

    status = "skipped"


def part_file(results: Path, part: str) -> Path:
    return results / "gpu" / f"{part}.json"


def need(*modules: str) -> None:
    """Raises Skipped where one of these is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise Skipped(f"needs {', '.join(missing)}")
