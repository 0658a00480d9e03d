"""Losses on an output projection: the loss and the gradients of the student's hidden states and head. All rows count.

Legend: T tokens, V vocabulary, Ds and Dt hidden sizes of student and teacher.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from bench.kernels.case import Inputs, Outputs, Shape, normal
from kernels.losses._divergence import DivergenceKind
from kernels.losses.linear_cross_entropy import linear_cross_entropy_reference
from kernels.losses.linear_distillation import linear_distillation_reference

REFERENCE_ROWS = 512
KINDS: tuple[DivergenceKind, ...] = get_args(DivergenceKind)
LossOf = Callable[[Tensor, Tensor, Inputs, slice], Tensor]
"""The summed loss of some of the rows, from the student's hidden states and head."""


def loss(tokens: int, vocabulary: int, student: int, teacher: int = 0, kind: DivergenceKind | str = "") -> Shape:
    """student [T, Ds], student_head [V, Ds], teacher [T, Dt], teacher_head [V, Dt], labels [T]; cross-entropy: Dt 0.

    FLOPs: the student's logits and two products of their gradient, the teacher's logits.
    """

    def make(device: torch.device) -> dict[str, Any]:
        """Logits of a standard deviation of ½: larger ones lose in bf16 about as much as the bound allows."""
        made: dict[str, Any] = {"labels": torch.randint(0, vocabulary, (tokens,), device=device)}
        for name, size in (("student", student), ("teacher", teacher)):
            made[name] = normal(tokens, size, device=device)
            made[f"{name}_head"] = normal(vocabulary, size, device=device).mul_(0.5 * max(size, 1) ** -0.5)
        return made

    sizes = f"{student}/{teacher}" if teacher else f"{student}"
    return Shape(
        name=f"{kind} {tokens}x{vocabulary} d{sizes}".strip(),
        fields={"tokens": tokens, "vocabulary": vocabulary, "student": student, "teacher": teacher, "kind": kind},
        make=make, reference=_reference, num_bytes=2.0 * (tokens + vocabulary) * (2 * student + teacher) + 8 * tokens,
        flops=2.0 * tokens * vocabulary * (3 * student + teacher),
    )  # fmt: skip


def alpha_of(kind: str) -> float:
    """The weight in the mixture, as the papers choose it."""
    return 0.5 if kind == "jsd" else 0.1


def _reference(inputs: Inputs) -> Outputs:
    wide = inputs.replace(student=inputs.student.double(), student_head=inputs.student_head.double())
    return in_chunks(wide, _reference_loss, REFERENCE_ROWS)


def _reference_loss(hidden: Tensor, head: Tensor, inputs: Inputs, rows: slice) -> Tensor:
    labels, kind = inputs.labels[rows], inputs.shape["kind"]
    if not kind:
        return linear_cross_entropy_reference(hidden, head, labels)
    teacher = (inputs.teacher[rows].double(), inputs.teacher_head.double())
    return linear_distillation_reference(hidden, head, *teacher, labels, kind=kind, alpha=alpha_of(kind)).loss


def in_chunks(inputs: Inputs, loss_of: LossOf, rows: int) -> Outputs:
    """Loss and gradients, summed over chunks of rows, each forward and backward before the next."""
    total, grad_head, grad_hidden = 0.0, None, []
    head = inputs.student_head.detach().requires_grad_()
    for start in range(0, len(inputs.student), rows):
        chunk = slice(start, start + rows)
        leaf = inputs.student[chunk].detach().requires_grad_()
        part = loss_of(leaf, head, inputs, chunk)
        grads = torch.autograd.grad(part, (leaf, head))
        grad_hidden.append(grads[0])
        grad_head = grads[1] if grad_head is None else grad_head.add_(grads[1])
        total = total + part.detach()
        del part, grads
    return total, grad_hidden[0] if len(grad_hidden) == 1 else torch.cat(grad_hidden), grad_head


def of_means(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """The reference's sums as means over the tokens."""
    tokens = len(expected[1])
    return outputs, tuple(x / tokens for x in expected)
