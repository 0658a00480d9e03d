"""Quality of a model on held-out text, and its distance to a teacher, in chunks that never hold all logits.

    nll              mean of -log q(label), nats a token
    perplexity       exp(nll); depends on the tokenizer
    bits per byte    sum of nll / (ln 2 · bytes of the text that the labels spell); comparable across tokenizers
    kl               mean KL(teacher ‖ student), nats a token
    agreement        fraction of positions where both put the same token first
    acceptance       1 - mean total variation: the chance that speculative decoding accepts the student's draft

Positions without a label do not count. The model that is measured runs in the precision around it (the trainer's
autocast, or its own dtype), a teacher always in its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.losses.linear_cross_entropy import linear_cross_entropy
from kernels.losses.linear_distillation import linear_distillation
from model.layers import Routing
from model.transformer import Transformer
from train.objectives import hidden_states, teacher_states
from train.packing import Batch


@dataclass(frozen=True)
class Quality:
    """How well a model predicts a text."""

    nll: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    """Labels that were scored."""


@dataclass(frozen=True)
class Comparison:
    """How far a student is from its teacher on the same text."""

    nll: float
    """The student's own, as in Quality."""
    kl: float
    agreement: float
    total_variation: float
    tokens: int

    @property
    def acceptance(self) -> float:
        return 1 - self.total_variation


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's final hidden states of some batches, computed once for many comparisons."""

    weight: Tensor
    """Output projection `[V, D]`."""
    hidden: tuple[Tensor, ...]
    """`[T, D]` of each batch."""


def evaluate_quality(
    model: Transformer, batches: Sequence[Batch], num_bytes: int | None = None, *, routing: Routing | None = None
) -> Quality:
    """Scores every label of `batches`; `num_bytes` is the text's size where the batches do not know it.

    `routing`: who passes layers that have a router, instead of the rule by which the model is served.
    """
    tokens = _count_labels(batches)
    if num_bytes is None:
        num_bytes = sum(batch.num_bytes for batch in batches)
    total = 0.0
    for batch in batches:
        batch = batch.to(model.device)
        with torch.no_grad():
            hidden = hidden_states(model, batch, routing)
            total += linear_cross_entropy(hidden, model.head_weight.detach(), batch.labels).item()
    return Quality(
        nll=total / tokens,
        perplexity=math.exp(min(total / tokens, 700.0)),  # exp overflows a double beyond 709
        bits_per_byte=total / (math.log(2) * num_bytes) if num_bytes else math.nan,
        tokens=tokens,
    )


def compute_teacher_states(teacher: Transformer, batches: Sequence[Batch]) -> TeacherStates:
    """Runs the teacher over `batches` once; keeps `tokens x D` values on its device."""
    hidden = tuple(teacher_states(teacher, batch.to(teacher.device)) for batch in batches)
    return TeacherStates(teacher.head_weight.detach(), hidden)


def compare(
    student: Transformer,
    teacher: Transformer | TeacherStates,
    batches: Sequence[Batch],
    *,
    routing: Routing | None = None,
) -> Comparison:
    """Measures the student against the teacher, or against states that were computed for these same batches.

    `routing`: as in `evaluate_quality`, of the student.
    """
    tokens = _count_labels(batches)
    if isinstance(teacher, TeacherStates) and len(teacher.hidden) != len(batches):
        raise ValueError(f"teacher states of {len(teacher.hidden)} batches cannot be compared on {len(batches)}")
    sums = torch.zeros(4, dtype=torch.float64)
    for number, batch in enumerate(batches):
        batch = batch.to(student.device)
        with torch.no_grad():
            reference = teacher.hidden[number] if isinstance(teacher, TeacherStates) else teacher_states(teacher, batch)
            weight = teacher.weight if isinstance(teacher, TeacherStates) else teacher.head_weight
            hidden = hidden_states(student, batch, routing)
            result = linear_distillation(hidden, student.head_weight.detach(), reference, weight, batch.labels)
        measured = [result.cross_entropy, result.kl, result.agreement, result.total_variation]
        sums += torch.stack(measured).double().cpu()
    nll, kl, agreement, total_variation = (sums / tokens).tolist()
    return Comparison(nll=nll, kl=kl, agreement=agreement, total_variation=total_variation, tokens=tokens)


def _count_labels(batches: Sequence[Batch]) -> int:
    tokens = sum(batch.num_labels for batch in batches)
    if tokens == 0:
        raise ValueError("there is nothing to evaluate on: the held-out batches have no label")
    return tokens
