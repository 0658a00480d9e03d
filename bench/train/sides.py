"""What the benchmarks of training share: two sides train the same on the same batches, each in processes of its own.

A side is loaded and takes steps, which a recorder writes down. Processes alternate between the sides. Speeds are
medians over steps and processes, without the first steps of each process.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.common import DEVICE, teacher_folder, write_result
from model.config import ModelConfig
from model.files.checkpoint import tensor_shapes, write_checkpoint
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from train.config import TrainingConfig
from train.data import DataConfig, TokenizedDocuments, prepare
from train.loop import Trainer
from train.objectives import Objective
from train.sampler import Sampler


@dataclass
class Recorder:
    """Stands in for the tracker: keeps each step's speed and loss, and the peak memory of the process until then."""

    tokens_per_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def start(self, metrics_bytes: int) -> None: ...

    def log(self, step: int, metrics: dict[str, float], timings: dict[str, float]) -> None:
        self.tokens_per_s.append(timings["tokens_per_s"])
        self.losses.append(metrics["loss"])
        self.peak_bytes = _peak_bytes()


def _peak_bytes() -> int:
    """The most so far: of the process, on a GPU of its tensors there."""
    on_gpu = DEVICE == "cuda"
    return torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class Case:
    """What both sides train."""

    scratch: Path
    """Holds the models and `tokens.npy`."""
    sequence_length: int
    sequences: int
    steps: int
    warm_up: int
    """Steps at the beginning of a process whose speed does not count."""

    @property
    def step_tokens(self) -> int:
        return self.sequence_length * self.sequences

    @property
    def budget(self) -> dict[str, int]:
        """Fields of a TrainingConfig: every step is one micro-batch."""
        tokens = self.step_tokens
        return {"tokens": self.steps * tokens, "batch_tokens": tokens, "micro_batch_tokens": tokens}

    def documents(self) -> TokenizedDocuments:
        """Documents of one sequence each, every token of which has a successor to predict."""
        tokens, length = np.load(self.scratch / "tokens.npy"), self.sequence_length + 1
        count = len(tokens) // length
        return TokenizedDocuments(
            name="bench", tokens=tokens, offsets=np.arange(count + 1) * length, labels_mask=None,
            num_bytes_per_document=np.full(count, length), digest="bench",
        )  # fmt: skip

    def prepare(self, name: str, shape: ModelConfig | None) -> Path:
        """The model `name` and text for all steps: the teacher and real text, or random ones of a shape."""
        folder, count = self.scratch / name, self.steps * self.sequences * (self.sequence_length + 1)
        if shape is None:
            folder.symlink_to(teacher_folder())
            config = DataConfig(source="python-stdlib", sequence_length=self.sequence_length, max_documents=60)
            data = prepare(config, Tokenizer.load(folder), self.scratch / "cache", progress=False)
            tokens = data.train.tokens[:count]
        else:
            _write_random(shape, folder)
            tokens = np.random.default_rng(0).integers(0, shape.vocab_size, count).astype(np.int32)
        np.save(self.scratch / "tokens.npy", tokens)
        return folder


def _write_random(config: ModelConfig, folder: Path) -> None:
    """A bf16 model with random weights, made and written tensor by tensor."""
    torch.manual_seed(0)

    def make(shape: torch.Size) -> Tensor:
        matrix = config.initializer_range * torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        return torch.ones(shape) if len(shape) == 1 else matrix

    sources = {name: partial(make, shape) for name, shape in tensor_shapes(config).items()}
    write_checkpoint(folder, config, sources, dtype=torch.bfloat16)


@dataclass
class Side:
    """A side with its models loaded, ready to take steps."""

    train: Callable[[Recorder], None]
    weight_bytes: int = 0
    """Of its models, where the benchmark asks."""


Load = Callable[[Case], Side]
Part = Callable[[Load, Case], dict[str, Any]]
"""What can be asked of a side."""


class _UnsavedTrainer(Trainer):
    """Does not measure the disk."""

    def _save(self) -> None: ...


