"""Stage `distill`: a student from some of a model's layers, trained towards a teacher, measured before and after.

importance → prune → measure → train
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from compress.prune.depth import block_influence, keep_layers, perplexity_increase, prune_depth
from model.config import ModelConfig
from model.cost import Setup
from model.files.checkpoint import load_model
from model.text.tokenizer import Tokenizer, different_token
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.measure.quality import load_published
from pipeline.results import Quality, Result
from pipeline.stages.distill.config import Distill, DistillDetails
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.rollouts import EngineRollouts
from pipeline.stages.shared.training import RecoveryStage, check_dense
from train.objectives import Distillation, LanguageModelling
from train.rollouts import OnPolicyDistillation

log = logging.getLogger(__name__)


class DistillStage(RecoveryStage[Distill]):
    """Its student may write part of its text itself."""

    def objective(self) -> LanguageModelling | Distillation:
        policy = self.config.on_policy
        if not policy.share:
            return super().objective()
        tokenizer = Tokenizer.load(self.context.model(self.config.student.origin))
        rollouts = EngineRollouts(tokenizer, policy, sequence_length=self.sequence_length)
        return OnPolicyDistillation(self.teacher, self.config.loss, policy, rollouts)


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
    origin = config.student.origin
    check_dense(context, origin)
    _check_vocabularies(context, config)
    stage = DistillStage(context, config.teacher)
    start = context.start(Start, partial(_measure_start, stage))
    student = prune_depth(load_model(context.model(origin)), start.kept_layers)
    _check_on_policy(stage, student.config)
    training = stage.train(student)
    if not context.processes.is_main:
        return None
    details = DistillDetails(kept_layers=start.kept_layers, importance=start.importance)
    measured = start.teacher, start.before
    return stage.finish_student(student, origin, measured=measured, training=training, details=details)


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
    if (difference := different_token(context.model(teacher), context.model(student))) is not None:
        token, taught, learnt = difference
        raise UserError(
            f"{student} and {teacher} have different tokenizers: token {token} is {learnt!r} in {student} and "
            f"{taught!r} in {teacher}; they must be equal."
        )


def _check_on_policy(stage: DistillStage, student: ModelConfig) -> None:
    """What a student writes must fit its positions, and go through all its layers."""
    policy = stage.config.on_policy
    if policy.share and student.mixture_of_depths is not None:
        raise UserError("The student has routers, which learn from the data alone; set on_policy.share to 0.")
    if policy.share and stage.sequence_length + policy.max_tokens > student.max_position_embeddings:
        raise UserError(
            f"The student has {student.max_position_embeddings:,} positions, too few for a sequence_length of "
            f"{stage.sequence_length:,} and on_policy.max_tokens of {policy.max_tokens:,} behind it."
        )


def _measure_start(stage: DistillStage) -> Start:
    """Chooses the layers, measures teacher and pruned student."""
    original = load_published(stage.context.model(stage.config.student.origin))
    kept, importance = _choose_layers(stage, original)
    held_out = stage.held_out
    log.info("measuring the teacher and the student before training, on %d batches", len(held_out.batches))
    return Start(
        kept_layers=kept,
        importance=importance,
        teacher=held_out.quality_of(stage.reference),
        before=held_out.quality(prune_depth(original, kept), stage.reference),
    )


def _choose_layers(stage: DistillStage, model: Transformer) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Indices of the layers to keep, and each layer's importance (empty when all are kept)."""
    student, total = stage.config.student, model.config.num_layers
    if student.layers is None or student.layers == total:
        return tuple(range(total)), ()
    if student.layers > total:
        raise UserError(f"student.layers is {student.layers}, but {student.origin} has only {total} layers.")
    log.info("choosing %d of %d layers by %s", student.layers, total, student.importance)
    measure = block_influence if student.importance == "block_influence" else perplexity_increase
    importance = measure(model, stage.training_text(student.importance_tokens))
    return keep_layers(importance, student.layers), tuple(importance)
