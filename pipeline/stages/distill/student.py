"""What a student starts from: measured once, cut out of its origin, and chosen among candidates.

    importance.safetensors    of layers, heads, neurons and channels where some leave: what every cut follows from
    ranked/SHAPE/             a candidate's figures before and after its short training

Whatever of it is there is not done again.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from safetensors.torch import load_file
from torch import Tensor

from compress.prune.depth import block_influence, keep_layers, matching_layers, perplexity_increase, shortened
from compress.prune.width import KeptWidth, WidthImportance, keep_width, narrowed, width_importance
from model.config import ConfigError, ModelConfig
from model.lazy import LazyModel
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.results import Quality
from pipeline.stages.distill.config import Distill, Shape
from pipeline.stages.distill.report import Candidate, KeptParts, Narrowed
from pipeline.stages.shared.training import RecoveryStage, write_tensors

log = logging.getLogger(__name__)

Stage = RecoveryStage[Distill]
Importance = Mapping[str, Tensor]
"""`layers`, and the fields of WidthImportance, as far as a shape leaves some out."""

IMPORTANCE_NAME, RANKED_NAME = "importance.safetensors", "ranked"


@dataclass(frozen=True)
class Cut:
    """What stays of the origin for one shape."""

    shape: Shape
    config: ModelConfig
    """Of the student."""
    layers: tuple[int, ...]
    width: KeptWidth | None
    narrowed: Narrowed | None
    """The same in a few numbers; None where whole layers are all that leaves, as of `width`."""

    def of(self, origin: LazyModel) -> LazyModel:
        """The student, untrained."""
        student = shortened(origin, self.layers)
        return student if self.width is None else narrowed(student, self.width, self.config)


def shape_of_student(origin: str, whole: ModelConfig, shape: Shape) -> ModelConfig:
    """The configuration; of layers, the first stand for those that will be chosen. Raises UserError."""
    count = shape.layers or whole.num_layers
    if count > whole.num_layers:
        raise UserError(f"distill: {origin} has {whole.num_layers} layers, so {count} cannot be kept.")
    if shape.is_narrow and whole.mixture_of_depths is not None:
        raise UserError(
            f"distill: {origin} has routers, so only whole layers can leave it, not heads, mlp or hidden; make the "
            "student narrow first, then give it routers."
        )
    try:
        return _narrow(whole.keep_layers(tuple(range(count))), shape)
    except ConfigError as error:
        raise UserError(f"distill: no student of {origin} has {shape}: {error}") from None


def _narrow(whole: ModelConfig, shape: Shape) -> ModelConfig:
    return whole.narrow(heads=shape.heads, mlp=shape.mlp, hidden=shape.hidden) if shape.is_narrow else whole


# --- importance ------------------------------------------------------------------------------------------------------


def measure_importance(stage: Stage, whole: ModelConfig) -> Importance:
    """What all processes measure together once, and the main one keeps; nothing where nothing leaves."""
    shapes, path = stage.config.student.shapes, stage.context.folder / IMPORTANCE_NAME
    fewer_layers = any((shape.layers or whole.num_layers) < whole.num_layers for shape in shapes)
    narrower = any(shape.is_narrow for shape in shapes)
    if not fewer_layers and not narrower:
        return {}
    processes = stage.context.processes
    if processes.agree(int(not path.exists())):
        found = _measure(stage, fewer_layers=fewer_layers, narrower=narrower)
        if processes.is_main:
            write_tensors(path, found)
    processes.wait()
    return load_file(path)


def _measure(stage: Stage, *, fewer_layers: bool, narrower: bool) -> dict[str, Tensor]:
    student, processes, found = stage.config.student, stage.context.processes, {}
    origin = stage.models.to_calibrate(stage.models.weights(stage.context.model(student.origin)))
    text, group = processes.dealt(stage.training_text(student.importance_tokens)), processes.group
    if fewer_layers:
        log.info("measuring the importance of layers by %s", student.importance)
        measure = block_influence if student.importance == "block_influence" else perplexity_increase
        found["layers"] = torch.tensor(measure(origin, text, group), dtype=torch.float64)
    if narrower:
        log.info("measuring the importance of heads, neurons and channels")
        found |= width_importance(origin, text, group)._asdict()
    return found


def cut_out(shape: Shape, whole: ModelConfig, importance: Importance) -> Cut:
    """What stays for a shape that `shape_of_student` allows."""
    layers = tuple(range(whole.num_layers))
    if shape.layers is not None and shape.layers < whole.num_layers:
        layers = keep_layers(importance["layers"].tolist(), shape.layers)
    left = whole.keep_layers(layers)
    if not shape.is_narrow:
        return Cut(shape, left, layers, None, None)
    narrow = _narrow(left, shape)
    measured = WidthImportance(*(importance[name] for name in WidthImportance._fields)).of_layers(layers)
    width = keep_width(measured, left, narrow)
    narrowed = Narrowed(
        heads=_kept_parts(measured.heads, width.heads),
        mlp=_kept_parts(measured.neurons, width.neurons),
        hidden=_kept_parts(measured.channels.sum(0)[None], width.channels[None]),
    )
    return Cut(shape, narrow, layers, width, narrowed)


def _kept_parts(importance: Tensor, kept: Tensor) -> KeptParts:
    shares = importance.gather(1, kept).sum(1) / importance.sum(1)
    return KeptParts(kept.shape[1], importance.shape[1], tuple(shares.tolist()))


# --- candidates ------------------------------------------------------------------------------------------------------


def choose(stage: Stage, cuts: Sequence[Cut]) -> tuple[Cut, tuple[Candidate, ...]]:
    """The student's cut, and the candidates that it was chosen from; the recipe's one shape needs no choice."""
    if not stage.config.student.candidates:
        return cuts[0], ()
    tried = []
    for number, cut in enumerate(cuts):
        log.info("candidate %d of %d: %s", number + 1, len(cuts), cut.shape)
        tried.append(_try(stage, cut))
    best = min(range(len(cuts)), key=lambda number: _kl(tried[number][1]))
    log.info("%s is nearest to the teacher, and goes on", cuts[best].shape)
    return cuts[best], tuple(
        Candidate(str(cut.shape), cut.config.num_parameters(), before, after, chosen=cut is cuts[best])
        for cut, (before, after) in zip(cuts, tried, strict=True)
    )


def _try(stage: Stage, cut: Cut) -> tuple[Quality, Quality]:
    """Before its short training, and after it."""
    context, student = stage.context, stage.config.student
    folder, origin = context.folder / RANKED_NAME / str(cut.shape).replace(",", "").replace(" ", "-"), student.origin

    def measure() -> Quality:
        untrained = stage.models.to_measure(cut.of(stage.models.weights(context.model(origin))))
        return stage.held_out.quality(untrained, stage.reference)

    before = context.measured(folder / "before.json", Quality, measure)
    follow(stage, cut)
    make = partial(_trainable, stage, cut)
    return before, stage.trained_briefly(folder, make, student.candidate_tokens)


def follow(stage: Stage, cut: Cut) -> None:
    """Tells the stage which of the teacher's layers the student's are to be like, if it is cut from the teacher."""
    if stage.config.teacher == stage.config.student.origin:
        stage.matching = matching_layers(cut.layers, stage.teacher.config.num_layers)


def _trainable(stage: Stage, cut: Cut) -> Transformer:
    return stage.models.to_train(cut.of(LazyModel.of_folder(stage.context.model(stage.config.student.origin))))


def _kl(quality: Quality) -> float:
    return quality.kl.value if quality.kl else 0.0
