"""The training loop: one loop for every objective, on one process or many.

A step adds up the gradients of a fixed number of micro-batches over all processes, divides once by the number of labels
in all of them, clips by the norm of that global gradient, and updates. Everything random is a function of the seed, the
step and the micro-batch, so a resumed run, and a run on another number of processes, does the same thing.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from model.transformer import Transformer
from train.checkpoint import Checkpoint, TrainingStateError, newest_checkpoint, save_checkpoint
from train.data import TokenizedDocuments
from train.objectives import Objective, ObjectiveOutput
from train.packing import Batch
from train.progress import Progress
from train.sampler import Sampler
from train.schedule import SCHEDULES, ScheduleName, learning_rate_factor
from train.signals import StopRequested, StopSignals
from train.tracking import Tracker

log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class TrainingConfig:
    """How to train; the pipeline's recipes fill it."""

    tokens: int
    """Tokens to train on; the number of steps is this divided by `batch_tokens`, rounded up."""
    batch_tokens: int = 4_096
    """Tokens of one optimizer step, over all processes."""
    micro_batch_tokens: int = 2_048
    """Most tokens that one process computes at a time: decides memory, not results."""
    learning_rate: float = 1e-3
    """The schedule's peak."""
    schedule: ScheduleName = "cosine"
    warmup_fraction: float = 0.05
    """Part of the steps in which the learning rate rises from zero."""
    decay_fraction: float = 0.2
    """Part of the steps in which `wsd` decays."""
    min_learning_rate_fraction: float = 0.1
    """Where the decay ends, as a fraction of the peak."""
    weight_decay: float = 0.0
    """On matrices only; norms and biases have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the matrix products; weights, gradients and moments are fp32 either way."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more work."""
    evaluate_every_tokens: int | None = None
    """Tokens between evaluations during training; None evaluates after the last step only."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints; the last step and a stop always save one."""
    keep_checkpoints: int = 2
    seed: int = 0
    """Decides the order of the data."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "micro_batch_tokens", "learning_rate", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.batch_tokens % self.micro_batch_tokens:
            raise ValueError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of micro_batch_tokens "
                f"({self.micro_batch_tokens}): a step is a whole number of micro-batches"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; known schedules are {', '.join(SCHEDULES)}")
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision is {self.precision!r}; it can be bf16 or fp32")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints must be at least 1, not {self.keep_checkpoints}")

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.batch_tokens)

    @property
    def micro_batches_per_step(self) -> int:
        return self.batch_tokens // self.micro_batch_tokens


@dataclass(frozen=True)
class TrainingResult:
    """What `Trainer.train` did, earlier runs that it resumed included."""

    steps: int
    tokens: int
    """Positions that were computed: a little less than steps times batch_tokens, since micro-batches are nearly full."""
    seconds: float
    """Spent in steps; evaluations and checkpoints are not counted."""
    tokens_per_s: float
    metrics: dict[str, float]
    """Of the last step, and of the last evaluation."""
    interrupted: bool
    """A signal stopped it before the last step; calling `train` again goes on."""
    skipped: int
    """Steps without an update because the gradient was not finite."""


class DivergedError(RuntimeError):
    """The gradient stayed non-finite. The weights are those of the last good step, and so is the last checkpoint."""


@dataclass
class _Progress:
    """Counters that a checkpoint keeps beside weights, moments and the sampler's position."""

    step: int = 0
    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluation_due: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class _ObjectiveOfModel(nn.Module):
    """Model and objective as one module, so that everything differentiable happens inside the wrapped `forward`."""

    def __init__(self, model: Transformer, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch) -> ObjectiveOutput:
        return self.objective(self.model, batch)


def make_accelerator() -> Accelerator:
    """The process group and device that a launcher set up, or one process; the CPU where there is no GPU."""
    return Accelerator(cpu=not torch.cuda.is_available())


