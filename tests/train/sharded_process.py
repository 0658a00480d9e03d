"""Toy runs of every way to train, by as many processes as there are: alone, or started several times by torchrun.

torchrun --nproc_per_node 4 -m tests.train.sharded_process FOLDER SHARD[xCONTEXT|tTENSOR]/PLACE/CASE[/STOP] …
"""

import copy
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from compress.lora import inject
from compress.mod import add_routers
from compress.quantize.round_to_nearest import quantize_model
from model.config import MixtureOfDepths
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4
from model.lazy import unmade
from model.lora import LoraConfig
from model.mesh import this_rank, training_mesh
from model.quantized import quantized_layers
from model.transformer import Transformer
from tests.tiny import tiny_model
from tests.train.toy import toy_trainer
from train.accelerator import this_accelerator
from train.objectives import Distillation, LanguageModelling, Objective, ObjectiveOutput, RoutedTraining, RoutingConfig
from train.optimizer import named_moments
from train.packing import Batch
from train.sharding import split_frozen

STEPS, BATCH_TOKENS = 6, 256
SIZES = re.compile(r"(\d+)(?:x(\d+))?(?:t(\d+))?")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_query_heads": 4, "num_kv_heads": 1, "head_dim": 32}


@dataclass(frozen=True)
class Case:
    """A way to train."""

    model: Callable[[], Transformer]
    objective: Callable[[], Objective] = LanguageModelling
    settings: dict[str, Any] = field(default_factory=dict)
    unmade: bool = False
    """Whether its layers have no weights before they are sharded."""


def _teacher() -> Distillation:
    return Distillation(tiny_model(seed=2, num_layers=3))


def _quantized_teacher() -> Distillation:
    return Distillation(quantize_model(tiny_model(seed=2, num_layers=3, intermediate_size=128), Int4(32)))


def _narrow() -> Transformer:
    """One KV head: its projections have fewer rows than others, and are tied to no head of their own."""
    return tiny_model(seed=1, tie_word_embeddings=True, num_kv_heads=1)


def _adapted(dropout: float = 0.0, *, dora: bool = False) -> Transformer:
    model = tiny_model(seed=1, **WIDE)
    quantize_model(model, NF4())
    inject(model, LoraConfig(rank=6, dropout=dropout, dora=dora), seed=1)
    return model


def _routed() -> Transformer:
    return add_routers(tiny_model(seed=1), MixtureOfDepths("block", (1,), capacity=0.5))


def _routers_alone() -> Transformer:
    model = _routed().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".router." in name)
    return model


def _routed_objective() -> Objective:
    return RoutedTraining(_teacher(), RoutingConfig(0.5))


CASES = {
    "distill": Case(lambda: tiny_model(seed=1), _teacher),
    "gqa": Case(_narrow, _quantized_teacher, {"activation_checkpointing": True}),
    "qlora": Case(_adapted, unmade=True),
    "dora": Case(lambda: _adapted(0.1, dora=True), settings={"activation_checkpointing": True}, unmade=True),
    "mod": Case(_routed, _routed_objective),
    "mod, recomputed": Case(_routed, _routed_objective, {"activation_checkpointing": True}),
    "routers alone": Case(_routers_alone, _routed_objective, unmade=True),
    "8 bits": Case(lambda: tiny_model(seed=1, **WIDE), settings={"optimizer": "adamw_8bit"}),
}
BY_THREES = {
    f"{name}, by threes": replace(CASES[name], settings=CASES[name].settings | {"batch_tokens": 384})
    for name in ("gqa", "distill", "qlora", "mod")
}
"""Such as two processes can share, and three."""


def without_weights(model: Transformer) -> Transformer:
    """The model, whose layers get back what they have when they are sharded."""
    kept = copy.deepcopy(model.model.layers)

    def load(number: int) -> None:
        layer, own = model.model.layers[number], kept[number]
        for parameter, weight in zip(layer.parameters(), own.parameters(), strict=True):
            parameter.data = weight.data
        for one, other in zip(quantized_layers(layer).values(), quantized_layers(own).values(), strict=True):
            one.weight = other.weight

    return unmade(model, load)


