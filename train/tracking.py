"""Where measurements go: `metrics.jsonl` always, wandb if asked for.

The local file comes first and holds only what the same run would measure again: a resumed run cuts it back to its
checkpoint's position and writes the same lines once more. Wall-clock figures go to wandb and to the progress display.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from train.wandb_run import WandbRun

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Tracker:
    """Records the measurements of one stage; used by process 0 only. Nothing is opened before the first `start`."""

    def __init__(self, folder: Path, wandb: WandbRun | None = None) -> None:
        """`wandb` gets the measurements too; whoever made it finishes it."""
        self.folder, self.wandb = Path(folder), wandb
        self.metrics_path = self.folder / METRICS
        self._file: IO[str] | None = None

    def start(self, position: int = 0) -> None:
        """Opens the log for appending after cutting it back to `position`, which `sync` returned in an earlier run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._file is not None:
            self._file.close()
        self._file = self.metrics_path.open("a", encoding="utf-8")
        if self._file.tell() < position:
            log.warning("%s lost its end: lines of steps before the resumed one are missing.", self.metrics_path)
        self._file.truncate(min(position, self._file.tell()))

    def log(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float] | None = None) -> None:
        """Records `metrics` of a step; `timings` go to wandb only, since no two runs share them."""
        if self._file is None:
            raise ValueError("the tracker must be started before it can log")
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if self.wandb is not None:
            self.wandb.log({"step": step, **metrics, **(timings or {})})

    def sync(self) -> int:
        """Forces the log to the disk and returns its size in bytes, for the checkpoint that goes with it."""
        if self._file is None:
            raise ValueError("the tracker must be started before it can be synced")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def finish(self) -> None:
        """Closes the log."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
