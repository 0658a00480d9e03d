"""Stage `distill`: a student from some of a model's layers, trained towards a teacher, measured before and after.

    importance → prune → measure → train → round to bf16 → write candidate/ → measure → parity → gate → publish

What is measured is read back from candidate/, so the figures are those of the files that are published. A kill at any
point costs at most the work since the last arrow or checkpoint; the same command goes on from there.
"""

import copy
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from compress.depth import block_influence, keep_layers, perplexity_increase, prune_depth
from model.checkpoint import load_config, load_model, save_model
from model.files import sha256_of
from model.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.errors import RunInterrupted, StageFailed, UserError
from pipeline.gate import check_gate, describe
from pipeline.quality import PUBLISHED_DTYPE, HeldOut, check_parity, describe_model
from pipeline.result import Quality, Result, write_atomically
from pipeline.schema import Distill, Gate
from pipeline.stages.context import StageContext
from train.config import TrainingConfig
from train.loop import DivergedError, Trainer, TrainingResult
from train.objectives import Distillation, DistillationConfig
from train.packing import held_out_batches
from train.tracking import Tracker

if TYPE_CHECKING:
    from train.data import PreparedData

log = logging.getLogger(__name__)

START_NAME = "start.json"
CURVE_TOKENS = 4_096
"""Held-out tokens of each point of the curve during training: enough to see it, cheap enough to do often."""


@dataclass(frozen=True)
class Start:
    """What is known before the first step; kept, so that a resumed stage need not measure it again."""

    kept_layers: tuple[int, ...]
    importance: tuple[float, ...]
    teacher: Quality
    before: Quality


def run(context: StageContext) -> Result | None:
    """Trains in all processes; the main one measures, publishes, and returns the result."""
    config: Distill = context.stage.config
    _check_vocabularies(context, config)
    tokenizer = Tokenizer.load(context.inputs[config.teacher].folder)
    data = context.data(config.data, tokenizer)
    teacher = load_model(context.inputs[config.teacher].folder, dtype=PUBLISHED_DTYPE, device=device())
    if context.processes.is_main and not (context.folder / START_NAME).exists():
        _measure_start(context, data, teacher)
    context.processes.wait()
    start = msgspec.json.decode((context.folder / START_NAME).read_bytes(), type=Start)
    student = prune_depth(load_model(context.inputs[config.student.origin].folder), start.kept_layers)
    training = _train(context, data, teacher, student)
    if training.interrupted:
        raise RunInterrupted(
            f"{context.stage.name} is saved at step {training.steps} of {training_config(config).steps}; "
            "the same command goes on from here"
        )
    if not context.processes.is_main:
        return None
    return _finish(context, data, teacher, student, start=start, training=training)


def device() -> torch.device:
    """Where this process computes: its own GPU, or the CPU."""
    from train.loop import make_accelerator

    return make_accelerator().device


# --- before ----------------------------------------------------------------------------------------------------------


def _check_vocabularies(context: StageContext, config: Distill) -> None:
    """A divergence compares the chances of the same tokens, so both must number them alike."""
    teacher, student = (context.inputs[name].folder for name in (config.teacher, config.student.origin))
    same_size = load_config(teacher).vocab_size == load_config(student).vocab_size
    if not same_size or sha256_of(teacher / "tokenizer.json") != sha256_of(student / "tokenizer.json"):
        raise UserError(f"{config.student.origin} and {config.teacher} have different tokenizers; they must be equal.")


def _measure_start(context: StageContext, data: "PreparedData", teacher: Transformer) -> None:
    """Chooses the layers, measures teacher and pruned student, writes start.json."""
    config: Distill = context.stage.config
    original = load_model(context.inputs[config.student.origin].folder, dtype=PUBLISHED_DTYPE, device=teacher.device)
    kept, importance = _choose_layers(context, data, original)
    held_out = _held_out(context, data)
    reference = held_out.states(teacher)
    log.info("measuring the teacher and the student before training, on %d batches", len(held_out.batches))
    start = Start(
        kept_layers=kept,
        importance=importance,
        teacher=held_out.quality(teacher),
        before=held_out.quality(prune_depth(original, kept), reference),
    )
    write_atomically(context.folder / START_NAME, msgspec.json.encode(start))


