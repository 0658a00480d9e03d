"""What a training step takes in each of the processes that torchrun has started, beside what is planned.

torchrun --nproc_per_node 4 -m tests.train.memory_process FOLDER SHARDS NAME …
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from model.config import ModelConfig
from model.lora import LoraConfig
from model.mesh import Mesh, this_rank
from model.training_memory import Setup
from pipeline.measure.training_time import random_models
from tests.memory import peak_resident_bytes
from tests.tiny import tiny_config
from tests.train.sharded_process import held_bytes
from tests.train.test_memory import documents, training
from train.accelerator import this_accelerator
from train.loop import Trainer
from train.objectives import Distillation, LanguageModelling
from train.sharding import device_mesh, shard_frozen
from train.tracking import Tracker


def deep(layers: int) -> ModelConfig:
    return tiny_config(
        hidden_size=448, intermediate_size=1344, num_layers=layers, num_query_heads=8, head_dim=64,
        max_position_embeddings=512,
    )  # fmt: skip


DEEP = deep(12)
FEW = 64
SETUPS = {
    "warm": Setup(deep(2), training(FEW, micro_batches=4)),
    "language": Setup(DEEP, training(FEW, micro_batches=4)),
    "8 bit": Setup(DEEP, training(FEW, micro_batches=4, optimizer="adamw_8bit")),
    "recomputed": Setup(DEEP, training(4 * FEW, micro_batches=4, activation_checkpointing=True)),
    "distill": Setup(DEEP, training(FEW, micro_batches=4), teacher=DEEP),
    "adapter": Setup(DEEP, training(FEW, micro_batches=4), adapter=LoraConfig(rank=16)),
    "NF4": Setup(DEEP, training(FEW, micro_batches=4), adapter=LoraConfig(rank=16), quantization="nf4"),
}


def measure(folder: Path, shards: int, name: str) -> dict[str, int]:
    """Two steps, of which nothing is saved."""
    setup = replace(SETUPS[name], on_gpu=False, processes=this_rank().count, shards=shards)
    model, teacher = random_models(setup)
    if teacher is not None and shards > 1:
        shard_frozen(teacher.requires_grad_(False), device_mesh(Mesh(1, shards), torch.device("cpu")))
    length = setup.training.micro_batch_tokens
    trainer = Trainer(
        model,
        LanguageModelling() if teacher is None else Distillation(teacher),
        documents([length + 1] * 16),
        replace(setup.training, dp_shard_size=shards),
        folder=folder,
        sequence_length=length,
        tracker=Tracker(folder),
    )
    trainer._save = trainer.parallel.whole = lambda: None  # type: ignore[method-assign]
    loaded = held_bytes(trainer.model) + (held_bytes(teacher) if teacher is not None else 0)
    plan, peak = setup.memory(), loaded + peak_resident_bytes(trainer.train)
    return {"loaded": loaded, "peak": peak, "planned": plan.peak, "weights": plan.weights + plan.adapters}


def main(folder: Path, shards: int, *names: str) -> None:
    torch.set_num_threads(1)
    this_accelerator()
    rank = this_rank()
    measure(folder / "warm", shards, "warm")  # what a process allocates once for all
    found = {name: measure(folder / name, shards, name) for name in names}
    (folder / f"{rank.count}-{rank.index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