def held_bytes(model: Transformer) -> int:
    """Of the part of the weights that this process has."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    whole = [layer.weight_bytes for layer in quantized_layers(model).values() if layer.packed is None]
    return sum(part.nbytes for part in local) + sum(whole)


class Stopping:
    """An objective during which a signal comes to this process, in a step."""

    def __init__(self, objective: Objective, step: int) -> None:
        self.objective, self.after = objective, step / STEPS

    def __call__(self, model: Transformer, batch: Batch, progress: float) -> ObjectiveOutput:
        if progress >= self.after - 1e-9:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.objective(model, batch, progress)


def ask_for(shard: int, context: int = 1, tensor: int = 1) -> None:
    """As accelerate's launcher says it."""
    sizes = {"DP_REPLICATE": this_rank().count // (shard * context * tensor), "DP_SHARD": shard, "CP": context}
    sizes["TP"] = tensor
    os.environ |= {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


def run(folder: Path, name: str, shard: int | None = None, stop: int | None = None) -> None:
    """Trains to the end and writes the weights, or until a stop; from the checkpoint that is there.

    `shard`: over how many processes the recipe shards; None leaves that to the launcher.
    """
    this_accelerator()  # joins the group
    case = (CASES | BY_THREES)[name]
    settings = {"batch_tokens": BATCH_TOKENS} | case.settings
    objective = case.objective()
    mesh = training_mesh(shard)
    taught = objective.objective if isinstance(objective, RoutedTraining) else objective
    if not mesh.is_whole and isinstance(taught, Distillation):
        split_frozen(taught.teacher, mesh, torch.device("cpu"))
    trainer = toy_trainer(
        folder / name,
        model=without_weights(case.model()) if case.unmade and not mesh.is_whole else case.model(),
        objective=objective if stop is None else Stopping(objective, stop),
        evaluate=held_out,
        evaluate_every_tokens=3 * settings["batch_tokens"],
        tokens=STEPS * settings["batch_tokens"],
        dp_shard_size=shard,
        checkpoint_every_s=1e6,
        **settings,
    )
    result = trainer.train()
    rank, moments = this_rank(), named_moments(trainer.parallel.trained, trainer.optimizer)
    held = {"weights": held_bytes(trainer.model), "moments": sum(moment.nbytes for moment in moments.values())}
    (folder / name / f"held-{rank.index}.json").write_text(json.dumps(held))
    assert result.interrupted == (stop is not None)
    if trainer.is_main and not result.interrupted:
        weights = {key: tensor.detach().clone() for key, tensor in trainer.given.named_parameters()}
        save_file(weights, folder / name / "weights.safetensors")


def held_out(model: Transformer) -> dict[str, float]:
    """Of the whole model, wherever its parts are."""
    return {"weights": sum(p.detach().double().abs().sum().item() for p in model.parameters() if p.requires_grad)}


def sizes_of(words: str) -> tuple[int, int, int]:
    """Over how many processes to shard, and among how many to divide tokens, and layers: "2", "2x2", "2t2"."""
    shard, context, tensor = map(int, SIZES.fullmatch(words).groups("1"))  # type: ignore[union-attr]
    return shard, context, tensor


def main(folder: Path, *jobs: str) -> None:
    """Each job: over how many processes to shard, a folder, the case, and where to stop, if it is to.

    Last those whose tokens or layers are divided too, as a launcher asks for.
    """
    torch.set_num_threads(1)
    for job in jobs:
        sizes, place, name, stop = f"{job}/".split("/")[:4]
        shard, context, tensor = sizes_of(sizes)
        after = int(stop) if stop else None
        if context * tensor == 1:
            run(folder / place, name, shard, after)
            continue
        ask_for(shard, context, tensor)
        run(folder / place, name, None, after)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
