"""Where measurements go: `metrics.jsonl` always, wandb if asked for.

The local file comes first and holds only what the same run would measure again: a resumed run cuts it back to its
checkpoint's position and writes the same lines once more. Wall-clock figures go to wandb and to the progress display.
wandb is a guest: it is imported only when it is used, and no outage of it stops or holds up training.
"""

import contextlib
import json
import logging
import math
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from model.files.safe_io import write_json

log = logging.getLogger(__name__)

WandbMode = Literal["online", "offline", "disabled"]
METRICS = "metrics.jsonl"
WANDB_RUN = "wandb-run.json"
WANDB_INIT_TIMEOUT_S = 10
WANDB_FINISH_TIMEOUT_S = 10


class Tracker:
    """Records the measurements of one stage; used by process 0 only. Nothing is opened before the first `start`."""

    def __init__(
        self,
        folder: Path,
        *,
        run_name: str,
        job_type: str,
        wandb: WandbMode = "disabled",
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """wandb shows `run_name` with `job_type` (the stage) inside `group` (the pipeline run), and its `config`."""
        self.folder, self.run_name, self.job_type = Path(folder), run_name, job_type
        self.wandb, self.group, self.config = wandb, group, dict(config or {})
        self.metrics_path = self.folder / METRICS
        self._file: IO[str] | None = None
        self._run: Any = None

    def start(self, position: int = 0) -> None:
        """Opens the log for appending after cutting it back to `position`, which `sync` returned in an earlier run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._file is not None:
            self._file.close()
        self._file = self.metrics_path.open("a", encoding="utf-8")
        if self._file.tell() < position:
            log.warning("%s lost its end: lines of steps before the resumed one are missing.", self.metrics_path)
        self._file.truncate(min(position, self._file.tell()))
        if self.wandb != "disabled" and self._run is None:
            self._run = _start_wandb(self)

    def log(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float] | None = None) -> None:
        """Records `metrics` of a step; `timings` go to wandb only, since no two runs share them."""
        if self._file is None:
            raise ValueError("the tracker must be started before it can log")
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if self._run is not None:
            self._guard("log", lambda: self._run.log({"step": step, **metrics, **(timings or {})}))

    def sync(self) -> int:
        """Forces the log to the disk and returns its size in bytes, for the checkpoint that goes with it."""
        if self._file is None:
            raise ValueError("the tracker must be started before it can be synced")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def finish(self) -> None:
        """Closes the log. A wandb that does not answer is left behind after ten seconds."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._run is not None:
            finishing = threading.Thread(target=self._guard, args=("finish", self._run.finish), daemon=True)
            finishing.start()
            finishing.join(WANDB_FINISH_TIMEOUT_S)
            self._run = None

    def _guard(self, action: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # whatever wandb or its network raises, training goes on
            log.warning("wandb %s failed (%s); no more is sent to it. %s is complete.", action, error, METRICS)
            self._run = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _start_wandb(tracker: Tracker) -> Any:
    """A wandb run with the id that this folder used before; online falls back to offline, and that to nothing."""
    id_path = tracker.folder / WANDB_RUN
    if not id_path.exists():
        write_json(id_path, {"id": secrets.token_hex(8)})
    run_id = json.loads(id_path.read_text(encoding="utf-8"))["id"]
    for mode in ("online", "offline") if tracker.wandb == "online" else ("offline",):
        try:
            import wandb

            run = wandb.init(
                project="potstill",
                id=run_id,
                name=tracker.run_name,
                group=tracker.group,
                job_type=tracker.job_type,
                config=tracker.config,
                dir=str(tracker.folder),
                mode=mode,
                resume="allow" if mode == "online" else None,
                settings=wandb.Settings(init_timeout=WANDB_INIT_TIMEOUT_S, console="off", quiet=True),
            )
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:  # not installed, no login, no network: training needs none of them
            log.warning("wandb cannot start %s (%s)", mode, error)
            _forget_failed_start()
    return None


def _forget_failed_start() -> None:
    """Ends wandb's helper process, which would refuse the same run id a second time."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()
