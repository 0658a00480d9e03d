"""Settings of the stage `evaluate`."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.measure.suite.tasks import TASKS
from pipeline.schema import Recipe
from pipeline.settings import setting
from pipeline.stages.shared.config import NO_FALL, REFERENCE_BOUNDS, Gate, Speed, nothing_to_bound


@dataclass(frozen=True)
class Harness:
    """Tasks of lm-evaluation-harness, which the extra `eval` installs."""

    tasks: tuple[str, ...] = setting(())
    """Names of tasks, groups or tags."""
    folder: str | None = None
    """Tasks of your own: YAML files, and the Python that they name, which is run."""
    few_shot: int | None = setting(None, range=(0, 1000))
    """Examples before each question; by default what the task says."""
    limit: int | None = setting(None, count=True, range=(1, 1e12))
    """Ask only the first questions of each task."""
    chat: bool = False
    """Put questions in the model's chat template."""


@dataclass(frozen=True)
class Evaluate:
    """Stage: quality, memory and speed of a model, of the model it is compared with, and of the verified pair."""

    model: str = setting(refers="model")
    against: str | None = setting(None, refers="model")
    """The reference: quality is measured relative to it, and it verifies the pair."""
    data: str = setting(refers="data")
    held_out_tokens: int = setting(16_384, count=True, range=(16, 1e12))
    speed: Speed = field(default_factory=Speed)
    suite: tuple[str, ...] = setting((), choices=tuple(TASKS), later=True)
    """Small tasks to put to each model. `code` runs what it writes, as pipeline/measure/suite/sandbox.py says."""
    lm_eval: Harness = setting(Harness(), later=True)
    gate: Gate = field(default_factory=Gate)


def mistakes(config: Evaluate, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Bounds of its gate that compare with what it does not have."""
    missing = {} if config.against else dict.fromkeys(REFERENCE_BOUNDS, "`against` is not set")
    yield from nothing_to_bound(config.gate, missing | NO_FALL)
    if config.lm_eval.tasks and importlib.util.find_spec("lm_eval") is None:
        yield "lm_eval.tasks", "needs lm-evaluation-harness, which `pip install 'potstill[eval]'` brings"
    if config.lm_eval.folder and not Path(config.lm_eval.folder).is_dir():
        yield "lm_eval.folder", f"is {config.lm_eval.folder}, which is no folder"


def task_files(config: Evaluate) -> Any:
    """Sizes and times of the tasks that are read from outside the run: when they change, the models are asked anew."""
    if not config.lm_eval.folder:
        return None
    files = sorted(file for file in Path(config.lm_eval.folder).rglob("*") if file.is_file())
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
