"""`potstill plan`: what each training stage of a recipe will hold in memory, before a weight is loaded or a GPU used.

What serving takes says pipeline/plan_serving.py.

The arithmetic is that of model/training_memory.py, for one process on a GPU. Models are known by their configurations;
what a stage publishes has the shape that its settings say. Time is not known by arithmetic: where it is asked for, some
steps of each stage are taken here, on random weights and its own data.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from model.config import ModelConfig
from model.cost import GPUS, Gpu
from model.formats.base import WeightFormat
from model.mesh import gpus
from model.sharded_memory import smallest_shards
from model.training_memory import Memory, Setup, largest_micro_batch
from pipeline.errors import UserError
from pipeline.report.section import Table
from pipeline.schema import DataSource, Recipe, Stage
from pipeline.stages.base import kind_of
from train.progress import as_duration

log = logging.getLogger(__name__)

MIB, GIB = 2**20, 2**30
COMMON_GIB = (16, 24, 48, 80, 141)
MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(GiB|GB)")
PARTS = {
    "weights": "weights",
    "adapters": "adapters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "loss": "logits and loss",
    "peak": "peak",
    "host": "host memory",
    "checkpoint": "a checkpoint, in host memory and on disk",
}


@dataclass(frozen=True)
class StagePlan:
    """One stage that trains."""

    name: str
    setup: Setup
    memory: Memory
    data: str
    """In the recipe's name."""
    sequence_length: int
    seconds: float | None = None
    """Its steps on this machine, if they were timed; infinite where its memory does not hold one."""
    measuring_seconds: float | None = None
    """Likewise what passes held-out text."""


def plan_recipe(recipe: Recipe, cache: Path) -> list[StagePlan]:
    """`stage_plans`; UserError where there are none, and nothing is served either."""
    plans = stage_plans(recipe, cache)
    if not plans and recipe.serve is None:
        raise UserError(f"No stage of the recipe {recipe.name} trains, so there is nothing to plan.")
    return plans


def stage_plans(
    recipe: Recipe, cache: Path, imported: Mapping[str, ModelConfig] = MappingProxyType({})
) -> list[StagePlan]:
    """The stages that train, in order. `imported`: what is known of models, by the stage that has them already.

    Raises UserError or ValueError when a model cannot be found, or a stage asks for more than its model has.
    """
    shapes: dict[str, ModelConfig] = {}
    makers: dict[str, Stage] = {}
    plans = []

    def formats_of(model: str | None) -> Mapping[str, WeightFormat[Any]]:
        maker = makers.get(model or "")
        if maker is None or maker.name in imported:
            return {}
        return kind_of(maker.kind).formats(maker.config, shapes, cache)

    for stage in recipe.plan():
        kind = kind_of(stage.kind)
        if formats_of(origin := kind.starts_from(stage.config)):
            raise UserError(f"{stage.name}: {origin} is quantized already; name the model that it was made from.")
        setup, data = kind.setup(stage.config, shapes), kind.data(stage.config)
        shape = imported.get(stage.name) or kind.shape(stage.config, shapes, cache)
        if setup is not None and data is not None:
            source = recipe.data_set(data)
            setup = replace(
                setup,
                teacher_formats=formats_of(kind.teacher(stage.config)),
                whole_documents=setup.whole_documents or _learns_from_stored(stage.config, source),
            )
            plans.append(StagePlan(stage.name, setup, setup.memory(), data, source.sequence_length))
        if stage.out is not None and shape is not None:
            shapes[stage.out], makers[stage.out] = shape, stage
    return plans


def _learns_from_stored(config: Any, source: DataSource) -> bool:
    """Whether what its teacher would say lies with the data."""
    loss = getattr(config, "loss", None)
    return source.has_distributions and loss is not None and loss.kind != "cross_entropy"


def on_gpus(plans: Sequence[StagePlan], gpus: int, budgets: Sequence[int]) -> list[StagePlan]:
    """The same on so many GPUs, each stage in the fewest shards that fit their memory; in all of them if none do.

    Raises UserError where there is not one memory to fit.
    """
    if gpus < 1 or len(budgets) != 1:
        raise UserError(f"--gpus {gpus} needs a number of GPUs and their memory, like --gpus 8 --gpu-memory 80GiB.")
    placed = []
    for plan in plans:
        whole = replace(plan.setup, processes=gpus, shards=gpus)
        setup = smallest_shards(plan.setup, gpus, budgets[0]) or whole
        placed.append(replace(plan, setup=setup, memory=setup.memory()))
    return placed


def timed(plans: Sequence[StagePlan], recipe: Recipe, cache: Path) -> list[StagePlan]:
    """The same with the time that they take on this machine, on the recipe's data where no stage makes them.

    Raises UserError for a plan of several processes, and ValueError as training would for data that cannot be read.
    """
    if any(plan.setup.processes > 1 for plan in plans):
        raise UserError("--time takes steps in this one process; leave --gpus out.")
    from pipeline.data import data_sets
    from pipeline.measure.training_time import measuring_seconds, random_data, random_models, training_seconds
    from train.loop import MemoryShortageError

    read = {data_set.name: data_set.data for data_set in data_sets(recipe, cache)}
    found = []
    for plan in plans:
        log.info("%s: timing a few steps on random weights", plan.name)
        setup, length, models = plan.setup, plan.sequence_length, random_models(plan.setup)
        data = read.get(plan.data) or random_data(setup, length)
        try:
            seconds = training_seconds(setup, models, data.train, length)
            measuring = measuring_seconds(setup, models, data.held_out, length)
        except MemoryShortageError:
            seconds = measuring = math.inf
        found.append(replace(plan, seconds=seconds, measuring_seconds=measuring))
    return found