def _choose_layers(
    context: StageContext, data: "PreparedData", model: Transformer
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Indices of the layers to keep, and each layer's importance (empty when all are kept)."""
    student, total = context.stage.config.student, model.config.num_layers
    if student.layers is None or student.layers == total:
        return tuple(range(total)), ()
    if student.layers > total:
        raise UserError(f"student.layers is {student.layers}, but {student.origin} has only {total} layers.")
    log.info("choosing %d of %d layers by %s", student.layers, total, student.importance)
    sequence_length = context.recipe.data[context.stage.config.data].sequence_length
    batches = held_out_batches(
        data.train,
        sequence_length=sequence_length,
        batch_tokens=sequence_length,
        max_tokens=max(student.importance_tokens, sequence_length),
    )
    measure = block_influence if student.importance == "block_influence" else perplexity_increase
    importance = measure(model, batches)
    return keep_layers(importance, student.layers), tuple(importance)


def _held_out(context: StageContext, data: "PreparedData", *, max_tokens: int | None = None) -> HeldOut:
    config: Distill = context.stage.config
    sequence_length = context.recipe.data[config.data].sequence_length
    return HeldOut.of(data, sequence_length=sequence_length, max_tokens=max_tokens or config.held_out_tokens)


# --- training --------------------------------------------------------------------------------------------------------


def _train(context: StageContext, data: "PreparedData", teacher: Transformer, student: Transformer) -> TrainingResult:
    config: Distill = context.stage.config
    tracker = Tracker(
        context.folder,
        run_name=f"{context.recipe.name}-{context.stage.name}",
        job_type=context.stage.kind,
        wandb=context.recipe.tracking.wandb,  # type: ignore[arg-type]  # the schema allows no other word
        group=context.recipe.name,
        config=asdict(config),
    )
    trainer = Trainer(
        student,
        Distillation(teacher, DistillationConfig(**asdict(config.loss))),
        data.train,
        training_config(config),
        folder=context.folder,
        sequence_length=context.recipe.data[config.data].sequence_length,
        tracker=tracker,
        evaluate=_curve(context, data, teacher) if config.evaluate_every_tokens else None,
    )
    log.info("training on %s tokens in %d steps", f"{config.tokens:,}", training_config(config).steps)
    try:
        return trainer.train()
    except DivergedError as error:
        raise StageFailed(f"{context.stage.name}: {error}") from None
    finally:
        tracker.finish()


def training_config(stage: Distill) -> TrainingConfig:
    """The loop's part of a stage's settings."""
    names = {setting.name for setting in fields(TrainingConfig)} & {setting.name for setting in fields(stage)}
    return TrainingConfig(**{name: getattr(stage, name) for name in names})


def _curve(
    context: StageContext, data: "PreparedData", teacher: Transformer
) -> Callable[[Transformer], dict[str, float]]:
    """What the loop calls now and then: held-out figures of the student as it would be published now."""
    held_out = _held_out(context, data, max_tokens=min(CURVE_TOKENS, context.stage.config.held_out_tokens))
    reference = held_out.states(teacher)

    def measure(model: Transformer) -> dict[str, float]:
        quality = held_out.quality(_rounded(model), reference)
        found = {"cross_entropy": quality.nll, "kl": quality.kl, "agreement": quality.agreement}
        found |= {"acceptance": quality.acceptance}
        return {f"held_out_{name}": estimate.value for name, estimate in found.items() if estimate is not None}

    return measure


def _rounded(model: Transformer) -> Transformer:
    """A copy as it would be published; the model being trained stays in fp32."""
    return copy.deepcopy(model).to(PUBLISHED_DTYPE).requires_grad_(False)


# --- after -----------------------------------------------------------------------------------------------------------


def _finish(
    context: StageContext,
    data: "PreparedData",
    teacher: Transformer,
    student: Transformer,
    *,
    start: Start,
    training: TrainingResult,
) -> Result:
    """Writes the candidate, measures it, and publishes it if parity and gate allow."""
    config: Distill = context.stage.config
    candidate = context.folder / "candidate"
    shutil.rmtree(candidate, ignore_errors=True)
    save_model(student, candidate, dtype=PUBLISHED_DTYPE)
    Tokenizer.load(context.inputs[config.student.origin].folder).save(candidate)
    log.info("measuring the student after training")
    held_out = _held_out(context, data)
    model = load_model(candidate, dtype=PUBLISHED_DTYPE, device=teacher.device)
    after = held_out.quality(model, held_out.states(teacher))
    reports = [
        describe_model(config.teacher, teacher, start.teacher),
        replace(describe_model(f"{config.out}, before", model, start.before), same_shape_as=config.out),
        describe_model(config.out, model, after),
    ]
    parity = check_parity(candidate, held_out.batches, teacher.device)
    gate: Gate = config.gate
    checks = check_gate(gate, after, start.before)
    for check in checks:
        log.info("%s", describe(check))
    output = None
    if parity.passed and all(check.passed for check in checks):
        output = context.publish(
            lambda folder: _move_files(candidate, folder),
            reports=reports,
            gates={"parity": asdict(parity), **{check.name: asdict(check) for check in checks}},
        )
    return context.result(
        output=output,
        models=reports,
        gate=checks,
        parity=parity,
        training=(training.tokens, training.seconds),
        details={
            "kept_layers": start.kept_layers,
            "importance": start.importance,
            "steps": training.steps,
            "skipped_steps": training.skipped,
        },
    )


def _move_files(source: Path, target: Path) -> None:
    """Moves a folder's contents; both lie on one file system."""
    for path in sorted(source.iterdir()):
        path.rename(target / path.name)
    source.rmdir()
