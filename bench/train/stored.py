"""Distillation from stored distributions beside the teacher in the loop: speed of a step, in turns, in one process.

    python -m bench.recipe configs/precompute.yaml   # makes the distributions, and trains a student from either
    python -m bench.train.stored

The batches, the text and the distributions are those of that run, whose held-out figures are repeated here. A 12-layer
student takes the same steps with both losses, forward and backward in the trainer's own precision (bf16 products where
the processor has such instructions), batches built anew each time; their order turns around at each batch, so that
other work on the machine meets both alike.
"""

import statistics
import time
from typing import Any

import torch

from bench.common import ROOT, write_result
from bench.train.distill import STUDENT_LAYERS
from compress.prune.depth import prune_depth
from model.files.checkpoint import load_model
from model.mesh import training_dtype
from model.text.tokenizer import Tokenizer
from pipeline.measure.quality import load_published
from pipeline.run_folder import RunFolder
from pipeline.stages.precompute.report import PrecomputeDetails
from train.config import TrainingConfig
from train.data import prepare
from train.objectives import Distillation, Objective, StoredDistillation
from train.sampler import Sampler

STEPS, WARM_UP, BATCH_TOKENS = 8, 1, 1_024


def speeds(run: RunFolder) -> dict[str, Any]:
    """Tokens a second of both, and by how much the stored ones are faster."""
    recipe = run.recipe()
    folder, source = run.artifact(recipe, "teacher"), recipe.data_set("taught", run.path)
    data = prepare(source, Tokenizer.load(folder), ROOT / ".cache" / "stored", progress=False)
    length = source.sequence_length
    sampler = Sampler(data.train, sequence_length=length, micro_batch_tokens=BATCH_TOKENS, seed=0)
    student = prune_depth(load_model(folder, dtype=torch.float32), STUDENT_LAYERS).requires_grad_(True)
    objectives: dict[str, Objective] = {"stored": StoredDistillation(), "dense": Distillation(load_published(folder))}
    dtype = training_dtype(TrainingConfig.precision, on_gpu=False)
    found: dict[str, list[float]] = {name: [] for name in objectives}
    for step in range(STEPS + WARM_UP):
        (numbers,) = sampler.take(1)
        for name in list(objectives)[:: 1 if step % 2 else -1]:
            began = time.perf_counter()
            batch = sampler.batch(numbers)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = objectives[name](student, batch, 0.0).loss_sum
            loss.backward()
            found[name].append(len(batch.tokens) / (time.perf_counter() - began))
            student.zero_grad()
        print({name: round(of_step[-1], 1) for name, of_step in found.items()}, flush=True)
    kept = {name: of_step[WARM_UP:] for name, of_step in found.items()}
    ratios = [one / other for one, other in zip(kept["stored"], kept["dense"], strict=True)]
    medians = {f"{name}_tokens_per_s": statistics.median(of_step) for name, of_step in kept.items()}
    return {
        "products": str(dtype).removeprefix("torch."),
        **medians,
        "ratio_speed": statistics.median(ratios),
        "ratios_speed": ratios,
    }


def quality(run: RunFolder) -> dict[str, Any]:
    """Held-out KL of the two students at equal tokens, and what the distributions take."""
    results = run.results(run.recipe())
    (stored,) = (result.details for result in results if isinstance(result.details, PrecomputeDetails))
    rows = {row.label: row.quality.kl.value for one in results for row in one.models if row.quality and row.quality.kl}
    return {
        "trained_tokens": results[-1].cost.trained_tokens,
        "held_out_kl": {name: rows[name] for name in ("stored", "dense")},
        "ratio_kl": rows["stored"] / rows["dense"],
        "draws": stored.draws,
        "bytes_per_label": stored.bytes_per_position,
        "different_tokens_per_label": stored.stored_tokens / stored.positions,
    }


if __name__ == "__main__":
    finished = RunFolder(ROOT / "runs" / "precompute")
    write_result("stored-cpu", "python -m bench.train.stored", {**speeds(finished), **quality(finished)})
