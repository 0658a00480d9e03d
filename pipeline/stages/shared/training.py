"""What the stages share that train a model: train, measure, check, publish.

    train → round to bf16 → write candidate/ → measure → parity → gate → publish

What is measured is read back from candidate/, so the figures are those of the files that are published. A kill at any
point costs at most the work since the last arrow or checkpoint; the same command goes on from there.
"""

import copy
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from compress.mod import calibrate, set_thresholds
from model.files.adapter import CONFIG_NAME as ADAPTER_NAME
from model.files.checkpoint import is_quantized, load_model, save_model
from model.mesh import choose_device
from model.routed import routed_layers
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.errors import RunInterrupted, StageFailed, UserError
from pipeline.measure.gates import check_gate, describe
from pipeline.measure.parity import check_parity
from pipeline.measure.quality import PUBLISHED_DTYPE, HeldOut, describe_model
from pipeline.results import Check, ModelReport, Quality, Result, TrainingDetails
from pipeline.stages.shared.config import Training
from pipeline.stages.shared.context import StageContext
from train.loop import DivergedError, Trainer, TrainingResult
from train.objectives import (
    Distillation,
    LanguageModelling,
    RoutedTraining,
    RoutingConfig,
)
from train.packing import Batch, held_out_batches
from train.tracking import Tracker

if TYPE_CHECKING:
    from train.data import PreparedData

log = logging.getLogger(__name__)

CURVE_TOKENS = 4_096
"""Held-out tokens of each point of the curve during training: enough to see it, cheap enough to do often."""
CALIBRATION_TOKENS = 8_192
"""Training tokens on which the thresholds of routers are set."""

D = TypeVar("D", bound=TrainingDetails)
Curve = Callable[[Transformer], dict[str, float]]


@dataclass(frozen=True)
class Teacher:
    """The model that another one is trained towards and compared with."""

    name: str
    """In the recipe."""
    model: Transformer
    quality: Quality
    before: Quality
    """Of the smaller model, before training."""


def check_dense(context: StageContext, name: str) -> None:
    """Raises UserError where a stage is to change weights that are quantized, or wait under an unmerged adapter."""
    folder, kind = context.inputs[name].folder, context.stage.kind
    if (folder / ADAPTER_NAME).exists():
        raise UserError(f"{kind}: {name} carries an adapter already; publish it merged to go on from it.")
    if is_quantized(folder):
        raise UserError(f"{kind}: {name} is quantized already; name the model that it was made from.")


def held_out_text(context: StageContext, data: "PreparedData", *, max_tokens: int | None = None) -> HeldOut:
    """The text that the stage measures on."""
    config: Training = context.stage.config
    return HeldOut.of(data, sequence_length=_sequence_length(context), max_tokens=max_tokens or config.held_out_tokens)


def training_text(context: StageContext, data: "PreparedData", tokens: int) -> Sequence[Batch]:
    """The first `tokens` of the training text: what structure is decided on."""
    length = _sequence_length(context)
    return held_out_batches(data.train, sequence_length=length, batch_tokens=length, max_tokens=max(tokens, length))


def _sequence_length(context: StageContext) -> int:
    return context.recipe.data[context.stage.config.data].sequence_length


# --- training --------------------------------------------------------------------------------------------------------


def train(
    context: StageContext,
    data: "PreparedData",
    model: Transformer,
    objective: LanguageModelling | Distillation,
    *,
    curve: Curve | None = None,
    folder: Path | None = None,
    tokens: int | None = None,
    routing: RoutingConfig | None = None,
) -> TrainingResult:
    """Trains `model` in place in all processes, in the stage's folder or another, as far as the budget says.

    Routers, where the model has some, go on at their capacity, or learn as `routing` says; then their thresholds are
    set anew. Frozen ones route as they are served, and keep their thresholds.

    Raises RunInterrupted after a signal, StageFailed when training diverged.
    """
    config: Training = context.stage.config
    settings = replace(config, tokens=tokens or config.tokens)
    tracker = Tracker(
        folder or context.folder,
        run_name=f"{context.recipe.name}-{context.stage.name}" + (f"-{folder.name}" if folder else ""),
        job_type=context.stage.kind,
        wandb=context.recipe.tracking.wandb,  # type: ignore[arg-type]  # the schema allows no other word
        group=context.recipe.name,
        config=asdict(config),
    )
    mixture = model.config.mixture_of_depths
    if routing is None and mixture is not None and learns_routing(model):
        routing = RoutingConfig(mixture.capacity, anneal_fraction=0.0)
    trainer = Trainer(
        model,
        objective if routing is None else RoutedTraining(objective, routing),
        data.train,
        settings,
        folder=folder or context.folder,
        sequence_length=_sequence_length(context),
        tracker=tracker,
        evaluate=curve,
    )
    log.info("training on %s tokens in %d steps", f"{settings.tokens:,}", settings.steps)
    try:
        training = trainer.train()
    except DivergedError as error:
        raise StageFailed(f"{context.stage.name}: {error}") from None
    finally:
        tracker.finish()
    if training.interrupted:
        raise RunInterrupted(
            f"{context.stage.name} is saved at step {training.steps} of {settings.steps}; "
            "the same command goes on from here"
        )
    calibrate_routers(context, data, model)
    return training


