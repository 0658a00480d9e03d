"""Distillation step beside a plain transformers loop of the same losses: same models, same tokens, one run.

    python -m bench.train.distill          # about 8 minutes on 2 cores

A 12-layer student learns from SmolLM2-135M with forward KL, micro-batches of 2 x 1,024 tokens, bf16 autocast over fp32
weights, AdamW. The plain loop computes both models' logits and the divergence with PyTorch's own functions. Each
side runs in processes of its own, alternating; speeds are medians over steps and processes, memory is the peak
resident set of the process above what the two loaded models take.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.common import ROOT, run_alone, teacher_folder, write_result
from compress.prune.depth import prune_depth
from model.files.checkpoint import load_model, save_model
from model.text.tokenizer import Tokenizer
from train.data import DataConfig, TokenizedDocuments, prepare

SEQUENCE, SEQUENCES, STEPS, WARM_UP = 1024, 2, 8, 2
STUDENT_LAYERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 29)
LEARNING_RATE = 1e-3


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Recorder:
    """Stands in for the tracker: keeps each step's speed, and the peak memory before the last checkpoint is written."""

    def __init__(self) -> None:
        self.tokens_per_s: list[float] = []
        self.losses: list[float] = []
        self.peak_bytes = 0

    def start(self, metrics_bytes: int) -> None: ...

    def sync(self) -> int:
        return 0

    def log(self, step: int, metrics: dict[str, float], timings: dict[str, float]) -> None:
        self.tokens_per_s.append(timings["tokens_per_s"])
        self.losses.append(metrics["loss"])
        self.peak_bytes = peak_bytes()


def documents_of(tokens: np.ndarray, sequence_length: int) -> TokenizedDocuments:
    """Documents of one sequence each, every token of which has a successor to predict."""
    length = sequence_length + 1
    count = len(tokens) // length
    return TokenizedDocuments(
        name="bench", tokens=tokens, offsets=np.arange(count + 1) * length, labels_mask=None,
        num_bytes_per_document=np.full(count, length), digest="bench",
    )  # fmt: skip


def potstill(teacher_path: Path, student_path: Path, tokens: np.ndarray, scratch: Path) -> dict[str, Any]:
    from train.config import TrainingConfig
    from train.loop import Trainer
    from train.objectives import Distillation

    teacher = load_model(teacher_path, dtype=torch.bfloat16)
    student = load_model(student_path, dtype=torch.float32)
    loaded = peak_bytes()
    step_tokens = SEQUENCE * SEQUENCES
    config = TrainingConfig(
        tokens=STEPS * step_tokens, batch_tokens=step_tokens, micro_batch_tokens=step_tokens,
        learning_rate=LEARNING_RATE, schedule="constant", warmup_fraction=0.0,
    )  # fmt: skip
    recorder = Recorder()
    Trainer(
        student,
        Distillation(teacher),
        documents_of(tokens, SEQUENCE),
        config,
        folder=scratch,
        sequence_length=SEQUENCE,
        tracker=recorder,  # type: ignore[arg-type]
    ).train()
    return {
        "tokens_per_s": recorder.tokens_per_s[WARM_UP:],
        "losses": recorder.losses,
        "peak_bytes_above_models": recorder.peak_bytes - loaded,
    }


def plain_transformers(teacher_path: Path, student_path: Path, tokens: np.ndarray, scratch: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.bfloat16).eval()
    student = AutoModelForCausalLM.from_pretrained(student_path, dtype=torch.float32).train()
    loaded = peak_bytes()
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    speeds, losses = [], []
    for step in range(STEPS):
        began = time.perf_counter()
        start = step * SEQUENCES * (SEQUENCE + 1)
        block = tokens[start : start + SEQUENCES * (SEQUENCE + 1)].reshape(SEQUENCES, -1)
        ids = torch.from_numpy(block[:, :-1].astype(np.int64))
        with torch.no_grad():
            target = F.log_softmax(teacher(ids).logits.float(), dim=-1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = student(ids).logits
        loss = F.kl_div(F.log_softmax(logits.float(), dim=-1), target, reduction="sum", log_target=True) / ids.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        speeds.append(ids.numel() / (time.perf_counter() - began))
        losses.append(loss.item())
    return {"tokens_per_s": speeds[WARM_UP:], "losses": losses, "peak_bytes_above_models": peak_bytes() - loaded}


SIDES = {"potstill": potstill, "transformers": plain_transformers}


def prepare_inputs(teacher: Path, scratch: Path) -> None:
    """The pruned student and enough text for every step."""
    student = prune_depth(load_model(teacher), STUDENT_LAYERS)
    save_model(student, scratch / "student")
    config = DataConfig(source="python-stdlib", sequence_length=SEQUENCE, max_documents=60)
    data = prepare(config, Tokenizer.load(teacher), scratch / "cache", progress=False)
    np.save(scratch / "tokens.npy", data.train.tokens[: STEPS * SEQUENCES * (SEQUENCE + 1)])


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [speed for run in runs for speed in run["tokens_per_s"]]
    return {
        "tokens_per_s": statistics.median(speeds), "all_tokens_per_s": speeds,
        "peak_bytes_above_models": statistics.median(run["peak_bytes_above_models"] for run in runs),
        "losses": runs[0]["losses"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--side", nargs=3, metavar=("SIDE", "TEACHER", "SCRATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, teacher, scratch = options.side[0], Path(options.side[1]), Path(options.side[2])
        with tempfile.TemporaryDirectory() as folder:
            result = SIDES[side](teacher, scratch / "student", np.load(scratch / "tokens.npy"), Path(folder))
        print(json.dumps(result))
        return
    teacher = teacher_folder()
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prepare_inputs(teacher, scratch)
        for _ in range(options.rounds):
            for side in SIDES:
                runs[side].append(run_alone("bench.train.distill", "--side", side, str(teacher), str(scratch)))
                speed = statistics.median(runs[side][-1]["tokens_per_s"])
                peak = runs[side][-1]["peak_bytes_above_models"] / 2**20
                print(f"  {side}: {speed:.0f} tokens/s, peak {peak:.0f} MiB above the models", flush=True)
    sides = {side: summary(of_side) for side, of_side in runs.items()}
    ours, theirs = sides["potstill"], sides["transformers"]
    result = {
        "sequence_length": SEQUENCE, "micro_batch_tokens": SEQUENCE * SEQUENCES, "student_layers": len(STUDENT_LAYERS),
        "sides": sides, "ratio_speed": ours["tokens_per_s"] / theirs["tokens_per_s"],
        "ratio_peak_memory": ours["peak_bytes_above_models"] / theirs["peak_bytes_above_models"],
    }  # fmt: skip
    print(f"  speed {result['ratio_speed']:.2f}x, peak memory {result['ratio_peak_memory']:.2f}x")
    path = write_result("distill-cpu", "python -m bench.train.distill", result)
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
