"""What each of the processes that torchrun has started holds, and finds, where a model is measured in shards.

torchrun --nproc_per_node 2 -m tests.pipeline.shared_process FOLDER MODEL …
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from compress.prune.depth import shortened
from model.collectives import ALONE, Group
from model.files.checkpoint import load_config, load_model
from model.lazy import LazyModel
from model.mesh import Mesh, choose_device, choose_dtype, this_rank
from model.transformer import Transformer
from pipeline.measure.quality import HeldOut, load_published
from tests.memory import peak_resident_bytes, return_what_is_freed
from tests.pipeline.test_quality import batch
from tests.train.sharded_process import held_bytes
from train.accelerator import this_accelerator
from train.objectives import LanguageModelling
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
    states = held_out.states(load_published(reference, mesh))
    model: list[Transformer] = []
    peak = peak_resident_bytes(lambda: model.append(opened(folder, mesh)))
    return {"quality": asdict(held_out.quality(model[0], states)), "held": held_bytes(model[0]), "loading": peak}


def opened(folder: Path, mesh: Mesh) -> Transformer:
    """The model in the folder, or the one beside it without its first layer."""
    if folder.name != "shortened":
        return load_published(folder, mesh)
    device = choose_device()
    parent = LazyModel.of_folder(folder.with_name("dense"), choose_dtype("auto", device), device)
    student = shortened(parent, range(1, parent.config.num_layers))
    return student.made() if mesh.is_whole else make_frozen(student, mesh)


def train(lazy: LazyModel, expected: Transformer) -> dict[str, object]:
    """The most that it takes to have a model in shards to be trained, and whether those are the weights expected."""
    accelerator, found, mesh = this_accelerator(), list[Sharded](), Mesh(1, this_rank().count)

    def shard() -> None:
        found.append(Sharded(lazy.unmade(), LanguageModelling(), accelerator, mesh, torch.float32))

    peak, whole = peak_resident_bytes(shard), found[0].whole()
    weights = {} if whole is None else dict(whole.named_parameters())
    same = all(torch.equal(weights[name], one) for name, one in expected.named_parameters() if weights)
    return {"peak": peak, "same": same, "whole": sum(parameter.nbytes for parameter in expected.parameters())}


def main(folder: Path, *models: str) -> None:
    torch.set_num_threads(1)
    return_what_is_freed()
    rank, reference = this_rank(), folder / "reference"
    found = {name: measure(folder / name, reference) for name in ("reference", *models)}
    if rank.count > 1:
        dense, fresh = LazyModel.of_folder(folder / "dense"), Transformer(load_config(folder / "dense"))
        fresh.initialize(seed=3)
        found["read"] = train(dense, load_model(folder / "dense"))
        found["drawn"] = train(LazyModel.fresh(fresh.config, seed=3), fresh)
    (folder / f"{rank.count}-{rank.index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
