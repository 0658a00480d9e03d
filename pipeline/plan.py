"""`potstill plan`: what each training stage of a recipe will hold in memory, before a weight is loaded or a GPU used.

The arithmetic is that of train/memory.py, for one process on a GPU. Models are known by their configurations; what a
stage publishes has the shape that its settings say.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.config import ModelConfig
from model.lora import LoraConfig
from model.mesh import gpus
from pipeline.errors import UserError
from pipeline.schema import Recipe
from pipeline.stages.distill.config import Distill
from pipeline.stages.gqa.config import Gqa
from pipeline.stages.import_model.run import read_config
from pipeline.stages.mod.config import Mod
from pipeline.stages.mod.run import named_layers
from pipeline.stages.pretrain.config import Pretrain
from pipeline.stages.pretrain.run import model_config
from pipeline.stages.qlora.config import Qlora
from pipeline.stages.shared.config import Training
from pipeline.stages.shared.training import lora_config, training_config
from train.memory import Memory, Setup, largest_micro_batch

GIB = 2**30
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
}


@dataclass(frozen=True)
class StagePlan:
    """One stage that trains."""

    name: str
    setup: Setup
    memory: Memory
    sequence_length: int


def plan_recipe(recipe: Recipe, cache: Path) -> list[StagePlan]:
    """The stages that train, in order.

    Raises UserError when there is none, a model cannot be found, or a stage asks for more than its model has.
    """
    shapes = {name: read_config(source, cache) for name, source in recipe.models.items()}
    plans = []
    for stage in recipe.plan():
        if not isinstance(stage.config, Training):
            continue
        setup = _setup(stage.config, shapes)
        length = recipe.data[stage.config.data].sequence_length
        plans.append(StagePlan(stage.name, setup, setup.memory(), length))
        if stage.out is not None:
            shapes[stage.out] = setup.model
    if not plans:
        raise UserError(f"No stage of the recipe {recipe.name} trains, so there is nothing to plan.")
    return plans


def _setup(stage: Training, shapes: dict[str, ModelConfig]) -> Setup:
    training = training_config(stage)
    if isinstance(stage, Distill):
        return Setup(_pruned(stage, shapes[stage.student.origin]), training, teacher=shapes[stage.teacher])
    if isinstance(stage, Gqa):
        parent = shapes[stage.model]
        narrow = parent.with_kv_heads(stage.layer_kv_heads(parent.num_layers))
        return Setup(narrow, training, teacher=parent, adapter=_merged_adapter(stage), fp32_base=True)
    if isinstance(stage, Pretrain):
        return Setup(model_config(stage.architecture, shapes[stage.tokenizer]), training)
    if isinstance(stage, Mod):  # layers keep as much as without routers: early in training every token passes
        parent = shapes[stage.model]
        routers = _routers(stage, parent.num_layers) if stage.train == "router" else 0
        return Setup(parent, training, teacher=parent, adapter=_merged_adapter(stage), routers=routers, fp32_base=True)
    if isinstance(stage, Qlora):
        return Setup(
            shapes[stage.model],
            training,
            adapter=lora_config(stage.adapter),
            quantization=stage.quantization,
            double_quantization=stage.double_quantization,
        )
    raise UserError(f"There is no memory plan for a stage of the kind {type(stage).__name__.lower()}.")


def _merged_adapter(stage: Gqa | Mod) -> LoraConfig | None:
    """What is trained in place of the weights themselves, if the stage says so."""
    return LoraConfig(rank=stage.adapter_rank) if stage.train == "adapters" else None


def _routers(stage: Mod, num_layers: int) -> int:
    """How many layers have one."""
    return stage.least_important or len(named_layers(stage, num_layers))


def _pruned(stage: Distill, config: ModelConfig) -> ModelConfig:
    """Which layers are kept is not known yet, and all are of one size."""
    count = stage.student.layers or config.num_layers
    if count > config.num_layers:
        raise UserError(f"{stage.student.origin} has {config.num_layers} layers, so {count} cannot be kept.")
    return config.keep_layers(tuple(range(count)))


# --- showing ----------------------------------------------------------------------------------------------------------


def budgets_of(gpu_memory: str | None) -> list[int]:
    """The memories to fit, in bytes: the one asked for, else this machine's GPU's, else common ones."""
    if gpu_memory is not None:
        match = MEMORY.fullmatch(gpu_memory.strip())
        if match is None or not float(match[1]):
            raise UserError(f"--gpu-memory is {gpu_memory!r}; write it like 80GiB or 24GB.")
        return [int(float(match[1]) * (GIB if match[2] == "GiB" else 10**9))]
    if found := gpus():
        return [found[0].total_memory]
    return [size * GIB for size in COMMON_GIB]


def plan_lines(plans: Sequence[StagePlan], budgets: Sequence[int]) -> list[list[str]]:
    """A table: a column a stage; memory, then for each budget the largest micro-batch in tokens."""
    lines = [["GiB", *(plan.name for plan in plans)]]
    for part, words in PARTS.items():
        sizes = [getattr(plan.memory, part) for plan in plans]
        if any(sizes):
            lines.append([words, *(f"{size / GIB:,.2f}" for size in sizes)])
    lines.append(["micro-batch, tokens", *(f"{plan.setup.training.micro_batch_tokens:,}" for plan in plans)])
    for budget in budgets:
        cells = [_largest(plan, budget) for plan in plans]
        lines.append([f"largest in {budget / GIB:.4g} GiB", *cells])
    return lines


def _largest(plan: StagePlan, budget: int) -> str:
    tokens = largest_micro_batch(plan.setup, budget)
    return f"{tokens:,}" if tokens >= plan.sequence_length else "does not fit"


def note(plans: Sequence[StagePlan]) -> str:
    """What the table's figures mean."""
    text = (
        "Tensors of one process on a GPU; driver and allocator come on top. The parts do not all exist at once, so the "
        "peak is below their sum. A micro-batch may be one sequence, so its largest size is also the longest context"
    )
    limits = {plan.setup.model.max_position_embeddings for plan in plans}
    return f"{text} (the model knows {', '.join(f'{limit:,}' for limit in sorted(limits))} positions)."
