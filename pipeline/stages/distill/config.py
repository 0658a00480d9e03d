"""Settings of the stage `distill`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from pipeline.schema import Recipe
from pipeline.settings import COUNTS, setting
from pipeline.stages.shared import config as shared
from pipeline.stages.shared.config import Recovery
from train.config import OnPolicy

if TYPE_CHECKING:
    from model.config import ModelConfig


@dataclass(frozen=True)
class Shape:
    """What a student keeps of its origin, the most important of each; nothing keeps them all."""

    layers: int | None = setting(None, range=(1, 10_000))
    heads: int | None = setting(None, range=(1, 10_000), later=True)
    """Query heads of each layer. Every KV head keeps equally many; one that is a query head's own goes with it."""
    mlp: int | None = setting(None, range=COUNTS, later=True)
    """Neurons of each layer's MLP."""
    hidden: int | None = setting(None, range=COUNTS, later=True)
    """Channels of the residual stream, the same ones in all layers."""

    @property
    def is_narrow(self) -> bool:
        """Whether less than whole layers leaves the model."""
        return not self.heads == self.mlp == self.hidden is None

    def __str__(self) -> str:
        sizes = ((declared.name, getattr(self, declared.name)) for declared in fields(Shape))
        return ", ".join(f"{name} {size}" for name, size in sizes if size is not None) or "whole"


@dataclass(frozen=True)
class Student(Shape):
    """What the student starts from."""

    origin: str = setting(key="from", refers="model")
    """Name of the model whose weights the student starts with."""
    importance: str = setting("block_influence", choices=("block_influence", "perplexity"))
    """How a layer's importance is measured: by how much it turns its input (one pass over the text), or by how much
    the loss rises without it (one pass a layer). That of heads, neurons and channels is how large they are."""
    importance_tokens: int = setting(8_192, count=True, range=COUNTS)
    """Training tokens to measure the importance on."""
    candidates: tuple[Shape, ...] = setting((), later=True)
    """Instead of one shape several: each is trained on `candidate_tokens`, and the one then nearest to the teacher on
    held-out text becomes the student, trained as if it had been named alone."""
    candidate_tokens: int = setting(20_000, count=True, range=COUNTS, later=True)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one, or all candidates."""
        return self.candidates or (self,)


@dataclass(frozen=True)
class Distill(Recovery):
    """Stage: train a student towards a teacher's distribution, measure both, publish the student."""

    teacher: str | None = setting(None, refers="model")
    """Nothing: one that is not here, and has left what it says with the data. Then nothing is compared with it, and
    only the loss on the held-out text tells what training gave."""
    student: Student = setting()
    on_policy: OnPolicy = setting(OnPolicy(), later=True)
    """Let the student write part of its text itself; its engine holds a second copy of it."""
    draft_vocabulary: int | None = setting(None, weights=False, later=True, count=True, range=COUNTS)
    """Where the student drafts, it says only so many tokens, those that are most common in `data`: its steps are
    shorter, and it is right a little less often. Alone it says all."""

    @property
    def held_out_passes(self) -> int:
        """With those of candidates, before and after their training."""
        return super().held_out_passes + 2 * len(self.student.candidates)

    @property
    def compared_steps(self) -> int:
        return len(self.student.candidates) * math.ceil(self.student.candidate_tokens / self.batch_tokens)

    @property
    def teacher_tokens(self) -> int:
        """With those of a pass that says what is important; of layers by perplexity there is one a layer."""
        is_cut = any(str(shape) != str(Shape()) for shape in self.student.shapes)
        return super().teacher_tokens + self.student.importance_tokens * is_cut


WIDTH = 64
"""Narrower students have widths that are multiples of this, which kernels and groups of quantized weights divide."""


def choices(config: Distill, whole: "ModelConfig") -> dict[str, Distill]:
    """The recipe's own shapes; 5/6, 2/3, 1/2 of layers, MLP, channels; fewer query heads for each KV head."""
    sizes: list[Shape] = [*config.student.shapes]
    for share in (5 / 6, 2 / 3, 1 / 2):
        layers = max(1, round(whole.num_layers * share))
        sizes += [Shape(layers=layers), Shape(mlp=_width(whole.intermediate_size, share))]
        sizes += [Shape(hidden=_width(whole.hidden_size, share))]
        sizes += [Shape(layers=layers, mlp=_width(whole.intermediate_size, share))]
    group = whole.num_query_heads // whole.num_kv_heads
    sizes += [Shape(heads=whole.num_kv_heads * queries) for queries in range(group - 1, 0, -1)]
    wholes = {"layers": whole.num_layers, "mlp": whole.intermediate_size, "hidden": whole.hidden_size}
    found: dict[str, Distill] = {}
    for size in sizes:
        kept = {declared.name: getattr(size, declared.name) for declared in fields(Shape)}
        if all(value is None or 0 < value < wholes.get(name, value + 1) for name, value in kept.items()):
            found.setdefault(str(size), replace(config, student=replace(config.student, candidates=(), **kept)))
    return found


def _width(whole: int, share: float) -> int:
    return round(whole * share / WIDTH) * WIDTH


def mistakes(config: Distill, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Of its batches, a teacher that is not there, text that nobody would grade, a shape beside candidates."""
    yield from shared.mistakes(config, recipe)
    if config.on_policy.share and config.loss.kind == "cross_entropy":
        yield "on_policy.share", f"is {config.on_policy.share:g}, but with the loss cross_entropy no teacher grades it"
    if config.on_policy.share and recipe.data_set(config.data).has_distributions:
        yield "on_policy.share", f"is {config.on_policy.share:g}, but {config.data} is for training without the teacher"
    student = config.student
    if config.teacher is None:
        yield from _without_teacher(config, recipe)
    if student.candidates and str(student) != str(Shape()):
        yield "student", f"has candidates, and {student} beside them; write that in each candidate"
    if len(set(map(str, student.candidates))) < len(student.candidates):
        yield "student.candidates", "names a shape twice"


def _without_teacher(config: Distill, recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not recipe.data_set(config.data).has_distributions or config.loss.kind == "cross_entropy":
        yield "teacher", f"is not given, and {config.data} holds no distributions to learn from instead"
    if config.student.candidates:
        yield "student.candidates", "are ranked by how near they come to a teacher, but there is none"
    missing = dict.fromkeys(shared.REFERENCE_BOUNDS, "no teacher is here to compare with")
    yield from shared.nothing_to_bound(config.gate, missing | shared.NO_FALL)
