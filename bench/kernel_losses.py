"""Losses on an output projection: ours, plain PyTorch with all logits and in chunks of rows, and Liger's.

What is compared and timed is the loss and the gradients of the student's hidden states and head, forward and backward
together. Every token has a label. The most that a call holds beside its inputs is measured too.

Legend: T tokens, V vocabulary, Ds and Dt hidden sizes of student and teacher.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_cases import Candidate, Case, Outputs, Run, installed
from kernels.losses._divergence import DivergenceKind
from kernels.losses.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from kernels.losses.linear_distillation import linear_distillation, linear_distillation_reference

BF16 = torch.bfloat16
VOCABULARY = 131_072
STUDENT, TEACHER = 2048, 4096
CHUNK = 1024
"""Rows that the chunked losses multiply at once: eight chunks at 8k tokens, products at full rate."""
REFERENCE_ROWS = 512
LIGER_BETA: dict[DivergenceKind, float] = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
"""The divergences that Liger's JSD becomes."""
KINDS: tuple[DivergenceKind, ...] = get_args(DivergenceKind)
LossOf = Callable[[Tensor, Tensor, "LossInputs", slice], Tensor]
"""The summed loss of some of the rows, from the student's hidden states and head."""


def losses_cross_entropy(tiny: bool) -> list[Case]:
    """Linear + cross-entropy, forward and backward."""
    if tiny:
        return [_cross_entropy_case(LossShape(24, 200, 32))]
    shapes = [(8192, VOCABULARY, TEACHER), (8192, VOCABULARY, STUDENT), (2048, VOCABULARY, STUDENT)]
    return [_cross_entropy_case(LossShape(*shape)) for shape in [*shapes, (8192, 49_152, 576)]]


def losses_distillation(tiny: bool) -> list[Case]:
    """Linear + divergence of two heads, of all kinds, forward and backward."""
    if tiny:
        return [_distillation_case(LossShape(24, 200, 32, 48), kind) for kind in KINDS]
    shapes = [LossShape(8192, VOCABULARY, STUDENT, TEACHER)]
    smaller = [LossShape(2048, VOCABULARY, STUDENT, TEACHER), LossShape(8192, 49_152, 576, 1024)]
    return [
        *(_distillation_case(shape, kind) for shape in shapes for kind in KINDS),
        *(_distillation_case(shape, kind) for shape in smaller for kind in ("forward_kl", "jsd")),
    ]


@dataclass(frozen=True)
class LossShape:
    """Sizes of a loss; without a teacher its hidden size is 0."""

    tokens: int
    vocabulary: int
    student: int
    teacher: int = 0

    @property
    def name(self) -> str:
        sizes = f"{self.student}" if not self.teacher else f"{self.student}/{self.teacher}"
        return f"{self.tokens}x{self.vocabulary} d{sizes}"

    def flops(self) -> float:
        """The student's logits and two products of their gradient; the teacher's logits."""
        return 2.0 * self.tokens * self.vocabulary * (3 * self.student + self.teacher)

    def num_bytes(self) -> float:
        """Hidden states and heads; the gradients of the student's."""
        return 2.0 * (self.tokens + self.vocabulary) * (2 * self.student + self.teacher) + 8 * self.tokens


@dataclass
class LossInputs:
    """student [T, Ds], student_head [V, Ds], teacher [T, Dt], teacher_head [V, Dt], labels [T]."""

    student: Tensor
    student_head: Tensor
    teacher: Tensor
    teacher_head: Tensor
    labels: Tensor

    @classmethod
    def random(cls, shape: LossShape, device: torch.device) -> "LossInputs":
        """Logits of a standard deviation of ½: larger ones lose in bf16 about as much as the bound allows."""

        def hidden_and_head(size: int) -> tuple[Tensor, Tensor]:
            hidden, head = (
                torch.randn(rows, size, device=device, dtype=BF16) for rows in (shape.tokens, shape.vocabulary)
            )
            return hidden, head.mul_(0.5 * max(size, 1) ** -0.5)

        labels = torch.randint(0, shape.vocabulary, (shape.tokens,), device=device)
        return cls(*hidden_and_head(shape.student), *hidden_and_head(shape.teacher), labels)


def loss_reference(inputs: LossInputs, loss_of: LossOf) -> Outputs:
    """Loss, gradient of the student's hidden states and of its head, in fp64, some rows at a time."""
    return _in_chunks(inputs, loss_of, inputs.student.double(), inputs.student_head.double(), REFERENCE_ROWS)


def cross_entropy_reference(hidden: Tensor, head: Tensor, inputs: LossInputs, rows: slice) -> Tensor:
    return linear_cross_entropy_reference(hidden, head, inputs.labels[rows])


def distillation_reference(
    hidden: Tensor, head: Tensor, inputs: LossInputs, rows: slice, *, kind: DivergenceKind
) -> Tensor:
    teacher = (inputs.teacher[rows].double(), inputs.teacher_head.double())
    return linear_distillation_reference(
        hidden, head, *teacher, inputs.labels[rows], kind=kind, alpha=_alpha(kind)
    ).loss


def _alpha(kind: DivergenceKind) -> float:
    """The weight in the mixture, as the papers choose it."""
    return 0.5 if kind == "jsd" else 0.1


def _cross_entropy_case(shape: LossShape) -> Case:
    def ours(hidden: Tensor, head: Tensor, inputs: LossInputs, rows: slice) -> Tensor:
        return linear_cross_entropy(hidden, head, inputs.labels)

    return _case(shape, "", cross_entropy_reference, ours, plain_cross_entropy, Candidate("liger", liger_cross_entropy))