class Trainer:
    """Trains `model` in place. Parameters must be fp32: they are the master weights."""

    def __init__(
        self,
        model: Transformer,
        objective: Objective,
        data: TokenizedDocuments,
        config: TrainingConfig,
        *,
        folder: Path,
        sequence_length: int,
        tracker: Tracker,
        evaluate: Callable[[Transformer], dict[str, float]] | None = None,
    ) -> None:
        """`folder` receives `checkpoints/`; `evaluate` runs on process 0 and must not change the model."""
        self.accelerator = make_accelerator()
        self.model, self.config, self.tracker, self.evaluate = model, config, tracker, evaluate
        self.checkpoints = Path(folder) / "checkpoints"
        self.world, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        _check_trainable(model)
        if config.micro_batches_per_step % self.world:
            raise ValueError(
                f"a step of {config.micro_batches_per_step} micro-batches (batch_tokens / micro_batch_tokens) cannot be "
                f"shared evenly by {self.world} processes; change one of the two"
            )
        self.sampler = Sampler(
            data, sequence_length=sequence_length, micro_batch_tokens=config.micro_batch_tokens, seed=config.seed
        )
        model.to(self.accelerator.device)
        model.activation_checkpointing = config.activation_checkpointing
        self.module = self.accelerator.prepare_model(_ObjectiveOfModel(model, objective))
        self.optimizer = _make_optimizer(model, config)
        self.progress = _Progress()
        self._saved_step = -1
        self._saved_at = time.monotonic()

    def train(self) -> TrainingResult:
        """Trains to the last step from the newest valid checkpoint, or from the beginning.

        Raises DivergedError after more than three steps in a row with a non-finite gradient.
        """
        self._resume()
        with StopSignals() as signals, self._display() as display:
            interrupted = False
            while not interrupted and self._has_work():
                if self.progress.evaluation_due:
                    interrupted = self._run_evaluation(signals)
                else:
                    interrupted = self._run_step(signals, display)
                if interrupted or not self._has_work() or self._checkpoint_is_due():
                    self._save()
        if self.accelerator.is_main_process:
            self.tracker.sync()
        return self._result(interrupted)

    def _has_work(self) -> bool:
        return self.progress.step < self.config.steps or self.progress.evaluation_due

    def _display(self) -> Progress:
        done = self.progress.step * self.config.batch_tokens
        total = self.config.steps * self.config.batch_tokens
        return Progress("training", total, done=done, enabled=self.accelerator.is_main_process)

    # One step

    def _run_step(self, signals: StopSignals, display: Progress) -> bool:
        """One optimizer step; returns whether any process was asked to stop."""
        began = time.monotonic()
        factor = self._learning_rate_factor()
        sums, tokens, labels = self._accumulate()
        norm, updated = self._update(labels, factor)
        stop, totals = self._over_processes(sums, signals.requested)
        self.progress.step += 1
        self.progress.tokens += tokens
        seconds = time.monotonic() - began
        self.progress.seconds += seconds
        metrics = {name: value / labels for name, value in totals.items()}
        metrics |= {"tokens": self.progress.tokens, "learning_rate": self.config.learning_rate * factor}
        metrics |= {"gradient_norm": norm if updated else math.nan}
        self._record(metrics, tokens / seconds)
        display.advance(self.config.batch_tokens, f"loss {metrics['loss']:.3f}, {tokens / seconds:,.0f} tokens/s,")
        self._count_skips(updated)
        self.progress.evaluation_due = self._evaluation_follows()
        return stop

    def _accumulate(self) -> tuple[dict[str, Tensor], int, int]:
        """Gradient sums of this process's micro-batches, its metric sums, and tokens and labels of all processes."""
        taken = self.sampler.take(self.config.micro_batches_per_step)
        own = range(self.rank, len(taken), self.world)
        sums: dict[str, Tensor] = {}
        for index in own:
            batch = self.sampler.batch(taken[index]).to(self.accelerator.device)
            # Whatever draws random numbers draws the same ones on any process, and after a resume.
            torch.manual_seed(_seed_of(self.config.seed, self.progress.step, index))
            with nullcontext() if index == own[-1] else self.accelerator.no_sync(self.module):
                with self._autocast():
                    output = self.module(batch)
                output.loss_sum.backward()
            for name, value in {"loss": output.loss_sum.detach(), **output.metrics}.items():
                sums[name] = sums.get(name, 0.0) + value.double()
        tokens = sum(int(self.sampler.pieces.length[numbers].sum()) for numbers in taken)
        return sums, tokens, sum(self.sampler.num_labels(numbers) for numbers in taken)

    def _update(self, labels: int, factor: float) -> tuple[float, bool]:
        """Divides, clips and applies the gradient; returns its global norm, and whether it was finite."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # DistributedDataParallel has averaged what must be a sum.
        scale = self.world / labels
        norm = torch.nn.utils.get_total_norm(gradients).item() * scale
        finite = math.isfinite(norm)
        if finite:
            torch._foreach_mul_(gradients, scale * min(1.0, self.config.max_grad_norm / (norm + 1e-6)))
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.learning_rate * factor
            self.optimizer.step()
            self.progress.updates += 1
        # Kept and zeroed: gradients allocated anew each step would cost a page fault for every 4 KiB of them.
        self.optimizer.zero_grad(set_to_none=False)
        return norm, finite

    def _over_processes(self, sums: dict[str, Tensor], stop: bool) -> tuple[bool, dict[str, float]]:
        """Sums over processes, and whether any of them was asked to stop: all stop at the same step."""
        flag = torch.tensor(float(stop), dtype=torch.float64, device=self.accelerator.device)
        values = self.accelerator.reduce(torch.stack([*sums.values(), flag]), "sum").tolist()
        return values[-1] > 0, dict(zip(sums, values, strict=False))

    def _learning_rate_factor(self) -> float:
        config = self.config
        return learning_rate_factor(
            self.progress.step,
            config.steps,
            schedule=config.schedule,
            warmup_fraction=config.warmup_fraction,
            decay_fraction=config.decay_fraction,
            floor=config.min_learning_rate_fraction,
        )

    def _autocast(self) -> torch.autocast:
        device = self.accelerator.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _count_skips(self, updated: bool) -> None:
        self.progress.skipped_in_a_row = 0 if updated else self.progress.skipped_in_a_row + 1
        if updated:
            return
        self.progress.skipped += 1
        log.warning("Step %d: the gradient is not finite; the step is skipped.", self.progress.step)
        if self.progress.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(
                f"the gradient was not finite in {self.progress.skipped_in_a_row} steps in a row, up to step "
                f"{self.progress.step}: lower the learning rate (now {self.config.learning_rate}) or check the data"
            )

    def _record(self, metrics: dict[str, float], tokens_per_s: float) -> None:
        self.progress.metrics |= metrics
        if self.accelerator.is_main_process:
            self.tracker.log(self.progress.step, metrics, {"tokens_per_s": tokens_per_s})

    # Evaluation

    def _evaluation_follows(self) -> bool:
        """After the last step, and after each step that crosses a multiple of `evaluate_every_tokens`."""
        if self.evaluate is None:
            return False
        every, batch = self.config.evaluate_every_tokens, self.config.batch_tokens
        if self.progress.step == self.config.steps:
            return True
        return every is not None and self.progress.step * batch // every > (self.progress.step - 1) * batch // every

    def _run_evaluation(self, signals: StopSignals) -> bool:
        """Runs the callback on process 0; a stop throws it away, to be run first by whoever resumes."""
        stop = False
        if self.accelerator.is_main_process and self.evaluate is not None:
            self.model.eval()
            try:
                with signals.interruptible():
                    found = self.evaluate(self.model)
                self.progress.metrics |= found
                self.tracker.log(self.progress.step, found)
            except StopRequested:
                stop = True
            self.model.train()
        stop = self._over_processes({}, stop or signals.requested)[0]
        self.progress.evaluation_due = stop
        return stop

    # Saving and resuming

    def _checkpoint_is_due(self) -> bool:
        """Process 0's clock decides for all."""
        due = time.monotonic() - self._saved_at >= self.config.checkpoint_every_s
        return self._over_processes({}, due and self.accelerator.is_main_process)[0]

    def _save(self) -> None:
        if self.accelerator.is_main_process and self._saved_step != self.progress.step:
            self.tracker.sync()
            weights = {name: p.detach() for name, p in self.model.named_parameters()}
            save_checkpoint(
                self.checkpoints,
                self.progress.step,
                tensors={"model": weights, "optimizer": self._moments()},
                state={"progress": vars(self.progress), "sampler": self.sampler.state_dict()},
                keep=self.config.keep_checkpoints,
            )
        self.accelerator.wait_for_everyone()
        self._saved_step, self._saved_at = self.progress.step, time.monotonic()

    def _moments(self) -> dict[str, Tensor]:
        states = {name: self.optimizer.state.get(p, {}) for name, p in self.model.named_parameters()}
        return {f"{kind}.{name}": states[name][kind] for name in states for kind in states[name] if kind != "step"}

    def _resume(self) -> None:
        if self.accelerator.is_main_process:
            newest_checkpoint(self.checkpoints)  # sets damaged ones aside before any process reads
        self.accelerator.wait_for_everyone()
        checkpoint = newest_checkpoint(self.checkpoints, set_aside=False)
        if checkpoint is not None:
            self._restore(checkpoint)
            log.info("Resuming from step %d of %d.", self.progress.step, self.config.steps)
        if self.accelerator.is_main_process:
            self.tracker.start(self.progress.step)
        self.model.train()

    def _restore(self, checkpoint: Checkpoint) -> None:
        ...

    def _result(self, interrupted: bool) -> TrainingResult:
        progress = self.progress
        return TrainingResult(
            steps=progress.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            tokens_per_s=progress.tokens / progress.seconds if progress.seconds else 0.0,
            metrics=dict(progress.metrics),
            interrupted=interrupted,
            skipped=progress.skipped,
        )
