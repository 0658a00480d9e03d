"""A run's folder: where everything of a run lies, its lock, and how names in its recipe become artifact paths.

runs/NAME/
  recipe.yaml             the resolved recipe, the source of truth
  00-teacher/ 01-distill/ one folder a stage
    inputs.json           digests of what decides the work; equal on resume, else the stage starts afresh
    checkpoints/          resumable training state
    candidate/            a model that is measured but not published, or was refused by its gate
    model/                the artifact it published
    data/                 or the data set that it made
    metrics.jsonl         every logged step
    result.json           quality, memory, speed, cost, gate
  previous/               what a changed recipe replaced, as 01-distill.1 and so on; nothing here is ever removed
  report.html  log.txt  lock
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.files.artifact import MANIFEST_NAME, ArtifactError, open_artifact
from model.files.sources import is_source, model_folder, source_name
from pipeline.errors import RunLockedError, UserError
from pipeline.files import write_atomically
from pipeline.recipe import load_recipe, recipe_to_yaml
from pipeline.results import Result
from pipeline.schema import DATA_NAME, Recipe, Stage
from pipeline.stages.base import read_result

RECIPE_NAME = "recipe.yaml"


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Making one touches nothing."""

    path: Path

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    def stage(self, stage: Stage) -> Path:
        """The folder of one stage."""
        return self.path / stage.name

    def model(self, stage: Stage) -> Path:
        """Where the stage publishes its model."""
        return self.stage(stage) / "model"

    def data(self, stage: Stage) -> Path:
        """Where the stage writes the data set that it makes."""
        return self.stage(stage) / DATA_NAME

    def move_aside(self, stage: Stage, *, result_only: bool = False) -> Path:
        """Moves what a stage has made to previous/, under the next free number, and returns where that is.

        `result_only`: the model, its result and a copy of the log; training state stays, to be gone on from.
        """
        folder, previous = self.stage(stage), self.path / "previous"
        previous.mkdir(exist_ok=True)
        numbers = [path.suffix[1:] for path in previous.glob(f"{stage.name}.*")]
        target = previous / f"{stage.name}.{1 + max((int(one) for one in numbers if one.isdecimal()), default=0)}"
        if not result_only:
            folder.rename(target)
            return target
        target.mkdir()
        for name in ("model", DATA_NAME, "result.json"):
            if (folder / name).exists():
                (folder / name).rename(target / name)
        if (folder / "metrics.jsonl").exists():
            shutil.copy2(folder / "metrics.jsonl", target)
        return target

    def recipe(self) -> Recipe:
        """The recipe that the run was last started with."""
        if not is_run(self.path):
            raise UserError(f"{self.path} is no run folder: it has no {RECIPE_NAME}.")
        return load_recipe(self.path / RECIPE_NAME)

    def write_recipe(self, recipe: Recipe) -> None:
        """Keeps the resolved recipe."""
        write_atomically(self.path / RECIPE_NAME, recipe_to_yaml(recipe).encode())

    def results(self, recipe: Recipe) -> list[Result[Any]]:
        """Results of the recipe's stages that have one, in order."""
        found = (read_result(self.stage(stage)) for stage in recipe.plan())
        return [result for result in found if result is not None]

    def artifact(self, recipe: Recipe, name: str) -> Path:
        """The folder of the model that the recipe calls `name`. Raises UserError when it is not there yet."""
        stages = {stage.out: stage for stage in recipe.plan() if stage.out}
        if name not in stages:
            raise UserError(f"The run {self.path} has no model {name!r}; it has {', '.join(stages)}.")
        folder = self.model(stages[name])
        try:
            open_artifact(folder, verify=False)
        except ArtifactError as error:
            if (folder / MANIFEST_NAME).exists():
                raise UserError(f"The model {name!r} of the run {self.path} cannot be used: {error}") from None
            raise UserError(
                f"The run {self.path} is not finished: it has no model {name!r} yet; `potstill run` with its recipe "
                "goes on from where it stopped."
            ) from None
        return folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run's lock. The system drops it when the process ends, however it ends, so none is ever stale.

        Raises RunLockedError, naming the holder, when another process has it.
        """
        import fcntl

        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise RunLockedError(f"{self.path} is in use by {holder}; one run at a time.") from None
            file.truncate(0)
            file.write(f"process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
            file.flush()
            yield


def is_run(path: Path) -> bool:
    """Whether the folder is one that `potstill run` made."""
    return (path / RECIPE_NAME).is_file()


@dataclass(frozen=True)
class Served:
    """Folders of what to serve, and the name that clients know it by."""

    model: str
    verify: str | None
    name: str | None
    """The run's name, or that of a file, wheel or model on the hub; None for a model folder, which names itself."""
    kv_cache_dtype: str = "auto"
    """As the run's recipe wants it."""


def resolve_served(given: str, verify: str | None = None) -> Served:
    """What `serve`, `generate`, `chat` and `export` were told → folders.

    `given` is a run folder, whose recipe's `serve:` decides, or any source of model/files/sources.py; `verify` is one
    of the latter or, with a run folder, the name of one of its models. Raises UserError or SourceError for others.
    """
    path = Path(given)
    if not is_run(path):
        name = source_name(given)
        return Served(model_folder(given), verify and model_folder(verify), None if name == given else name)
    folder = RunFolder(path)
    recipe = folder.recipe()
    if recipe.serve is None:
        raise UserError(f"The recipe of {path} has no `serve:`; give the folder of one of its models instead.")
    verify = verify or recipe.serve.verify
    if verify is not None:
        verify = model_folder(verify) if is_source(verify) else str(folder.artifact(recipe, verify))
    model = str(folder.artifact(recipe, recipe.serve.model))
    return Served(model, verify, recipe.name, recipe.serve.kv_cache_dtype)
