"""What a training step takes in each of the processes that torchrun has started, beside what is planned.

torchrun --nproc_per_node 4 -m tests.train.memory_process FOLDER SHARDS[xCONTEXT|tTENSOR] LAYERS NAME …
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from compress.mod import add_routers
from compress.quantize.round_to_nearest import formats_of_layers
from model.config import MixtureOfDepths, ModelConfig
from model.formats.base import WeightFormat
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4
from model.lora import LoraConfig
from model.mesh import Mesh, this_rank
from model.routed import routed_layers
from model.training_memory import Rounding, Setup
from model.transformer import Transformer
from pipeline.measure.training_time import objective_by_settings, random_documents, random_models
from tests.memory import peak_resident_bytes, return_what_is_freed
from tests.tiny import tiny_config
from tests.train.sharded_process import ask_for, held_bytes, sizes_of
from tests.train.test_memory import PreferenceTraining, training
from train.accelerator import this_accelerator
from train.loop import Trainer
from train.objectives import RoutedTraining, RoutingConfig
from train.preference import PreferenceTuning
from train.sharding import split_frozen
from train.tracking import Tracker

FEW, MANY = 64, 256
"""Tokens of a micro-batch."""
MOST_MICRO_BATCHES = 4
"""In a step; else each process takes two, of which the second adds to gradients."""


def steps(tokens: int = FEW, **changes: Any) -> Any:
    return training(tokens, **changes)


def config(hidden_size: int, layers: int) -> ModelConfig:
    return tiny_config(
        hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_layers=layers, num_query_heads=8, head_dim=64,
        max_position_embeddings=1024,
    )  # fmt: skip


def trained(training: Any, *, taught: bool = False, **changes: Any) -> Callable[[int], Setup]:
    """All weights of a model of so many layers."""
    return lambda layers: Setup(
        config(448, layers), training, teacher=config(448, layers) if taught else None, **changes
    )


def taught_by(format: WeightFormat[Any]) -> Callable[[int], Setup]:
    """A small student, and a teacher of so many layers."""

    def setup(layers: int) -> Setup:
        teacher = config(768, layers)
        return Setup(config(448, 2), steps(), teacher=teacher, teacher_formats=formats_of_layers(teacher, format))

    return setup


def adapted(training: Any, *, taught: bool = False, **changes: Any) -> Callable[[int], Setup]:
    """A frozen base of half so many layers, at least two, which are wide."""

    def setup(layers: int) -> Setup:
        model = config(768, max(2, layers // 2))
        changes.setdefault("adapter", LoraConfig(rank=16))
        return Setup(model, training, teacher=model if taught else None, **changes)

    return setup


def rounded(trained: Any) -> Callable[[int], Setup]:
    def setup(layers: int) -> Setup:
        model = config(448, layers)
        return Setup(model, steps(), teacher=model, rounding=Rounding(trained, formats_of_layers(model, Int4(32)), 8))

    return setup


SETUPS = {
    "language": trained(steps()),
    "8 bit": trained(steps(optimizer="adamw_8bit")),
    "recomputed": trained(steps(4 * FEW, activation_checkpointing=True)),
    "long": trained(steps(MANY)),
    "long, recomputed": trained(steps(2 * MANY, activation_checkpointing=True)),
    "distill": trained(steps(), taught=True),
    "distill from NF4": taught_by(NF4()),
    "distill from INT4": taught_by(Int4(32)),
    "gqa": trained(steps(activation_checkpointing=True), taught=True, fp32_base=True),
    "gqa, adapters": adapted(steps(), taught=True, fp32_base=True),
    "mod": trained(steps(), taught=True, fp32_base=True, routed=True),
    "mod, routers": adapted(steps(), taught=True, adapter=None, routers=2, fp32_base=True, routed=True),
    "sft": adapted(steps()),
    "dpo": adapted(PreferenceTraining(**asdict(steps(2 * FEW))), whole_documents=True),
    "qlora": adapted(steps(), quantization="nf4"),
    "qlora, long": adapted(steps(MANY), quantization="nf4"),
    "qlora, long, recomputed": adapted(steps(MANY, activation_checkpointing=True), quantization="nf4"),
    "quantize, scales": rounded("scales"),
    "quantize, low rank": rounded("low_rank"),
    "quantize, all": rounded("all"),
}
"""Of each way to train one whose models weigh more than what a process takes anyway, by their layers."""
BRIEF = 2
"""Layers that are run before those that are measured: a process allocates then what it does once for all."""


def measure(folder: Path, name: str, setup: Setup) -> dict[str, int]:
    """Two steps, of which nothing is saved."""
    model, teacher = random_models(setup)
    if name.startswith("mod"):
        model = routed(model, alone=setup.routers > 0)
    if teacher is not None and setup.shards > 1:
        mesh = Mesh(setup.processes // setup.shards, setup.shards // setup.tensor, tensor=setup.tensor)
        split_frozen(teacher.requires_grad_(False), mesh, torch.device("cpu"))
    objective: Any = objective_by_settings(setup.training, teacher)
    paired = isinstance(objective, PreferenceTuning)
    length = setup.training.micro_batch_tokens // (2 if paired else 1)
    together = setup.context * setup.tensor
    shards: dict[str, Any] = {"dp_shard_size": None if together > 1 else setup.shards}
    trainer = Trainer(
        model,
        RoutedTraining(objective, RoutingConfig(0.5)) if name.startswith("mod") else objective,
        random_documents(setup.model.vocab_size, length, paired=paired),
        replace(setup.training, **shards),  # type: ignore[type-var]
        folder=folder,
        sequence_length=length,
        tracker=Tracker(folder),
    )
    trainer._save = trainer.parallel.whole = lambda: None  # type: ignore[method-assign]
    loaded = held_bytes(trainer.model) + (held_bytes(teacher) if teacher is not None else 0)
    plan, peak = setup.memory(), loaded + peak_resident_bytes(trainer.train)
    return {"loaded": loaded, "peak": peak, "planned": plan.peak, "weights": plan.weights + plan.adapters}


def routed(model: Transformer, *, alone: bool) -> Transformer:
    """With routers in two layers, or these alone to be trained."""
    model = add_routers(model, MixtureOfDepths("block", (0, 1), capacity=0.5)).requires_grad_(not alone)
    for layer in routed_layers(model):
        layer.router.requires_grad_(True)
    return model


def main(folder: Path, sizes: str, measured: int, *names: str) -> None:
    torch.set_num_threads(1)
    return_what_is_freed()
    shard, context, tensor = sizes_of(sizes)
    if context * tensor > 1:
        ask_for(shard, context, tensor)
    this_accelerator()
    rank, found = this_rank(), {}
    for name in names:
        for layers in (BRIEF, measured):
            placed = {"shards": shard * context * tensor, "context": context, "tensor": tensor}
            setup = replace(SETUPS[name](layers), on_gpu=False, processes=rank.count, **placed)
            step = min(MOST_MICRO_BATCHES, 2 * rank.count // (context * tensor)) * setup.training.micro_batch_tokens
            setup = replace(setup, training=replace(setup.training, tokens=2 * step, batch_tokens=step))
            found[name] = measure(folder / f"{sizes}-{name}-{layers}", name, setup)
    (folder / f"{rank.count}-{rank.index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