def train_ours(
    model: Transformer, objective: Objective, case: Case, config: TrainingConfig, recorder: Recorder
) -> None:
    """By the loop of potstill's stages."""
    with tempfile.TemporaryDirectory() as folder:
        _UnsavedTrainer(
            model, objective, case.documents(), config, folder=Path(folder), sequence_length=case.sequence_length,
            tracker=recorder,  # type: ignore[arg-type]
        ).train()  # fmt: skip


def train_plainly(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], make_optimizer: Callable[..., torch.optim.Optimizer],
    case: Case, config: TrainingConfig, recorder: Recorder,
) -> None:  # fmt: skip
    """By a loop as tutorials have it, over the batches that our sampler draws: loss_of(ids, labels), both [B, T]."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained, lr=config.learning_rate, betas=(config.beta1, config.beta2), weight_decay=0.0)
    sampler = Sampler(
        case.documents(), sequence_length=case.sequence_length, micro_batch_tokens=case.step_tokens, seed=config.seed
    )
    for step in range(config.steps):
        began = time.perf_counter()
        batch = sampler.batch(sampler.take(1)[0]).to(trained[0].device)
        loss = loss_of(*(tensor.view(case.sequences, -1) for tensor in (batch.tokens, batch.labels)))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        recorder.log(step, {"loss": value}, {"tokens_per_s": len(batch.tokens) / (time.perf_counter() - began)})


def time_side(load: Load, case: Case) -> dict[str, Any]:
    """Speed of the steps after the first, and the peak of the process above its start, and above the loaded models."""
    recorder, start = Recorder(), int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    side = load(case)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the peak is then what the loaded models take
    loaded = _peak_bytes()
    side.train(recorder)
    return {
        "tokens_per_s": recorder.tokens_per_s[case.warm_up :], "losses": recorder.losses,
        "process_bytes": recorder.peak_bytes - start, "peak_bytes_above_models": recorder.peak_bytes - loaded,
    }  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """The command `python -m module`, of two sides; ours comes first."""

    module: str
    sides: dict[str, Load]
    memory: str
    """The figure of memory that is compared."""
    kept: Sequence[str]
    """The figures of memory, of `time_side`, that stand in the result."""

    def run(self, part: Part, side: str, case: Case) -> dict[str, Any]:
        """A part of a side, in a process of its own."""
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(part, self.sides[side], case).result()

    def compare(self, case: Case, rounds: int, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Times both sides, of which some figures may be known already; prints as it goes."""
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in self.sides}
        for _ in range(rounds):
            for name, of_side in runs.items():
                of_side.append(self.run(time_side, name, case))
                speed = statistics.median(of_side[-1]["tokens_per_s"])
                peak = of_side[-1]["peak_bytes_above_models"] / 2**20
                print(f"  {name}: {speed:,.0f} tokens/s, peak {peak:,.0f} MiB above the models", flush=True)
        sides = {}
        for name, of_side in runs.items():
            speeds = [speed for run in of_side for speed in run["tokens_per_s"]]
            sides[name] = known.get(name, {}) | {"tokens_per_s": statistics.median(speeds), "all_tokens_per_s": speeds}
            sides[name] |= {figure: statistics.median(run[figure] for run in of_side) for figure in self.kept}
            sides[name]["losses"] = of_side[0]["losses"]
        ours, theirs = sides.values()
        speed, memory = (ours[figure] / theirs[figure] for figure in ("tokens_per_s", self.memory))
        print(f"  speed {speed:.2f}x, peak memory {memory:.2f}x")
        return {
            "sequence_length": case.sequence_length, "micro_batch_tokens": case.step_tokens, "sides": sides,
            "ratio_speed": speed, "ratio_peak_memory": memory,
        }  # fmt: skip

    def main(
        self, doc: str | None, name: str, rounds: int, *, prepare_inputs: Callable[..., Case],
        compare: Callable[[Case, int], dict[str, Any]],
    ) -> None:  # fmt: skip
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--rounds", type=int, default=rounds, help="processes of each side")
        parser.add_argument("--tiny", action="store_true", help="a tiny model, for tests; writes no result")
        options = parser.parse_args()
        with tempfile.TemporaryDirectory() as folder:
            result = compare(prepare_inputs(Path(folder), tiny=options.tiny), options.rounds)
        if not options.tiny:
            write_result(name, f"python -m {self.module}", result)
