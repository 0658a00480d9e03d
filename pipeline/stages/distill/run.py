"""Stage `distill`: a student from some of a model's layers, trained towards a teacher, measured before and after.

importance → prune → measure → train
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from compress.prune.depth import block_influence, keep_layers, perplexity_increase, prune_depth
from model.config import ModelConfig
from model.cost import Setup
from model.files.checkpoint import load_model
from model.mesh import choose_device
from model.text.tokenizer import Tokenizer, different_token
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.measure.quality import PUBLISHED_DTYPE
from pipeline.results import Quality, Result
from pipeline.stages.distill.config import Distill, DistillDetails
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.training import (
    Teacher,
    check_dense,
    curve_of,
    finish,
    held_out_text,
    train,
    training_text,
    write_model,
)
from train.objectives import objective_of

if TYPE_CHECKING:
    from train.data import PreparedData

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What is known before the first step."""

    kept_layers: tuple[int, ...]
    importance: tuple[float, ...]
    teacher: Quality
    before: Quality


def run(context: StageContext) -> Result[DistillDetails] | None:
    """Trains in all processes; the main one measures, publishes, and returns the result."""
    config: Distill = context.stage.config
    check_dense(context, config.student.origin)
    _check_vocabularies(context, config)
    tokenizer = Tokenizer.load(context.inputs[config.teacher].folder)
    data = context.data(config.data, tokenizer)
    teacher = load_model(context.inputs[config.teacher].folder, dtype=PUBLISHED_DTYPE, device=choose_device())
    start = context.start(Start, partial(_measure_start, context, data, teacher))
    student = prune_depth(load_model(context.inputs[config.student.origin].folder), start.kept_layers)
    objective, curve = objective_of(config.loss, teacher), curve_of(context, data, teacher)
    training = train(context, data, student, objective, curve=curve)
    if not context.processes.is_main:
        return None
    return finish(
        context,
        data,
        partial(write_model, student, Tokenizer.load(context.inputs[config.student.origin].folder)),
        training=training,
        details=DistillDetails(kept_layers=start.kept_layers, importance=start.importance),
        teacher=Teacher(config.teacher, teacher, start.teacher, start.before),
    )


def setup(config: Distill, shapes: Mapping[str, ModelConfig]) -> Setup:
    """What its training holds in memory. Which layers are kept is not known yet, and all are of one size."""
    origin = shapes[config.student.origin]
    count = config.student.layers or origin.num_layers
    if count > origin.num_layers:
        raise UserError(f"{config.student.origin} has {origin.num_layers} layers, so {count} cannot be kept.")
    return Setup(origin.keep_layers(tuple(range(count))), config, teacher=shapes[config.teacher])


def _check_vocabularies(context: StageContext, config: Distill) -> None:
    """A divergence compares the chances of the same tokens, so both must number them alike, however padded."""
    teacher, student = config.teacher, config.student.origin
    if (difference := different_token(context.inputs[teacher].folder, context.inputs[student].folder)) is not None:
        token, taught, learnt = difference
        raise UserError(
            f"{student} and {teacher} have different tokenizers: token {token} is {learnt!r} in {student} and "
            f"{taught!r} in {teacher}; they must be equal."
        )


def _measure_start(context: StageContext, data: "PreparedData", teacher: Transformer) -> Start:
    """Chooses the layers, measures teacher and pruned student."""
    config: Distill = context.stage.config
    original = load_model(context.inputs[config.student.origin].folder, dtype=PUBLISHED_DTYPE, device=teacher.device)
    kept, importance = _choose_layers(context, data, original)
    held_out = held_out_text(context, data)
    reference = held_out.states(teacher)
    log.info("measuring the teacher and the student before training, on %d batches", len(held_out.batches))
    return Start(
        kept_layers=kept,
        importance=importance,
        teacher=held_out.quality(teacher),
        before=held_out.quality(prune_depth(original, kept), reference),
    )


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
    measure = block_influence if student.importance == "block_influence" else perplexity_increase
    importance = measure(model, training_text(context, data, student.importance_tokens))
    return keep_layers(importance, student.layers), tuple(importance)
