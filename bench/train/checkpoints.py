"""What checkpoints cost training: steps while one is written, beside steps while none is.

    OMP_NUM_THREADS=1 python -m bench.train.checkpoints [--runs RUNS] [--tiny]

A model of 300 MB is trained on random tokens, several times from its beginning; every twelfth step is saved. Steps take
what they take by the clock, and of the processor, of the thread that trains. What a save keeps training from counts
with the step behind it. Before the first one memory is made for the copies.

A save disturbs the same steps in every run, other work on the machine others each time: so of each step the least of
all runs is compared, too. The longest one while none is written tells how much steps differ anyway.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import write_result
from model.config import ModelConfig
from model.transformer import Transformer
from train.config import TrainingConfig
from train.data import TokenizedDocuments
from train.loop import Trainer
from train.objectives import LanguageModelling
from train.progress import Progress
from train.signals import StopSignals
from train.tracking import Tracker

TOKENS, STEPS, SAVED_EVERY, RUNS = 512, 37, 12, 10
MEMORY_AFTER_S = 10.0
"""Memory for copies is made half-way to a save, which is by steps here."""


def shape(*, tiny: bool) -> ModelConfig:
    """As SmolLM2-135M, with fewer layers."""
    layers, vocab_size = (1, 512) if tiny else (13, 49_152)
    return ModelConfig(
        family="llama", vocab_size=vocab_size, hidden_size=576, intermediate_size=1536, num_layers=layers,
        num_query_heads=9, num_kv_heads=3, head_dim=64, tie_word_embeddings=True, windows=(None,) * layers,
        rope_layers=(True,) * layers,
    )  # fmt: skip


@dataclass
class Step:
    """Seconds, by the clock and of the processor."""

    clock_s: float
    processor_s: float
    behind: str | None
    """What was done behind training when it began: memory made for copies, or a checkpoint written."""


class TimedTrainer(Trainer):
    """Saves every so many steps and keeps the time of each."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.timed: list[Step] = []
        self.saving = Step(0.0, 0.0, None)

    def _run_step(self, signals: StopSignals, display: Progress) -> tuple[bool, bool]:
        before, self.saving = self.saving, Step(0.0, 0.0, None)
        behind, clock, processor = self._behind(), time.perf_counter(), time.thread_time()
        stop, _ = super()._run_step(signals, display)
        spent = time.perf_counter() - clock, time.thread_time() - processor
        self.timed.append(Step(spent[0] + before.clock_s, spent[1] + before.processor_s, behind))
        return stop, self.counters.step % SAVED_EVERY == 0

    def _save(self) -> None:
        clock, processor = time.perf_counter(), time.thread_time()
        super()._save()
        self.saving = Step(time.perf_counter() - clock, time.thread_time() - processor, None)

    def _behind(self) -> str | None:
        thread = self.writer._thread
        if thread is None or not thread.is_alive():
            return None
        return "memory" if self.counters.step < SAVED_EVERY else "checkpoint"


@dataclass
class Run:
    """One training."""

    steps: list[Step]
    """The first save, which also allocates its memory, counts as all others, the first step does not."""
    weight_bytes: int
    checkpoint_bytes: int


def run(config: ModelConfig, folder: Path) -> Run:
    """Trains."""
    model = Transformer(config)
    model.initialize(0)
    length = TOKENS + 1
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, STEPS * length).astype(np.int32)
    data = TokenizedDocuments(
        name="bench", tokens=tokens, offsets=np.arange(STEPS + 1) * length, labels_mask=None,
        num_bytes_per_document=np.full(STEPS, length), digest="bench",
    )  # fmt: skip
    settings = TrainingConfig(
        tokens=STEPS * TOKENS, batch_tokens=TOKENS, micro_batch_tokens=TOKENS, precision="fp32",
        checkpoint_every_s=MEMORY_AFTER_S * 2,
    )  # fmt: skip
    trainer = TimedTrainer(
        model, LanguageModelling(), data, settings, folder=folder, sequence_length=TOKENS,
        tracker=Tracker(folder),
    )  # fmt: skip
    trainer.train()
    newest = next(path for path in trainer.checkpoints.iterdir() if path.name.endswith(f"{STEPS:08d}"))
    return Run(
        trainer.timed[1:],
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        checkpoint_bytes=sum(path.stat().st_size for path in newest.iterdir()),
    )


def least(runs: list[Run]) -> list[Step]:
    """Each step as it took least; a checkpoint was written behind it if that is so of any run."""
    return [
        Step(
            min(step.clock_s for step in same),
            min(step.processor_s for step in same),
            next((behind for behind in ("checkpoint", "memory") if any(step.behind == behind for step in same)), None),
        )
        for same in zip(*(run.steps for run in runs), strict=True)
    ]


def compared(steps: list[Step]) -> dict[str, dict[str, float]]:
    return {name: _compared(steps, name) for name in ("clock_s", "processor_s")}


def _compared(steps: list[Step], name: str) -> dict[str, float]:
    """Medians with and without a checkpoint being written, and the longest steps over the median of all."""
    all_steps = [getattr(step, name) for step in steps]
    making, writing, quiet = (
        [getattr(step, name) for step in steps if step.behind == behind] for behind in ("memory", "checkpoint", None)
    )
    median = statistics.median(all_steps)
    return {
        "median_while_writing": statistics.median(writing),
        "median_otherwise": statistics.median(quiet),
        "longest_while_writing_over_median": max(writing) / median,
        "longest_otherwise_over_median": max(quiet) / median,
        "longest_while_memory_is_made_over_median": max(making) / median if making else 0.0,
        "mean_over_median_otherwise": statistics.mean(all_steps) / statistics.median(quiet),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="trainings, default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; writes no result")
    arguments = parser.parse_args()
    runs = []
    for number in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(shape(tiny=arguments.tiny), Path(folder)))
        _print(f"run {number + 1} of {arguments.runs}", compared(runs[-1].steps))
    of_least = compared(least(runs))
    _print("the least of each step", of_least)
    found = {
        "weight_bytes": runs[0].weight_bytes,
        "checkpoint_bytes": runs[0].checkpoint_bytes,
        "least_of_each_step": of_least,
        "runs": [compared(run.steps) | {"steps": [asdict(step) for step in run.steps]} for run in runs],
    }
    if not arguments.tiny:
        write_result("checkpoints-cpu", "OMP_NUM_THREADS=1 python -m bench.train.checkpoints", found)


def _print(title: str, found: dict[str, dict[str, float]]) -> None:
    for name, numbers in found.items():
        print(f"{title}, {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in numbers.items()), flush=True)


if __name__ == "__main__":
    main()
