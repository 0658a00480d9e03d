"""How well a model predicts held-out text, and its distance to a teacher, in chunks that never hold all logits.

    nll              mean of -log q(label), nats a token
    kl               mean KL(teacher ‖ student), nats a token
    agreement        fraction of positions where both put the same token first
    acceptance       1 - mean total variation: the chance that speculative decoding accepts the student's draft

Positions without a label do not count. The model that is measured runs in the precision around it (the trainer's
autocast, or its own dtype), a teacher always in its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.losses.linear_cross_entropy import linear_cross_entropy
from kernels.losses.linear_distillation import linear_distillation
from model.attention import AttentionOf, PackedAttention
from model.layers import Routing
from model.transformer import Transformer
from train.objectives import hidden_states, teacher_states
from train.packing import Batch


@dataclass(frozen=True)
class Comparison:
    """How far a student is from its teacher on the same text."""

    nll: float
    """The student's own."""
    kl: float
    agreement: float
    total_variation: float

    @property
    def acceptance(self) -> float:
        return 1 - self.total_variation


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's final hidden states of some batches, computed once for many comparisons."""

    weight: Tensor
    """Output projection `[V, D]`."""
    soft_cap: float | None
    """Of its logits."""
    hidden: tuple[Tensor, ...]
    """`[T, D]` of each batch."""


def mean_nll(
    model: Transformer,
    batches: Sequence[Batch],
    *,
    routing: Routing | None = None,
    attention: AttentionOf = PackedAttention,
) -> float:
    """Scores every label of `batches`; nats a token.

    `routing`: who passes layers that have a router, instead of the rule by which the model is served; `attention`: over
    what it attends, instead of keys and values as it computes them.
    """
    tokens, total, head, cap = _count_labels(batches), 0.0, model.head_weight.detach(), model.config.logit_soft_cap
    for batch in batches:
        batch = batch.to(model.device)
        with torch.no_grad():
            hidden = hidden_states(model, batch, routing, attention)
            total += linear_cross_entropy(hidden, head, batch.labels, soft_cap=cap).item()
    return total / tokens


def compute_teacher_states(teacher: Transformer, batches: Iterable[Batch]) -> TeacherStates:
    """Runs the teacher over `batches` once; keeps `tokens x D` values on its device."""
    hidden = tuple(teacher_states(teacher, batch.to(teacher.device)) for batch in batches)
    return TeacherStates(teacher.head_weight.detach(), teacher.config.logit_soft_cap, hidden)


def mean_nll_of_states(teacher: TeacherStates, batches: Sequence[Batch]) -> list[float]:
    """What the teacher whose states these are scores on each batch; nats a token."""
    pairs = ((hidden, batch.labels.to(hidden.device)) for batch, hidden in zip(batches, teacher.hidden, strict=True))
    cap = teacher.soft_cap
    sums = [linear_cross_entropy(hidden, teacher.weight, labels, soft_cap=cap) for hidden, labels in pairs]
    return [total.item() / _count_labels([batch]) for total, batch in zip(sums, batches, strict=True)]


def compare(
    student: Transformer,
    teacher: TeacherStates,
    batches: Sequence[Batch],
    *,
    routing: Routing | None = None,
    attention: AttentionOf = PackedAttention,
) -> Comparison:
    """Measures the student against the teacher, whose states are of these same batches.

    `routing` and `attention`: as in `mean_nll`, of the student.
    """
    tokens = _count_labels(batches)
    if len(teacher.hidden) != len(batches):
        raise ValueError(f"teacher states of {len(teacher.hidden)} batches cannot be compared on {len(batches)}")
    sums, head = torch.zeros(4, dtype=torch.float64), student.head_weight.detach()
    caps = student.config.logit_soft_cap, teacher.soft_cap
    for batch, reference in zip(batches, teacher.hidden, strict=True):
        batch = batch.to(student.device)
        with torch.no_grad():
            hidden = hidden_states(student, batch, routing, attention)
            result = linear_distillation(hidden, head, reference, teacher.weight, batch.labels, soft_caps=caps)
        measured = [result.cross_entropy, result.kl, result.agreement, result.total_variation]
        sums += torch.stack(measured).double().cpu()
    nll, kl, agreement, total_variation = (sums / tokens).tolist()
    return Comparison(nll=nll, kl=kl, agreement=agreement, total_variation=total_variation)


def _count_labels(batches: Sequence[Batch]) -> int:
    tokens = sum(batch.num_labels for batch in batches)
    if tokens == 0:
        raise ValueError("there is nothing to evaluate on: the held-out batches have no label")
    return tokens