# --- showing ----------------------------------------------------------------------------------------------------------


def gpu_named(name: str | None) -> Gpu | None:
    """What is known of the GPU that is asked for; UserError for another one."""
    if name is not None and name.lower() not in GPUS:
        raise UserError(f"--gpu is {name!r}; known are {', '.join(GPUS)}.")
    return None if name is None else GPUS[name.lower()]


def budgets_of(gpu_memory: str | None, gpu: Gpu | None = None) -> list[int]:
    """The memories to fit, in bytes: the one asked for, else that of `gpu` or of this machine's, else common ones."""
    if gpu_memory is not None:
        match = MEMORY.fullmatch(gpu_memory.strip())
        if match is None or not float(match[1]):
            raise UserError(f"--gpu-memory is {gpu_memory!r}; write it like 80GiB or 24GB.")
        return [int(float(match[1]) * (GIB if match[2] == "GiB" else 10**9))]
    if gpu is not None:
        return [gpu.memory]
    if found := gpus():
        return [found[0].total_memory]
    return [size * GIB for size in COMMON_GIB]


def plan_table(plans: Sequence[StagePlan], budgets: Sequence[int]) -> Table:
    """A column a stage: memory, in MiB where it is small, and for each budget the largest micro-batch in tokens."""
    lines, small = [], max(plan.memory.peak for plan in plans) < GIB
    unit, in_bytes = ("MiB", MIB) if small else ("GiB", GIB)
    for part, words in PARTS.items():
        sizes = [getattr(plan.memory, part) for plan in plans]
        if any(sizes):
            lines.append([words, *(f"{size / in_bytes:,.2f}" for size in sizes)])
    if any(plan.setup.processes > 1 for plan in plans):
        lines.append(_meshes(plans, max(budgets)))
    lines.append(["micro-batch, tokens", *(f"{plan.setup.training.micro_batch_tokens:,}" for plan in plans)])
    if any(plan.seconds is not None for plan in plans):
        lines.append(["its steps on this machine", *(_duration(plan.seconds) for plan in plans)])
        lines.append(["held-out text beside them", *(_duration(plan.measuring_seconds) for plan in plans)])
    for budget in budgets:
        cells = [_largest(plan, budget) for plan in plans]
        lines.append([f"largest in {budget / GIB:.4g} GiB", *cells])
    return Table(lines, [unit, *(plan.name for plan in plans)])


def _meshes(plans: Sequence[StagePlan], budget: int) -> list[str]:
    """The sizes that accelerate's configuration takes: whoever shares a micro-batch holds the weights together too."""
    meshes = [_sizes(plan.setup) for plan in plans]
    names = [name for name in meshes[0] if name in ("replicate", "shard") or any(sizes[name] > 1 for sizes in meshes)]
    cells = [" × ".join(str(sizes[name]) for name in names) for sizes in meshes]
    fits = ["" if plan.memory.peak <= budget else ", does not fit" for plan in plans]
    return [f"mesh, {' × '.join(names)}", *map("".join, zip(cells, fits, strict=True))]


def _sizes(setup: Setup) -> dict[str, int]:
    together = setup.context * setup.tensor
    sizes = {"replicate": setup.processes // setup.shards, "shard": setup.shards // together}
    return sizes | {"context": setup.context, "tensor": setup.tensor}


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return as_duration(seconds) if math.isfinite(seconds) else "memory is short"


def _largest(plan: StagePlan, budget: int) -> str:
    tokens = largest_micro_batch(plan.setup, budget)
    return f"{tokens:,}" if tokens >= plan.sequence_length else "does not fit"


def note(plans: Sequence[StagePlan]) -> str:
    """What the table's figures mean."""
    text = (
        "Tensors of one process on a GPU; driver and allocator come on top. The parts do not all exist at once, so the "
        "peak is below their sum. A micro-batch may be one sequence, so its largest size is also the longest context"
    )
    limits = {plan.setup.model.num_positions for plan in plans}
    if any(plan.setup.shards > 1 for plan in plans):
        text += (
            ". A teacher's embeddings and head are whole in every process. Calibration and parity have a layer at a "
            "time, and what is measured lies in shards. Behind training the main process has what was trained whole, "
            "in host memory"
        )
    if any(plan.setup.context > 1 for plan in plans):
        text += ". Where tokens are divided (context), a micro-batch counts as one document"
    if any(plan.seconds is not None for plan in plans):
        text += (
            ". Time is that of training, and of the held-out text before, during and after it, in one process: what "
            "calibrates, converts or loads, and what a student writes itself, come on top; routers that let tokens "
            "pass by take less"
        )
    return f"{text} (the model knows {', '.join(f'{limit:,}' for limit in sorted(limits))} positions)."
