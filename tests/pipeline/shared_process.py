"""What each of the processes that torchrun has started holds, and finds, where a model is measured in shards.

torchrun --nproc_per_node 2 -m tests.pipeline.shared_process FOLDER MODEL …
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compress.lora import inject
from compress.prune.depth import shortened
from model.collectives import ALONE, Group
from model.files.checkpoint import TensorFiles, load_config
from model.lazy import LazyModel
from model.lora import LoraConfig
from model.mesh import Mesh, choose_device, this_rank
from model.quantized import quantized_tensors
from model.transformer import Transformer
from pipeline.measure.quality import HeldOut, load_published
from pipeline.stages.shared.models import Models
from tests.memory import peak_resident_bytes, return_what_is_freed
from tests.pipeline.test_quality import batch
from tests.train.sharded_process import held_bytes
from train.accelerator import this_accelerator
from train.objectives import LanguageModelling
from train.optimizer import FrozenDigest
from train.sharding import Sharded, make_frozen

BATCHES = (batch(1, 30, 100), batch(2, 50, 120), batch(3, 20, 90))


def group() -> Group:
    """All processes."""
    if this_rank().count == 1:
        return ALONE
    this_accelerator()
    return Group.of_processes(torch.distributed.group.WORLD)


def measure(folder: Path, reference: Path) -> dict[str, object]:
    """Quality beside a reference, what the process holds of the model, and the most that loading and asking took."""
    held_out, mesh = HeldOut(BATCHES, group()), Mesh(1, this_rank().count)
    states = held_out.states(load_published(reference, mesh, torch.bfloat16))
    model: list[Transformer] = []
    peak = peak_resident_bytes(lambda: model.append(opened(folder, mesh)))
    return {"quality": asdict(held_out.quality(model[0], states)), "held": held_bytes(model[0]), "loading": peak}


def opened(folder: Path, mesh: Mesh) -> Transformer:
    """The model in the folder, or the one beside it without its first layer."""
    if folder.name != "shortened":
        return load_published(folder, mesh, torch.bfloat16)
    parent = LazyModel.of_folder(folder.with_name("dense"), torch.bfloat16, choose_device())
    student = shortened(parent, range(1, parent.config.num_layers))
    return student.made() if mesh.is_whole else make_frozen(*student.opened(), mesh)


def to_train(folder: Path, models: Models) -> dict[str, Callable[[], Transformer]]:
    """Ways to come by a model that is trained, or beside which an adapter is."""
    dense, config = LazyModel.of_folder(folder / "dense"), load_config(folder / "dense")

    def adapted(model: Transformer, **how: Any) -> Transformer:
        inject(model, LoraConfig(rank=4, **how), seed=1, dense=TensorFiles(folder / "dense"))
        return model

    def quantized() -> Transformer:
        return models.to_adapt(folder / "quantized", torch.float32)

    return {
        "read": lambda: models.to_train(dense),
        "drawn": lambda: models.to_train(LazyModel.fresh(config, seed=3)),
        "dense base": lambda: adapted(models.to_train(dense), dora=True),
        "base": lambda: adapted(quantized()),
        "base of loftq": lambda: adapted(quantized(), init="loftq"),
    }


def train(make: Callable[[], Transformer]) -> dict[str, object]:
    """The most that it takes to have a model to be trained, in shards of all processes; and what it is, in the main."""
    accelerator, made, mesh = this_accelerator(), list[Any](), Mesh(1, this_rank().count)

    def shard() -> None:
        model = make()
        made.append(FrozenDigest(model))
        made.append(model if mesh.is_whole else Sharded(model, LanguageModelling(), accelerator, mesh, torch.float32))

    peak, (digest, trained) = peak_resident_bytes(shard), made
    whole = trained if mesh.is_whole else trained.whole()
    held = held_bytes(trained if mesh.is_whole else trained.model)
    return {"peak": peak, "held": held, "frozen": digest.hexdigest(), "weights": whole and digest_of(whole)}


def digest_of(model: Transformer) -> str:
    """Of all its weights."""
    digest = hashlib.sha256()
    for _, tensor in (*model.named_parameters(), *quantized_tensors(model)):
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(folder: Path, *models: str) -> None:
    torch.set_num_threads(1)
    return_what_is_freed()
    rank, reference = this_rank(), folder / "reference"
    found = {name: measure(folder / name, reference) for name in ("reference", *models)}
    mesh = Mesh(1, 1, tensor=rank.count)
    found["divided"] = asdict(HeldOut(BATCHES).quality(load_published(folder / "quantized", mesh, torch.float32)))
    ways = to_train(folder, Models(Mesh(1, rank.count)))
    found |= {name: train(make) for name, make in ways.items()}
    (folder / f"{rank.count}-{rank.index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
