"""What would end a run after hours and can be known before it begins: `potstill run` asks first, `potstill plan` too.

Recipes, micro-batches and processes are checked where they are read (pipeline/recipe.py, pipeline/processes.py).
"""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from model.files.checkpoint import load_config
from model.files.safe_io import CheckpointError
from model.mesh import MeshError, training_mesh
from model.sharded_memory import check_divided
from pipeline.errors import UserError
from pipeline.plan import StagePlan, stage_plans
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe
from pipeline.stages.base import kind_of
from train.sources import check_reachable

log = logging.getLogger(__name__)

ROOM = 2.2
"""Free disk over one checkpoint: the one that is kept, the one that is written, and what else a stage leaves."""


def preflight(recipe: Recipe, folder: RunFolder, cache: Path) -> None:
    """Before the first import. Raises ValueError, UserError among it, for what cannot end well; warns of the rest.

    Models that cannot be found, and stages that ask for more than their model has, are found by planning. A model that
    the run has imported need not be found again.
    """
    unfinished = {stage.name for stage in recipe.plan()} - set(_finished(recipe, folder))
    if not unfinished:
        return
    finished = [stage for stage in recipe.plan() if stage.name not in unfinished]
    imports = [stage for stage in finished if not kind_of(stage.kind).in_recipes]
    imported = {}
    for stage in imports:
        with suppress(CheckpointError):  # a damaged one is imported again
            imported[stage.name] = load_config(folder.model(stage))
    for sentence in unreachable(recipe):
        raise UserError(sentence)
    plans = [plan for plan in stage_plans(recipe, cache, imported) if plan.name in unfinished]
    for sentence in long_sequences(plans):
        log.warning("%s", sentence)
    if reason := undivided(plans, training_mesh(None).tensor):
        raise UserError(reason)
    if lack := little_room(plans, folder.path):
        raise UserError(lack)


def _finished(recipe: Recipe, folder: RunFolder) -> Iterator[str]:
    """Names of the stages that have a result, and nothing in the recipe that is other than in its last run: for an
    import its own settings, for any other stage the data, its settings, and those of all before it."""
    try:
        before = folder.recipe()
    except UserError:
        return
    earlier, same = {stage.name: stage for stage in before.plan()}, recipe.data == before.data
    for stage in recipe.plan():
        is_import, unchanged = not kind_of(stage.kind).in_recipes, earlier.get(stage.name) == stage
        same = same and unchanged
        if (unchanged if is_import else same) and (folder.stage(stage) / "result.json").exists():
            yield stage.name


def findings(recipe: Recipe, plans: Sequence[StagePlan]) -> list[str]:
    """The same in sentences, for a run in its usual folder that has not begun."""
    room = little_room(plans, Path("runs") / recipe.name)
    return [*unreachable(recipe), *long_sequences(plans), *([room] if room else [])]


def unreachable(recipe: Recipe) -> Iterator[str]:
    """A sentence for each data set that is nowhere."""
    for name, source in recipe.data.items():
        for part in source.parts() if source.mix else [source]:
            try:
                check_reachable(part)
            except ValueError as reason:
                yield f"data.{name}: {reason}."


def long_sequences(plans: Sequence[StagePlan]) -> Iterator[str]:
    """A sentence for each stage whose texts are longer than its models know positions."""
    for plan in plans:
        models = [plan.setup.model, *([plan.setup.teacher] if plan.setup.teacher is not None else [])]
        known = min(model.num_positions for model in models)
        if plan.sequence_length > known:
            yield (
                f"{plan.name}: the sequence_length of its data is {plan.sequence_length:,}, but its model knows "
                f"{known:,} positions, and computes those beyond badly; give the data at most that."
            )


def undivided(plans: Sequence[StagePlan], tensor: int) -> str | None:
    """A sentence where so many processes cannot divide the layers of a model that a stage trains, or of its teacher."""
    for plan in plans:
        try:
            check_divided(replace(plan.setup, tensor=tensor))
        except MeshError as error:
            return f"{plan.name}: {error}"
    return None


def little_room(plans: Sequence[StagePlan], folder: Path) -> str | None:
    """A sentence where the disk of a run's folder, which need not exist yet, is too full for a stage's checkpoints."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    for plan in plans:
        written = sum(path.stat().st_size for path in (folder / plan.name / "checkpoints").glob("*/*"))
        needed = int(ROOM * plan.memory.checkpoint)
        if free + written < needed:
            return (
                f"{plan.name} needs {needed:,} bytes of disk for its checkpoints ({ROOM} of "
                f"{plan.memory.checkpoint:,}), but {free:,} are free at {there}; free some, or name another --folder."
            )
    return None
