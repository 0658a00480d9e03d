import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from kernels.losses.linear_distillation import (
    DistillationSums,
    DivergenceKind,
    linear_distillation,
    linear_distillation_reference,
)
from tests.compare import check_all_close, check_close, check_slopes

JUMPING = ("total_variation", "acceptance")
"""Their gradients jump where p = q, so that rounding to 16 bits turns some of them around."""
SMOOTH = pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl"])
KINDS = pytest.mark.parametrize("kind", get_args(DivergenceKind))
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
STUDENT_SIZE, TEACHER_SIZE = 12, 20


def inputs(
    tokens: int = 30, student_vocabulary: int = 61, teacher_vocabulary: int = 61, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """student_hidden, student_weight, teacher_hidden, teacher_weight, labels."""
    shapes = (tokens, STUDENT_SIZE), (student_vocabulary, STUDENT_SIZE), (tokens, TEACHER_SIZE)
    tensors = [(0.6 * torch.randn(shape)).to(dtype) for shape in (*shapes, (teacher_vocabulary, TEACHER_SIZE))]
    labels = torch.randint(0, min(student_vocabulary, teacher_vocabulary), (tokens,))
    labels[::4] = -100
    return tensors[0].requires_grad_(), tensors[1].requires_grad_(), *tensors[2:], labels


def wide(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    student = (x.detach().double().clone().requires_grad_() for x in arguments[:2])
    return *student, *(x.double() for x in arguments[2:4]), arguments[4]


def logits_as_inputs(student: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
    """Inputs whose logits are the given ones [T, V]: the projections are identity matrices."""
    eye = torch.eye(student.shape[1], dtype=student.dtype)
    return student.requires_grad_(), eye, teacher, eye, torch.zeros(len(student), dtype=torch.int64)


@KINDS
@DTYPES
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("hard_weight", [0.0, 0.3, 1.0])
def test_equals_the_reference(kind: str, dtype: torch.dtype, temperature: float, hard_weight: float) -> None:
    check(inputs(dtype=dtype), dtype, kind=kind, temperature=temperature, hard_weight=hard_weight)


@KINDS
@DTYPES
def test_blocks_and_tiles_of_the_vocabulary_add_up(kind: str, dtype: torch.dtype) -> None:
    check(inputs(70, 9000, 9000, dtype), dtype, kind=kind, temperature=2.0, hard_weight=0.3)


def test_chunks_of_rows_add_up() -> None:
    """What a chunk is too small for gives what its rows give apart."""
    tokens, vocabulary = 60, 400_000
    hidden, weight = (torch.randn(size, 2).requires_grad_() for size in (tokens, vocabulary))
    teacher, teacher_weight = torch.randn(tokens, 2), torch.randn(vocabulary, 2)
    labels = torch.randint(0, vocabulary, (tokens,))
    loss = linear_distillation(hidden, weight, teacher, teacher_weight, labels).loss
    parts = torch.arange(tokens).split(25)
    apart = sum(linear_distillation(hidden[p], weight, teacher[p], teacher_weight, labels[p]).loss for p in parts)
    check_close(loss, apart)
    grads = torch.autograd.grad(loss, (hidden, weight))
    check_all_close(grads, torch.autograd.grad(apart, (hidden, weight)))


def check(arguments: tuple[Tensor, ...], dtype: torch.dtype, **options: Any) -> None:
    """Sums and gradients against the reference in fp64."""
    oracle = wide(arguments)
    options["alpha"] = 0.3
    sums, expected = linear_distillation(*arguments, **options), linear_distillation_reference(*oracle, **options)
    for name, one, other in zip(DistillationSums._fields, sums, expected, strict=True):
        assert one.shape == () and one.dtype == torch.promote_types(dtype, torch.float32)
        if name == "agreement" and dtype == torch.bfloat16:
            assert abs(one - other) <= 2  # logits tie
        else:
            check_close(one, other, dtype=dtype, what=name)
    grads = torch.autograd.grad(sums.loss / 5, arguments[:2])
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    if dtype != torch.bfloat16 or options.get("kind") not in JUMPING:
        check_all_close(grads, torch.autograd.grad(expected.loss / 5, oracle[:2]))
    assert not any(value.requires_grad for value in sums[1:])


@pytest.mark.parametrize("kind", [kind for kind in get_args(DivergenceKind) if kind != "acceptance"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_gradients_are_slopes(kind: str, alpha: float) -> None:
    """But for `acceptance`, whose shares are taken for constants."""
    student_hidden, student_weight, *teacher_and_labels = inputs()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"kind": kind, "alpha": alpha, "temperature": 1.5, "hard_weight": 0.25}
        return linear_distillation(hidden, weight, *teacher_and_labels, **options).loss

    check_slopes(loss, (student_hidden, student_weight))


@SMOOTH
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_equal_distributions_cost_nothing(kind: str, temperature: float) -> None:
    logits = torch.randn(20, 30, dtype=torch.float64)
    arguments = logits_as_inputs(logits.clone(), logits + 1.5)  # a constant does not change a distribution
    sums = linear_distillation(*arguments, kind=kind, temperature=temperature)
    assert sums.agreement == 20
    for value in (sums.loss, sums.kl, sums.total_variation, *torch.autograd.grad(sums.loss, arguments[0])):
        assert value.abs().max() < 1e-12


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_forward_kl_gradient_is_temperature_times_q_minus_p(temperature: float) -> None:
    student, teacher = torch.randn(2, 20, 30, dtype=torch.float64)
    arguments = logits_as_inputs(student.clone(), teacher)
    grad = torch.autograd.grad(linear_distillation(*arguments, temperature=temperature).loss, arguments[0])[0]
    check_close(grad, temperature * ((student / temperature).softmax(-1) - (teacher / temperature).softmax(-1)))


def test_acceptance_goes_from_kl_to_total_variation() -> None:
    """Of distributions far apart nearly KL, of close ones nearly total variation with a weight of 1 − exp(−3)."""
    teacher, noise = torch.randn(2, 20, 30, dtype=torch.float64)
    for distance, bound in ((1e-6, 1e-5), (1e3, 1e-3)):
        of = logits_as_inputs(teacher + distance * noise, distance * teacher if distance > 1 else teacher)
        loss, kl, variation = (
            linear_distillation(*of, kind=kind).loss / 20 for kind in ("acceptance", "forward_kl", "total_variation")
        )
        share = 1.0 if distance > 1 else math.exp(-3)
        assert abs(loss - share * kl - (1 - share) * variation) < bound * loss


def test_jsd_is_symmetric_and_bounded() -> None:
    student, teacher = 6 * torch.randn(2, 20, 30, dtype=torch.float64)
    one, other = (
        linear_distillation(*logits_as_inputs(a.clone(), b), kind="jsd", alpha=0.5).loss
        for a, b in ((student, teacher), (teacher, student))
    )
    check_close(one, other)
    assert 0.3 * 20 < one < 20 * math.log(2)


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_jsd_at_its_ends_is_the_kl(alpha: float, limit: str) -> None:
    arguments = inputs()
    at_end, kl = (linear_distillation(*arguments, kind=k, alpha=alpha).loss for k in ("jsd", limit))
    assert at_end == kl
    near = abs(alpha - 1e-5)
    rescaled = linear_distillation(*arguments, kind="jsd", alpha=near).loss / min(near, 1 - near)
    assert abs(rescaled / kl - 1) < 1e-3


@pytest.mark.parametrize(("student_vocabulary", "teacher_vocabulary"), [(61, 50), (50, 61)])
def test_padding_of_the_vocabulary_has_no_probability(student_vocabulary: int, teacher_vocabulary: int) -> None:
    arguments = inputs(student_vocabulary=student_vocabulary, teacher_vocabulary=teacher_vocabulary)
    oracle = wide(arguments)
    sums = linear_distillation(*arguments, hard_weight=0.5)
    cut = (oracle[0], oracle[1][:50], oracle[2], oracle[3][:50], oracle[4])
    expected = linear_distillation_reference(*cut, hard_weight=0.5)
    check_all_close(tuple(sums), tuple(expected))
    grads = torch.autograd.grad(sums.loss, arguments[:2])
    check_all_close(grads, torch.autograd.grad(expected.loss, oracle[:2]))
    assert (grads[1][50:] == 0).all()


@KINDS
@pytest.mark.parametrize("impossible", ["for the student", "for the teacher", "for both"])
def test_impossible_tokens_leave_no_nan(kind: str, impossible: str) -> None:
    student, teacher = torch.randn(2, 10, 20)
    if impossible != "for the teacher":
        student[:, 3] = -torch.inf
    if impossible != "for the student":
        teacher[:, 3] = -torch.inf
    # −inf · 0 is NaN in a product, so the logits come from a finite product that overflows.
    least = torch.finfo(torch.float32).min
    student_hidden, teacher_hidden = (torch.where(x.isinf(), least, x) for x in (student, teacher))
    projection = torch.eye(20)
    projection[3, 3] = 1e3
    labels = torch.zeros(10, dtype=torch.int64)
    student_hidden.requires_grad_()
    for temperature in (1.0, 0.5, 2.0):
        arguments = (student_hidden, projection, teacher_hidden, projection, labels)
        sums = linear_distillation(*arguments, kind=kind, temperature=temperature, hard_weight=0.1)
        grad = torch.autograd.grad(sums.loss, student_hidden)[0]
        assert bool(grad.isfinite().all()) and not any(bool(value.isnan()) for value in sums)
        if impossible == "for both":
            without = [x for x in range(20) if x != 3]
            small = logits_as_inputs(student[:, without].clone(), teacher[:, without])
            expected = linear_distillation_reference(*small, kind=kind, temperature=temperature, hard_weight=0.1)
            check_all_close(tuple(sums), tuple(expected))


def test_metrics() -> None:
    student, teacher = torch.randn(2, 40, 30, dtype=torch.float64)
    *arguments, labels = logits_as_inputs(student.clone(), teacher)
    labels = torch.randint(0, 30, (40,))
    sums = linear_distillation(*arguments, labels, kind="reverse_kl", temperature=3.0)
    log_p, log_q = log_softmax(teacher, -1), log_softmax(student, -1)
    check_close(sums.kl, (log_p.exp() * (log_p - log_q)).sum())
    check_close(sums.cross_entropy, -log_q.gather(1, labels[:, None]).sum())
    check_close(sums.total_variation, 0.5 * (log_p.exp() - log_q.exp()).abs().sum())
    # The acceptance rate of speculative decoding is 1 − TV.
    check_close(40 - sums.total_variation, torch.minimum(log_p.exp(), log_q.exp()).sum())
    assert sums.agreement == (student.argmax(-1) == teacher.argmax(-1)).sum()


def test_the_teacher_gets_no_gradient() -> None:
    student_hidden, student_weight, teacher_hidden, teacher_weight, labels = inputs()
    teacher_hidden.requires_grad_(), teacher_weight.requires_grad_()
    linear_distillation(student_hidden, student_weight, teacher_hidden, teacher_weight, labels).loss.backward()
    assert teacher_hidden.grad is None and teacher_weight.grad is None
    assert student_hidden.grad is not None and student_weight.grad is not None


def test_ignored_rows_are_not_even_read() -> None:
    arguments = inputs()
    ignored = arguments[4] == -100
    poisoned = tuple(x.detach().clone() for x in arguments)
    poisoned[0][ignored], poisoned[2][ignored] = torch.nan, torch.nan
    poisoned[0].requires_grad_()
    sums, expected = linear_distillation(*poisoned), linear_distillation_reference(*arguments)
    check_all_close(tuple(sums), tuple(expected))
    grad = torch.autograd.grad(sums.loss, poisoned[0])[0]
    check_close(grad, torch.autograd.grad(expected.loss, arguments[0])[0])


def test_evaluation_computes_no_gradients() -> None:
    arguments = inputs()
    with torch.no_grad():
        sums = linear_distillation(*arguments)
    assert not sums.loss.requires_grad
    check_all_close(tuple(sums), tuple(linear_distillation_reference(*arguments)))


def test_autocast_multiplies_in_bf16() -> None:
    arguments = inputs(dtype=torch.float32)
    oracle = wide(arguments)
    with torch.autocast("cpu", torch.bfloat16):
        sums = linear_distillation(*arguments)
    grads = torch.autograd.grad(sums.loss, arguments[:2])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    expected = linear_distillation_reference(*oracle)
    check_close(sums.loss, expected.loss, dtype=torch.bfloat16)
    check_all_close(grads, torch.autograd.grad(expected.loss, oracle[:2]), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "kl"}, "unknown divergence 'kl'; known are forward_kl"),
        ({"temperature": 0.0}, "temperature of distillation must be positive"),
        ({"alpha": 1.5}, "must lie in"),
        ({"hard_weight": -0.1}, "must lie in"),
    ],
)
def test_impossible_options_are_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_distillation(*inputs(), **options)
