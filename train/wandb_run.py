"""A run of wandb, in a thread of its own: whatever wandb or its network does, nobody waits for it.

wandb is imported only where one is made. What its users set in the environment holds: WANDB_PROJECT, WANDB_DIR and
WANDB_RUN_ID are read here, because potstill has its own values for them; the entity, the key, tags and notes by wandb.
"""

import contextlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from model.files.safe_io import write_json

log = logging.getLogger(__name__)

WandbMode = Literal["online", "offline"]
WANDB_RUN = "wandb-run.json"
INIT_TIMEOUT_S = {"online": 10, "offline": 60}
"""A network may never answer; a disk does, if a loaded machine needs a while to start wandb's own process."""
FINISH_TIMEOUT_S = 30
MOST_WAITING = 10_000
"""Measurements that wait while wandb does not take them: hours of training, a few megabytes."""


class WandbRun:
    """What is given to it reaches wandb in this order, or is lost with one warning."""

    def __init__(
        self,
        folder: Path,
        *,
        mode: WandbMode,
        name: str,
        job_type: str,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        """wandb shows `name` with `job_type` (the stage) inside `group` (the pipeline run), and its `config`.

        A folder keeps its run's id, `run_id` or one drawn at first; so what is interrupted goes on as the same run.
        """
        self.folder, self.name = Path(folder), name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._options: dict[str, Any] = {
            "name": name,
            "job_type": job_type,
            "group": group,
            "config": dict(config or {}),
        }
        self._options |= {"id": _run_id(self.folder, run_id), "project": os.environ.get("WANDB_PROJECT", "potstill")}
        self._options["dir"] = os.environ.get("WANDB_DIR", str(self.folder))
        self._mode = mode
        self._waiting: queue.Queue[Callable[[Any], Any] | None] = queue.Queue(MOST_WAITING)
        self._num_lost = 0
        self._exit_code = 0
        self._thread = threading.Thread(target=self._serve, name="wandb", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, Any]) -> None:
        """A line of measurements, `step` among them."""
        self.do(lambda run: run.log(dict(values)))

    def do(self, action: Callable[[Any], Any]) -> None:
        """Have `action` called with wandb's own run."""
        try:
            self._waiting.put_nowait(action)
        except queue.Full:
            self._num_lost += 1

    def finish(self, exit_code: int = 0, *, patience_s: float | None = None) -> None:
        """End the run as wandb counts it, with all that is still under way.

        A wandb that does not answer is left behind after half a minute, or `patience_s`.
        """
        patience_s = FINISH_TIMEOUT_S if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        self._exit_code = exit_code
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=patience_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("wandb has not answered for %g s: what it did not take of %s is lost.", patience_s, self.name)
        elif self._num_lost:
            log.warning("wandb was too slow: it has %d measurements of %s less.", self._num_lost, self.name)

    def _serve(self) -> None:
        run = self._start()
        while (action := self._waiting.get()) is not None:
            if run is None:
                continue
            try:
                action(run)
            except Exception as error:  # whatever wandb or its network raises, training goes on
                log.warning("wandb failed (%s); no more of %s is sent to it.", error, self.name)
                run = None
        if run is not None:
            with contextlib.suppress(Exception):
                run.finish(exit_code=self._exit_code)

    def _start(self) -> Any:
        """A run of wandb; online falls back to offline, and that to nothing."""
        # Its own telemetry holds up the end of the process, by minutes where a network is slow.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        for mode in ("online", "offline") if self._mode == "online" else ("offline",):
            try:
                import wandb

                settings = wandb.Settings(init_timeout=INIT_TIMEOUT_S[mode], console="off", quiet=True)
                options = self._options | ({"resume": "allow"} if mode == "online" else {})
                run = wandb.init(**options, mode=mode, settings=settings)
                run.define_metric("*", step_metric="step")
            except Exception as error:  # not installed, no login, no network: training needs none of them
                log.warning("wandb cannot start %s (%s)", mode, error)
                _forget_failed_start()
                continue
            if mode == "offline":
                log.info("wandb keeps %s on this disk; `wandb sync %s` sends it", self.name, Path(run.dir).parent)
            return run
        return None


def _run_id(folder: Path, asked: str | None) -> str:
    path = folder / WANDB_RUN
    if asked is not None or not path.exists():
        write_json(path, {"id": asked or secrets.token_hex(8)})
    return str(json.loads(path.read_text(encoding="utf-8"))["id"])


def _forget_failed_start() -> None:
    """Ends wandb's helper process, which would refuse the same run id a second time."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()