def _distillation_case(shape: LossShape, kind: DivergenceKind) -> Case:
    def ours(hidden: Tensor, head: Tensor, inputs: LossInputs, rows: slice) -> Tensor:
        teacher = (inputs.teacher, inputs.teacher_head)
        return linear_distillation(hidden, head, *teacher, inputs.labels, kind=kind, alpha=_alpha(kind)).loss

    liger = None
    if kind in LIGER_BETA:
        liger = Candidate("liger", partial(liger_jsd, beta=LIGER_BETA[kind]), compare=_of_means)
    reference = partial(distillation_reference, kind=kind)
    return _case(shape, kind, reference, ours, partial(plain_distillation, kind=kind), liger)


def _case(shape: LossShape, kind: str, reference: LossOf, ours: LossOf, plain: LossOf, liger: Candidate | None) -> Case:
    def dense(inputs: LossInputs) -> Run:
        return lambda: _in_chunks(inputs, plain, inputs.student, inputs.student_head, shape.tokens)

    def chunked(inputs: LossInputs) -> Run:
        return lambda: _in_chunks(inputs, plain, inputs.student, inputs.student_head, CHUNK)

    def whole(inputs: LossInputs) -> Run:
        return lambda: _in_chunks(inputs, ours, inputs.student, inputs.student_head, shape.tokens)

    return Case(
        name=f"{kind} {shape.name}".strip(),
        shape={**vars(shape), "kind": kind},
        flops=shape.flops(),
        num_bytes=shape.num_bytes(),
        make_inputs=partial(LossInputs.random, shape),
        reference=lambda inputs: loss_reference(inputs, reference),
        candidates=[
            Candidate("potstill", whole, role="ours"),
            Candidate("dense", dense),
            Candidate("chunked", chunked),
            *([] if liger is None else [liger]),
        ],
        measures_memory=True,
    )


def _in_chunks(inputs: LossInputs, loss_of: LossOf, hidden: Tensor, head: Tensor, rows: int) -> Outputs:
    """Loss and gradients, summed over chunks of rows, each forward and backward before the next."""
    total: Tensor | None = None
    grad_head: Tensor | None = None
    grad_hidden = []
    head = head.detach().requires_grad_()
    for start in range(0, len(hidden), rows):
        chunk = slice(start, start + rows)
        leaf = hidden[chunk].detach().requires_grad_()
        loss = loss_of(leaf, head, inputs, chunk)
        grads = torch.autograd.grad(loss, (leaf, head))
        grad_hidden.append(grads[0])
        grad_head = grads[1] if grad_head is None else grad_head.add_(grads[1])
        total = loss.detach() if total is None else total + loss.detach()
        del loss, grads
    if total is None or grad_head is None:
        raise ValueError("a loss needs rows")
    return total, grad_hidden[0] if len(grad_hidden) == 1 else torch.cat(grad_hidden), grad_head


# PyTorch, as one would write it


def plain_cross_entropy(hidden: Tensor, head: Tensor, inputs: LossInputs, rows: slice) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), inputs.labels[rows], reduction="sum")


def plain_distillation(
    hidden: Tensor, head: Tensor, inputs: LossInputs, rows: slice, *, kind: DivergenceKind
) -> Tensor:
    log_q = F.linear(hidden, head).float().log_softmax(dim=-1)
    log_p = F.linear(inputs.teacher[rows], inputs.teacher_head).float().log_softmax(dim=-1)
    if kind == "forward_kl":
        return _kl(log_p, log_q)
    if kind == "reverse_kl":
        return _kl(log_q, log_p)
    alpha = _alpha(kind)
    weight_p = 1 - alpha if kind == "skewed_reverse_kl" else alpha
    log_m = torch.logaddexp(log_p + math.log(weight_p), log_q + math.log(1 - weight_p))
    if kind == "jsd":
        return alpha * _kl(log_p, log_m) + (1 - alpha) * _kl(log_q, log_m)
    return _kl(log_p if kind == "skewed_forward_kl" else log_q, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q), summed."""
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


# Liger


def liger_cross_entropy(inputs: LossInputs) -> Run | None:
    """With sums instead of means, and the gradient of the head added up in fp32, as ours."""
    if (liger := installed("liger_kernel.ops")) is None:
        return None
    function = liger.LigerFusedLinearCrossEntropyFunction
    options = (None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)

    def loss_of(hidden: Tensor, head: Tensor, inputs: LossInputs, rows: slice) -> Tensor:
        return function.apply(hidden, head, inputs.labels, *options)[0]

    return lambda: _in_chunks(inputs, loss_of, inputs.student, inputs.student_head, len(inputs.student))


def liger_jsd(inputs: LossInputs, *, beta: float) -> Run | None:
    """Its generalized JSD, a mean over the tokens."""
    if (liger := installed("liger_kernel.ops")) is None:
        return None
    function = liger.LigerFusedLinearJSDFunction

    def loss_of(hidden: Tensor, head: Tensor, inputs: LossInputs, rows: slice) -> Tensor:
        teacher = (inputs.teacher, inputs.teacher_head)
        return function.apply(hidden, head, *teacher, inputs.labels, beta, -100, 1.0, torch.float32)

    return lambda: _in_chunks(inputs, loss_of, inputs.student, inputs.student_head, len(inputs.student))


def _of_means(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """The reference's sums as means over the tokens."""
    tokens = len(expected[1])
    return outputs, tuple(x / tokens for x in expected)
