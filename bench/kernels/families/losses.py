"""Losses on an output projection: the loss and the gradients of the student's hidden states and head. All rows count.

Peers are PyTorch, as one would write it, with all logits or in chunks, and Liger.

Legend: T tokens, V vocabulary, Ds and Dt hidden sizes of student and teacher.
"""

import math
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Adapt, Call, Inputs, Outputs, Shape, needs, normal
from kernels.losses._divergence import DivergenceKind
from kernels.losses.linear_cross_entropy import linear_cross_entropy_reference
from kernels.losses.linear_distillation import linear_distillation_reference

REFERENCE_ROWS = 512
JUMPING = ("total_variation", "acceptance")
"""Their gradients have the sign of p − q, which the last bit decides where both are alike: sides cannot be compared."""
KINDS: tuple[DivergenceKind, ...] = tuple(kind for kind in get_args(DivergenceKind) if kind not in JUMPING)
LossOf = Callable[[Tensor, Tensor, Inputs, slice], Tensor]
"""The summed loss of some of the rows, from the student's hidden states and head."""


def loss(tokens: int, vocabulary: int, student: int, teacher: int = 0, kind: DivergenceKind | str = "") -> Shape:
    """student [T, Ds], student_head [V, Ds], teacher [T, Dt], teacher_head [V, Dt], labels [T]; cross-entropy: Dt 0.

    FLOPs: the student's logits and two products of their gradient, the teacher's logits.
    """

    def make() -> dict[str, Any]:
        """Logits of a standard deviation of ½: larger ones lose in bf16 about as much as the bound allows."""
        made: dict[str, Any] = {"labels": torch.randint(0, vocabulary, (tokens,))}
        for name, size in (("student", student), ("teacher", teacher)):
            made[name] = normal(tokens, size)
            made[f"{name}_head"] = normal(vocabulary, size).mul_(0.5 * max(size, 1) ** -0.5)
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
    return in_chunks(wide, loss_by(linear_cross_entropy_reference, linear_distillation_reference), REFERENCE_ROWS)


def loss_by(cross_entropy: Callable[..., Tensor], distillation: Callable[..., Any]) -> LossOf:
    """The loss of a shape's kind by one of two functions, which get the teacher in the type of the student."""

    def loss_of(hidden: Tensor, head: Tensor, inputs: Inputs, rows: slice) -> Tensor:
        labels, kind = inputs.labels[rows], inputs.shape["kind"]
        if not kind:
            return cross_entropy(hidden, head, labels)
        teacher = (x.to(hidden.dtype) for x in (inputs.teacher[rows], inputs.teacher_head))
        return distillation(hidden, head, *teacher, labels, kind=kind, alpha=alpha_of(kind)).loss

    return loss_of


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


CHUNK = 1024
"""Rows that the chunked losses multiply at once: eight chunks at 8k tokens, products at full rate."""
LIGER_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
"""The divergences that Liger's JSD becomes."""


def by_rows(loss_of: LossOf, rows: int | None = None) -> Adapt:
    """A loss with its gradients, of `rows` rows at a time, else of all at once."""
    return lambda inputs: lambda: in_chunks(inputs, loss_of, rows or len(inputs.student))


def plain_loss(hidden: Tensor, head: Tensor, inputs: Inputs, rows: slice) -> Tensor:
    kind, logits = inputs.shape["kind"], F.linear(hidden, head).float()
    if not kind:
        return F.cross_entropy(logits, inputs.labels[rows], reduction="sum")
    log_q = logits.log_softmax(dim=-1)
    log_p = F.linear(inputs.teacher[rows], inputs.teacher_head).float().log_softmax(dim=-1)
    if kind == "forward_kl":
        return _kl(log_p, log_q)
    if kind == "reverse_kl":
        return _kl(log_q, log_p)
    alpha = alpha_of(kind)
    weight_p = 1 - alpha if kind == "skewed_reverse_kl" else alpha
    log_m = torch.logaddexp(log_p + math.log(weight_p), log_q + math.log(1 - weight_p))
    if kind == "jsd":
        return alpha * _kl(log_p, log_m) + (1 - alpha) * _kl(log_q, log_m)
    return _kl(log_p if kind == "skewed_forward_kl" else log_q, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q), summed."""
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


@needs("liger_kernel.ops")
def liger_cross_entropy(liger: Any, inputs: Inputs) -> Call:
    """With sums instead of means, and the gradient of the head added up in fp32, as ours."""
    options = (None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)
    apply = liger.LigerFusedLinearCrossEntropyFunction.apply
    return by_rows(lambda hidden, head, *_: apply(hidden, head, inputs.labels, *options)[0])(inputs)


@needs("liger_kernel.ops")
def liger_jsd(liger: Any, inputs: Inputs) -> Call:
    """Its generalized JSD, a mean over the tokens."""
    given = (inputs.teacher, inputs.teacher_head, inputs.labels)
    options = (LIGER_BETA[inputs.shape["kind"]], -100, 1.0, torch.float32)
    apply = liger.LigerFusedLinearJSDFunction.apply
    return by_rows(lambda hidden, head, *_: apply(hidden, head, *given, *options))(inputs)
