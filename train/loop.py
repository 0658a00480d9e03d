"""The training loop: one loop for every objective, on one process or many.

A step adds up the gradients of a fixed number of micro-batches over all processes, divides once by the number of labels
in all of them, clips by the norm of that global gradient, and updates. Everything random is a function of the seed, the
step and the micro-batch, so a resumed run, and a run on another number of processes, does the same thing.
"""

import hashlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from model.mesh import Mesh, training_dtype, training_mesh
from model.transformer import Transformer
from train.accelerator import this_accelerator
from train.checkpoint import Checkpoint, Files, TrainingStateError, newest_checkpoint, open_checkpoint
from train.checkpoint_writer import CheckpointWriter
from train.config import TrainingConfig
from train.data import TokenizedDocuments
from train.objectives import Objective, ObjectiveOfModel
from train.optimizer import (
    FrozenDigest,
    learning_rate_factor,
    make_optimizer,
    named_moments,
    named_weights,
    prepare_moments,
    restore,
)
from train.packing import Batch
from train.parallel import Parallel, check_processes
from train.progress import Progress
from train.sampler import Sampler
from train.signals import StopRequested, StopSignals
from train.tracking import Tracker

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3
KEPT_CHECKPOINTS = 2
"""The one before the newest is there in case the newest is damaged."""


@dataclass(frozen=True)
class TrainingResult:
    """What `Trainer.train` did, earlier runs that it resumed included."""

    steps: int
    tokens: int
    """Positions that were computed; micro-batches are nearly full, so a little less than steps times batch_tokens."""
    seconds: float
    """Spent in steps; evaluations and checkpoints are not counted."""
    metrics: dict[str, float | None]
    """Of the last step, and of the last evaluation; None where it was not finite."""
    interrupted: bool
    """A signal stopped it before the last step; calling `train` again goes on."""
    skipped: int
    """Steps without an update because the gradient was not finite."""


class DivergedError(RuntimeError):
    """The gradient stayed non-finite. The weights are those of the last good step, and so is the last checkpoint."""


class MemoryShortageError(RuntimeError):
    """The device's memory does not hold what training needs at once; the last checkpoint is from before."""


@dataclass
class _Counters:
    """What a checkpoint keeps beside weights, moments and the sampler's position."""

    step: int = 0
    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluation_due: bool = False
    metrics: dict[str, float | None] = field(default_factory=dict)


