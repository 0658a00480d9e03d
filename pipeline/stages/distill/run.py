"""Stage `distill`: a student that is a part of a model, trained towards a teacher, measured before and after.

importance → candidates, if there are any → prune → measure → train
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from msgspec import UNSET

from model.config import ModelConfig
from model.files.checkpoint import load_config
from model.lazy import LazyModel
from model.mesh import training_mesh
from model.text.tokenizer import Tokenizer, vocabulary_difference
from model.training_memory import Setup
from pipeline.errors import UserError
from pipeline.results import Quality, Result
from pipeline.stages.distill.config import Distill
from pipeline.stages.distill.report import DistillDetails, DraftVocabulary
from pipeline.stages.distill.student import Cut, choose, cut_out, follow, measure_importance, shape_of_student
from pipeline.stages.distill.vocabulary import count_labels, most_common_tokens
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.rollouts import EngineRollouts
from pipeline.stages.shared.training import RecoveryStage, check_dense
from train.objectives import Distillation, LanguageModelling, StoredDistillation
from train.rollouts import OnPolicyDistillation

log = logging.getLogger(__name__)


class DistillStage(RecoveryStage[Distill]):
    """Its student may write part of its text itself."""

    def objective(self) -> LanguageModelling | Distillation | StoredDistillation:
        policy = self.config.on_policy
        if not policy.share:
            return super().objective()
        tokenizer = Tokenizer.load(self.context.model(self.config.student.origin))
        rollouts = EngineRollouts(tokenizer, policy, sequence_length=self.sequence_length)
        return OnPolicyDistillation(self.teacher, self.config.loss, policy, rollouts, self.matching)


@dataclass(frozen=True)
class Start:
    """What is known before the first step."""

    teacher: Quality | None
    before: Quality


def run(context: StageContext) -> Result[DistillDetails] | None:
    """Trains and measures in all processes; the main one publishes, and returns the result."""
    config: Distill = context.stage.config
    origin = config.student.origin
    check_dense(context, origin)
    _check_vocabularies(context, config)
    _check_mesh(config)
    whole = load_config(context.model(origin))
    for shape in config.student.shapes:
        shape_of_student(origin, whole, shape)
    stage = DistillStage(context, config.teacher, tokens_of=origin)
    vocabulary = _draft_vocabulary(stage, whole)
    importance = measure_importance(stage, whole)
    cuts = [cut_out(shape, whole, importance) for shape in config.student.shapes]
    for cut in cuts:
        _check_on_policy(stage, cut.config)
        _check_hidden_loss(stage, cut)
    cut, candidates = choose(stage, cuts)
    follow(stage, cut)
    start = context.start(Start, partial(_measure_start, stage, cut))
    student = stage.models.to_train(cut.of(LazyModel.of_folder(context.model(origin))))
    if vocabulary is not None:
        student.config = replace(student.config, draft_vocabulary=tuple(vocabulary.tolist()))
    training = stage.train(student)

    def details() -> DistillDetails:
        return DistillDetails(
            kept_layers=cut.layers,
            importance=tuple(importance["layers"].tolist()) if len(cut.layers) < whole.num_layers else (),
            width=cut.narrowed or UNSET,
            candidates=candidates or UNSET,
            draft_vocabulary=UNSET if vocabulary is None else _coverage(stage, vocabulary, whole),
        )

    measured = start.teacher, start.before
    return stage.finish_student(student, origin, measured=measured, training=training, details=details)


def setup(config: Distill, shapes: Mapping[str, ModelConfig]) -> Setup:
    """What its training holds in memory. Of candidates the largest counts; which layers stay changes no size."""
    origin = config.student.origin
    shapes_of_students = [shape_of_student(origin, shapes[origin], shape) for shape in config.student.shapes]
    largest = max(shapes_of_students, key=ModelConfig.num_parameters)
    teacher = shapes[config.teacher] if config.teacher else None
    return Setup(largest, config, teacher=teacher, whole_documents=teacher is None)  # of stored distributions


def _check_vocabularies(context: StageContext, config: Distill) -> None:
    """A divergence compares the chances of the same tokens, so both must number them alike, however padded."""
    teacher, student = config.teacher, config.student.origin
    if teacher is None:
        return
    names = (student, teacher)
    if difference := vocabulary_difference(context.model(student), context.model(teacher), names=names):
        raise UserError(f"{student} and {teacher} have different tokenizers: {difference}; they must be equal.")


def _check_mesh(config: Distill) -> None:
    if config.on_policy.share and not training_mesh(config.dp_shard_size).is_whole:
        raise UserError(
            "distill: a student that writes itself must be whole in every process, and this one is trained in shards; "
            "set on_policy.share to 0, or start as many replicas."
        )


def _draft_vocabulary(stage: DistillStage, whole: ModelConfig) -> np.ndarray | None:
    """What the student is to draft with, if less than all."""
    if (size := stage.config.draft_vocabulary) is None:
        return None
    tokenizer = Tokenizer.load(stage.context.model(stage.config.student.origin))
    try:
        return most_common_tokens(count_labels(stage.data.train, whole.vocab_size), size, tokenizer)
    except ValueError as error:
        raise UserError(f"distill: draft_vocabulary {error}.") from None


def _coverage(stage: DistillStage, vocabulary: np.ndarray, whole: ModelConfig) -> DraftVocabulary:
    """How much of the held-out text it spells."""
    counts = count_labels(stage.data.held_out, whole.vocab_size)
    return DraftVocabulary(len(vocabulary), whole.vocab_size, float(counts[vocabulary].sum() / max(counts.sum(), 1)))


def _check_on_policy(stage: DistillStage, student: ModelConfig) -> None:
    """What a student writes must fit its positions, and go through all its layers."""
    policy = stage.config.on_policy
    if policy.share and student.mixture_of_depths is not None:
        raise UserError("The student has routers, which learn from the data alone; set on_policy.share to 0.")
    if policy.share and stage.sequence_length + policy.max_tokens > student.num_positions:
        raise UserError(
            f"The student has {student.num_positions:,} positions, too few for a sequence_length of "
            f"{stage.sequence_length:,} and on_policy.max_tokens of {policy.max_tokens:,} behind it."
        )


def _check_hidden_loss(stage: DistillStage, cut: Cut) -> None:
    if not stage.config.loss.hidden_weight or not stage.config.teacher:
        return
    learnt, taught = cut.config.hidden_size, stage.teacher.config.hidden_size
    if learnt != taught:
        raise UserError(
            f"distill: the student has {learnt:,} channels and the teacher {taught:,}, so nothing says which of their "
            "hidden states correspond; set loss.hidden_weight to 0."
        )


def _measure_start(stage: DistillStage, cut: Cut) -> Start:
    """Measures teacher and pruned student."""
    held_out, origin = stage.held_out, stage.context.model(stage.config.student.origin)
    log.info(
        "measuring what is here of teacher and student before training, on %s held-out tokens",
        f"{held_out.num_tokens:,}",
    )
    reference = stage.reference if stage.config.teacher else None
    return Start(
        teacher=held_out.quality_of(reference) if reference else None,
        before=held_out.quality(stage.models.to_measure(cut.of(stage.models.weights(origin))), reference),
    )