def curve_of(context: StageContext, data: "PreparedData", teacher: Transformer | None = None) -> Curve | None:
    """What the loop calls now and then: held-out figures of the model as it would be published now."""
    config: Training = context.stage.config
    if config.evaluate_every_tokens is None:
        return None
    held_out = held_out_text(context, data, max_tokens=min(CURVE_TOKENS, config.held_out_tokens))
    reference = None if teacher is None else held_out.states(teacher)

    def measure(model: Transformer) -> dict[str, float]:
        quality = held_out.quality(published_form(context, data, model), reference)
        found = {"cross_entropy": quality.nll, "kl": quality.kl, "agreement": quality.agreement}
        found |= {"acceptance": quality.acceptance}
        return {f"held_out_{name}": estimate.value for name, estimate in found.items() if estimate is not None}

    return measure


def published_form(context: StageContext, data: "PreparedData", model: Transformer) -> Transformer:
    """As it would be published: a copy in bf16 of a model that is trained in fp32, its routers calibrated.

    A frozen base with an adapter is published as it is.
    """
    is_frozen = model.dtype == PUBLISHED_DTYPE
    form = model if is_frozen else copy.deepcopy(model).to(PUBLISHED_DTYPE).requires_grad_(False)
    if learns_routing(model):
        calibrate(form, training_text(context, data, CALIBRATION_TOKENS))
    return form


def learns_routing(model: Transformer) -> bool:
    """Whether the model has routers and they are trained. A base frozen below an adapter keeps its own."""
    return any(layer.router.weight.requires_grad for layer in routed_layers(model))


def calibrate_routers(context: StageContext, data: "PreparedData", model: Transformer) -> None:
    """Sets the thresholds of routers that have learned as suits the rounded weights."""
    if not learns_routing(model):
        return
    calibrated = published_form(context, data, model).config.mixture_of_depths
    set_thresholds(model, calibrated.thresholds if calibrated else ())


# --- after -----------------------------------------------------------------------------------------------------------


def finish(
    context: StageContext,
    data: "PreparedData",
    write: Callable[[Path], None],
    *,
    training: TrainingResult,
    details: D,
    teacher: Teacher | None = None,
    before: Sequence[ModelReport] = (),
    more_checks: Sequence[Check] = (),
) -> Result[D]:
    """Lets `write` fill the candidate, measures it, and publishes it if parity and gates allow. For the main process.

    `before` are rows of models that were measured already, the last of them that of the model before training; with a
    `teacher` they follow from it.
    """
    config: Training = context.stage.config
    candidate = context.folder / "candidate"
    shutil.rmtree(candidate, ignore_errors=True)
    write(candidate)
    log.info("measuring %s after training", config.out)
    held_out = held_out_text(context, data)
    published = load_model(candidate, dtype=PUBLISHED_DTYPE, device=choose_device())
    after = held_out.quality(published, None if teacher is None else held_out.states(teacher.model))
    if teacher is not None:
        parent = describe_model(teacher.name, teacher.model, teacher.quality)
        untrained = describe_model(f"{config.out}, before", published, teacher.before)
        before = [parent, replace(untrained, same_shape_as=config.out)]
    reports = [*before, describe_model(config.out, published, after)]
    parity = check_parity(candidate, held_out.batches, published.device)
    checks = (*check_gate(config.gate, after, before[-1].quality if before else None), *more_checks)
    for check in checks:
        log.info("%s", describe(check))
    output = None
    if parity.passed and all(check.passed for check in checks):
        output = context.publish(
            lambda folder: _move_files(candidate, folder),
            reports=reports,
            gates={"parity": asdict(parity), **{check.name: asdict(check) for check in checks}},
            elsewhere=published.config.opens_elsewhere,
        )
    return context.result(
        output=output,
        models=reports,
        gate=checks,
        parity=parity,
        training=(training.tokens, training.seconds),
        details=replace(details, steps=training.steps, skipped_steps=training.skipped),
    )


def write_model(model: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """A model as it is published."""
    save_model(model, folder, dtype=PUBLISHED_DTYPE)
    tokenizer.save(folder)


def _move_files(source: Path, target: Path) -> None:
    """Moves a folder's contents; both lie on one file system."""
    for path in sorted(source.iterdir()):
        path.rename(target / path.name)
    source.rmdir()