@contextmanager
def _deterministic(asked: bool) -> Iterator[None]:
    """While training, kernels repeat their bits if asked to; what torch was told before stays valid, and comes back."""
    before = torch.get_deterministic_debug_mode()
    if asked and not before:
        torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class _Replicated:
    """Every process has the model whole."""

    def __init__(self, model: Transformer, objective: Objective, accelerator: "Accelerator") -> None:
        self.accelerator, self.model = accelerator, model.to(accelerator.device)
        self.trained = model
        self.parts, self.part = 1, 0 if accelerator.is_main_process else None
        self.module: nn.Module = ObjectiveOfModel(model, objective)
        if accelerator.num_processes > 1:  # one process has nothing to wrap
            with warnings.catch_warnings():  # torch has a new name for what accelerate gives it
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                self.module = accelerator.prepare_model(self.module)
            accelerator.free_memory()  # it outlives the trainer, and must not keep the model

    @property
    def divided_by(self) -> int:
        """DistributedDataParallel has averaged what must be a sum."""
        return self.accelerator.num_processes

    def part_of(self, batch: Batch) -> Batch:
        return batch

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients travel between processes once a step, with the last micro-batch."""
        return nullcontext() if last else self.accelerator.no_sync(self.module)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def clear(self) -> None:
        # Freed, not zeroed: the next backward fills them while it frees activations, so the two never add up.
        self.model.zero_grad(set_to_none=True)

    def whole(self) -> Transformer | None:
        return self.model if self.accelerator.is_main_process else None

    def written(self) -> dict[str, str]:
        return {name: name for name, _ in self.trained.named_parameters()}

    def put_away(self) -> None:
        """It is what training goes on with."""


def _parallel(
    model: Transformer, objective: Objective, accelerator: "Accelerator", mesh: Mesh, dtype: torch.dtype
) -> Parallel:
    """As the mesh says. `dtype`: of products."""
    if mesh.is_whole:
        return _Replicated(model, objective, accelerator)
    from train.sharding import Sharded

    return Sharded(model, objective, accelerator, mesh, dtype)


class Trainer:
    """Trains the parameters of `model` that require a gradient, in place. They must be fp32: the master weights.

    Frozen ones may have any dtype; they have no gradient, no moments, and no copy in the checkpoints.
    """

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
        """`folder` receives `checkpoints/`; `evaluate` runs on process 0, in the training precision."""
        self.accelerator, self.given = this_accelerator(), model
        self.config, self.tracker, self.evaluate = config, tracker, evaluate
        self.steps, self.micro_batches = config.steps, config.micro_batches_per_step
        self.checkpoints = Path(folder) / "checkpoints"
        self.is_main = self.accelerator.is_main_process
        self.world, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.mesh = training_mesh(config.dp_shard_size)
        check_processes(model, data, config, self.mesh, self.world)
        self.sampler = Sampler(
            data, sequence_length=sequence_length, micro_batch_tokens=config.micro_batch_tokens, seed=config.seed
        )
        frozen = FrozenDigest(model)
        model.activation_checkpointing = config.activation_checkpointing or self.mesh.recomputes
        self.dtype = training_dtype(config.precision, on_gpu=self.accelerator.device.type == "cuda")
        self.parallel = _parallel(model, objective, self.accelerator, self.mesh, self.dtype)
        self.frozen = frozen.hexdigest()
        self.model, self.module = self.parallel.model, self.parallel.module
        self.optimizer = make_optimizer(self.parallel.trained, config)
        self.writer = CheckpointWriter(
            self.checkpoints, keep=KEPT_CHECKPOINTS, part=self.parallel.part, parts=self.parallel.parts
        )
        self.counters = _Counters()
        self.micro_batch_parts = 1
        """In which each micro-batch is computed, one after the other: more once memory has been short."""
        self._saved: tuple[int, bool] | None = None
        self._saved_at = time.monotonic()

    def train(self) -> TrainingResult:
        """Trains to the last step, from the newest valid checkpoint or from the beginning.

        Raises DivergedError after more than three steps in a row with a non-finite gradient.
        """
        if self.config.precision == "bf16" and self.dtype != torch.bfloat16:
            log.info("This CPU has no bf16 instructions: products are in fp32.")
        self._resume()
        interrupted = False
        with (
            StopSignals() as signals,
            self.writer,
            self._display() as display,
            _deterministic(self.config.deterministic),
        ):
            while not (interrupted or self._finished()):
                if self.counters.evaluation_due:
                    interrupted = self._run_evaluation(signals)
                    save = False
                else:
                    interrupted, save = self._run_step(signals, display)
                if interrupted or self._finished() or (save and not self.counters.evaluation_due):
                    self._save()
                elif time.monotonic() - self._saved_at >= self.config.checkpoint_every_s / 2:
                    self.writer.prepare(self._files)
        if not interrupted:
            self.parallel.whole()
        self.model.eval()
        self.given.eval()
        return self._result(interrupted)

    def _finished(self) -> bool:
        return self.counters.step == self.steps and not self.counters.evaluation_due

    def _display(self) -> Progress:
        batch = self.config.batch_tokens
        done, total = self.counters.step * batch, self.steps * batch
        return Progress("training", total, done=done, enabled=self.is_main)

    # One step

    def _run_step(self, signals: StopSignals, display: Progress) -> tuple[bool, bool]:
        """One optimizer step. Returns whether to stop and whether to save, the same on every process."""
        began = time.monotonic()
        factor = learning_rate_factor(self.counters.step, self.steps, self.config)
        sums, tokens, labels = self._accumulate()
        norm = self._update(labels, factor)
        save = self.is_main and time.monotonic() - self._saved_at >= self.config.checkpoint_every_s
        failed = self.writer.error is not None
        totals, (stop, save, failed) = self._over_processes(sums, signals.requested, save, failed)
        if failed:
            self.writer.wait()
        self.counters.step += 1
        self.counters.tokens += tokens
        seconds = time.monotonic() - began
        self.counters.seconds += seconds
        metrics = {name: value / labels for name, value in totals.items()}
        metrics |= {"gradient_norm": norm, "learning_rate": self.config.learning_rate * factor}
        self._record(metrics | {"tokens": self.counters.tokens}, {"tokens_per_s": tokens / seconds})
        display.advance(self.config.batch_tokens, f"loss {metrics['loss']:.3f}, {tokens / seconds:,.0f} tokens/s")
        self._count_skips(math.isfinite(norm))
        self.counters.evaluation_due = self._evaluation_follows()
        return stop, save

    def _accumulate(self) -> tuple[dict[str, Tensor], int, int]:
        """Adds up the gradients of this process's micro-batches.

        Returns the sums of its metrics, and the tokens and terms of the loss of all processes' micro-batches.
        """
        taken = self.sampler.take(self.micro_batches)
        while (sums := self._gradients_of(taken)) is None:
            self._compute_in_halves()
        tokens = sum(int(self.sampler.pieces.length[numbers].sum()) for numbers in taken)
        return sums, tokens, sum(self.sampler.num_terms(numbers) for numbers in taken)

    def _gradients_of(self, taken: list[np.ndarray]) -> dict[str, Tensor] | None:
        """The sums of its metrics; None where memory is short and smaller parts may fit."""
        group = self.rank // self.mesh.together
        member = self.rank % self.mesh.context  # those that divide layers draw the same numbers
        own = range(group, len(taken), self.world // self.mesh.together)
        sums: dict[str, Tensor] = {}
        for index in own:
            # Whatever draws random numbers draws the same ones on any process, for the same tokens, and after a resume.
            torch.manual_seed(_mix(self.config.seed, self.counters.step, index, *([member] if member else [])))
            parts = self.sampler.split(taken[index], self.micro_batch_parts)
            for number, part in enumerate(parts):
                try:
                    self._add_gradients(part, sums, last=index == own[-1] and number == len(parts) - 1)
                except torch.OutOfMemoryError as shortage:
                    self._check_divisible(part, shortage)
                    return None  # what was on its way to the error is free once this has returned
        return sums

    def _add_gradients(self, numbers: np.ndarray, sums: dict[str, Tensor], *, last: bool) -> None:
        """Those of a batch of pieces, and its metrics to `sums`."""
        batch = self.parallel.part_of(self.sampler.batch(numbers)).to(self.accelerator.device)
        with self.parallel.accumulating(last=last):
            with self._autocast():
                output = self.module(batch, self.counters.step / self.steps)
            output.loss_sum.backward()
        for name, value in {"loss": output.loss_sum.detach(), **output.metrics}.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()

    def _check_divisible(self, numbers: np.ndarray, shortage: torch.OutOfMemoryError) -> None:
        """Raises MemoryShortageError where smaller parts cannot help."""
        what, advice = "a micro-batch", "lower micro_batch_tokens, which only a process alone does by itself"
        if len(numbers) == self.sampler.neighbours:
            what = "one document" if len(numbers) == 1 else "one pair of answers"
            advice = "lower sequence_length, or set activation_checkpointing: true"
        elif self.world == 1:  # otherwise all wait for this one in the middle of a step
            return
        tokens = int(self.sampler.pieces.length[numbers].sum())
        raise MemoryShortageError(f"memory does not hold {what} of {tokens:,} tokens: {advice}") from shortage

    def _compute_in_halves(self) -> None:
        """From now on, and this step from its beginning: backward may have added a part of its gradients already."""
        self.parallel.clear()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        self.micro_batch_parts *= 2
        parts, step = self.micro_batch_parts, self.counters.step + 1
        log.warning(
            "Step %d: memory is short. Each micro-batch is computed in %d parts, to the same sums.", step, parts
        )

    def _update(self, labels: int, factor: float) -> float:
        """Divides the gradient by the labels, clips it, applies it if finite. Returns its norm before clipping."""
        gradients = self.parallel.gradients()
        scale = self.parallel.divided_by / labels
        norm = self.parallel.norm(gradients).item() * scale
        if math.isfinite(norm):
            torch._foreach_mul_(gradients, scale * min(1.0, self.config.max_grad_norm / max(norm, 1e-12)))
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.learning_rate * factor * group["rate"]
            if self.writer.copy.arriving is not None:
                self.writer.copy.update_may_begin()
            self.optimizer.step()
            self.counters.updates += 1
        self.parallel.clear()
        return norm

    def _over_processes(self, sums: dict[str, Tensor], *votes: bool) -> tuple[dict[str, float], list[bool]]:
        """Sums over all processes, and for each vote whether any of them cast it."""
        flags = torch.tensor(votes, dtype=torch.float64, device=self.accelerator.device)
        values = self.accelerator.reduce(torch.stack([*sums.values(), *flags]), "sum").tolist()
        return dict(zip(sums, values, strict=False)), [value > 0 for value in values[len(sums) :]]

    def _autocast(self) -> torch.autocast:
        device = self.accelerator.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _count_skips(self, updated: bool) -> None:
        self.counters.skipped_in_a_row = 0 if updated else self.counters.skipped_in_a_row + 1
        if updated:
            return
        self.counters.skipped += 1
        log.warning("Step %d: the gradient is not finite; the update is skipped.", self.counters.step)
        if self.counters.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(
                f"the gradient was not finite in {self.counters.skipped_in_a_row} steps in a row, up to step "
                f"{self.counters.step}: lower the learning rate (now {self.config.learning_rate}) or check the data"
            )

    def _record(self, metrics: dict[str, float], timings: dict[str, float]) -> None:
        self.counters.metrics |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if self.is_main:
            self.tracker.log(self.counters.step, metrics, timings)

    # Evaluation

    def _evaluation_follows(self) -> bool:
        """After the last step, and after each step that crosses a multiple of `evaluate_every_tokens`."""
        if self.evaluate is None or self.counters.step == self.steps:
            return self.evaluate is not None
        every, batch, step = self.config.evaluate_every_tokens, self.config.batch_tokens, self.counters.step
        return every is not None and step * batch // every > (step - 1) * batch // every

    def _run_evaluation(self, signals: StopSignals) -> bool:
        """Runs the callback on process 0; a stop throws it away, and whoever resumes runs it first."""
        stop, model = signals.requested, self.parallel.whole()
        if model is not None and self.evaluate is not None:
            model.eval()
            try:
                with signals.interruptible(), self._autocast():
                    found = self.evaluate(model)
                self._record(found, {})
                figures = ", ".join(f"{name.removeprefix('held_out_')} {value:.3f}" for name, value in found.items())
                log.info("held-out text after step %d of %d: %s", self.counters.step, self.steps, figures)
            except StopRequested:
                stop = True
            model.train()
        self.parallel.put_away()
        _, (stop,) = self._over_processes({}, stop)
        self.counters.evaluation_due = stop
        return stop

    # Saving and resuming

    def _save(self) -> None:
        """Has a checkpoint written behind training, unless one of this very state exists."""
        now = (self.counters.step, self.counters.evaluation_due)
        if self._saved != now:
            self.writer.save(self.counters.step, self._files(), self._state() if self.is_main else {})
        self._saved, self._saved_at = now, time.monotonic()

    def _files(self) -> Files:
        """What this process writes of a checkpoint."""
        written = self.parallel.written()
        weights = named_weights(self.parallel.trained)
        moments = named_moments(self.parallel.trained, self.optimizer)
        states = [(*key.partition(".")[::2], tensor) for key, tensor in moments.items()]
        return {
            "model": {written[name]: tensor for name, tensor in weights.items() if name in written},
            "optimizer": {f"{kind}.{written[name]}": tensor for kind, name, tensor in states if name in written},
        }

    def _state(self) -> dict[str, Any]:
        return {
            "counters": asdict(self.counters),
            "sampler": self.sampler.state_dict(),
            "batch_tokens": self.config.batch_tokens,
            "frozen": self.frozen,
            "optimizer": self.config.optimizer,
            "metrics_bytes": self.tracker.sync(),
        }

    def _resume(self) -> None:
        # It sets damaged ones aside before any process reads, and spares the others the verification.
        checkpoint = newest_checkpoint(self.checkpoints) if self.is_main else None
        step = self._agreed(-1 if checkpoint is None else checkpoint.step)
        if step >= 0:
            checkpoint = checkpoint or open_checkpoint(self.checkpoints, step)
            self._restore(checkpoint)
            log.info("Resuming from step %d of %d.", self.counters.step, self.steps)
        if self.is_main:
            self.tracker.start(checkpoint.state["metrics_bytes"] if checkpoint is not None else 0)
        self.model.train()

    def _agreed(self, number: int) -> int:
        """The main process's number."""
        value = torch.tensor(number if self.is_main else 0, device=self.accelerator.device)
        return int(self.accelerator.reduce(value, "sum"))

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError when the checkpoint is of another model, of other data, or does not fit this run."""
        state = checkpoint.state
        if reason := self._unfit(checkpoint.step, state):
            sentence = f"{checkpoint.folder} is {reason}. Restore that, or delete {self.checkpoints} to start over."
            raise TrainingStateError(sentence)
        self.sampler.load_state_dict(state["sampler"])
        self.counters = _Counters(**state["counters"])
        prepare_moments(self.parallel.trained, self.optimizer, self.counters.updates)
        restore(self.parallel.trained, self.optimizer, checkpoint.folder)
        self._saved = (self.counters.step, self.counters.evaluation_due)

    def _unfit(self, step: int, state: dict[str, Any]) -> str | None:
        """Why a checkpoint does not fit this run. Where moments lie (`paged`) makes no difference."""
        config, moments = self.config, state.get("optimizer", "adamw").removeprefix("paged_")
        if state["batch_tokens"] != config.batch_tokens or step > self.steps:
            here = f"this one has {self.steps} steps with batch_tokens={config.batch_tokens}"
            return f"step {step} of a run with batch_tokens={state['batch_tokens']}; {here}"
        if moments != config.optimizer.removeprefix("paged_"):
            return f"of a run with optimizer={moments}; this one has optimizer={config.optimizer}"
        if state.get("frozen", self.frozen) != self.frozen:
            return "of a run on another base: the frozen weights differ"
        return None

    def _result(self, interrupted: bool) -> TrainingResult:
        counters = self.counters
        return TrainingResult(
            steps=counters.step,
            tokens=counters.tokens,
            seconds=counters.seconds,
            metrics=dict(counters.metrics),
            interrupted=interrupted,
            skipped=counters.skipped,
        )


def _mix(*numbers: int) -> int:
    """A 63-bit hash."""
    digest = hashlib.sha256(":".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
