"""The Triton form of linear + distillation, through the interpreter or on a GPU."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kernels.losses.linear_distillation import (
    DistillationSums,
    DivergenceKind,
    linear_distillation,
    linear_distillation_reference,
)
from tests.compare import check_all_close, check_close
from tests.kernels.losses import LOGITS, choose_logits, use_small_tiles, wide

SMOOTH = pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl"])
KINDS = pytest.mark.parametrize("kind", get_args(DivergenceKind))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)


@pytest.fixture(params=LOGITS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_logits(monkeypatch, request.param)


@pytest.fixture(params=["kept", "never kept"])
def kept_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_logits(monkeypatch, request.param)


def inputs(
    device: torch.device,
    tokens: int = 30,
    *,
    vocabularies: tuple[int, int] = (61, 50),
    sizes: tuple[int, int] = (12, 20),
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """student_hidden, student_weight, teacher_hidden, teacher_weight, labels."""
    shapes = [(n, size) for size, vocabulary in zip(sizes, vocabularies, strict=True) for n in (tokens, vocabulary)]
    tensors = [(0.6 * torch.randn(shape)).to(device, dtype) for shape in shapes]
    labels = torch.randint(0, min(vocabularies), (tokens,))
    labels[::4] = -100
    return tensors[0].requires_grad_(), tensors[1].requires_grad_(), *tensors[2:], labels.to(device)


def widened(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return *wide(*arguments[:2]), *(x.double() for x in arguments[2:4]), arguments[4]


def check_training(arguments: tuple[Tensor, ...], options: dict[str, Any], *, ties: int = 0) -> None:
    """Sums and gradients against fp64; `ties`: rows where rounding may decide what the most probable token is."""
    oracle, dtype = widened(arguments), arguments[0].dtype
    sums, expected = linear_distillation(*arguments, **options), linear_distillation_reference(*oracle, **options)
    for name, one, other in zip(DistillationSums._fields, sums, expected, strict=True):
        assert one.shape == () and one.dtype == torch.float32 and one.requires_grad == (name == "loss")
        if name == "agreement":
            assert abs(one - other) <= ties
        else:
            check_close(one, other, dtype=dtype, what=name)
    grads = torch.autograd.grad(sums.loss / 5, arguments[:2])
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    check_all_close(grads, torch.autograd.grad(expected.loss / 5, oracle[:2]))


@KINDS
@pytest.mark.usefixtures("way")
def test_equals_the_reference(device: torch.device, kind: str) -> None:
    check_training(inputs(device), {"kind": kind, "temperature": 2.0, "alpha": 0.3, "hard_weight": 0.3})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("way")
def test_equals_the_reference_in_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    check_training(inputs(device, dtype=dtype), {"temperature": 1.0}, ties=2)


@KINDS
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_every_alpha(device: torch.device, kind: str, alpha: float) -> None:
    hard_weight = 1.0 if alpha == 1 else 0.0
    check_training(
        inputs(device, 9, vocabularies=(30, 33)),
        {"kind": kind, "alpha": alpha, "temperature": 1.5, "hard_weight": hard_weight},
    )


@pytest.mark.parametrize(
    ("tokens", "vocabularies", "sizes"),
    [(1, (2, 2), (1, 1)), (16, (32, 16), (16, 32)), (17, (40, 49), (33, 7)), (35, (33, 33), (5, 48))],
)
@pytest.mark.usefixtures("kept_or_not")
def test_every_shape(device: torch.device, tokens: int, vocabularies: tuple[int, int], sizes: tuple[int, int]) -> None:
    arguments = inputs(device, tokens, vocabularies=vocabularies, sizes=sizes)
    arguments[4][0] = min(vocabularies) - 1
    check_training(arguments, {"kind": "jsd", "hard_weight": 0.5})


@KINDS
def test_evaluation_stores_no_logit(device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(device)
    monkeypatch.setattr(torch, "mm", None)
    options = {"kind": kind, "temperature": 2.0, "hard_weight": 0.1}
    with torch.no_grad():
        sums = linear_distillation(*arguments, **options)
    assert not sums.loss.requires_grad
    check_all_close(tuple(sums), tuple(linear_distillation_reference(*widened(arguments), **options)))


@pytest.mark.parametrize("vocabularies", [(61, 50), (50, 61)])
@pytest.mark.usefixtures("way")
def test_padding_of_the_vocabulary_has_no_probability(device: torch.device, vocabularies: tuple[int, int]) -> None:
    arguments = inputs(device, vocabularies=vocabularies)
    cut = arguments[0], arguments[1].detach()[:50].requires_grad_(), arguments[2], arguments[3][:50], arguments[4]
    sums, expected = (linear_distillation(*x, hard_weight=0.5) for x in (arguments, cut))
    check_all_close(tuple(sums), tuple(expected))
    grad, expected_grad = (torch.autograd.grad(s.loss, x[1])[0] for s, x in ((sums, arguments), (expected, cut)))
    check_close(grad[:50], expected_grad)
    assert (grad[50:] == 0).all()


@SMOOTH
@pytest.mark.usefixtures("kept_or_not")
def test_equal_distributions_cost_nothing(device: torch.device, kind: str) -> None:
    logits, eye = torch.randn(20, 30, device=device), torch.eye(30, device=device)
    labels = torch.zeros(20, dtype=torch.int64, device=device)
    hidden = logits.clone().requires_grad_()
    sums = linear_distillation(hidden, eye, logits, eye, labels, kind=kind, temperature=3.0)
    assert sums.agreement == 20
    for value in (sums.loss, sums.kl, sums.total_variation, *torch.autograd.grad(sums.loss, hidden)):
        assert value.abs().max() < 1e-5


@KINDS
@pytest.mark.parametrize("impossible", ["for the student", "for the teacher", "for both"])
@pytest.mark.usefixtures("kept_or_not")
def test_impossible_tokens_leave_no_nan(device: torch.device, kind: str, impossible: str) -> None:
    student, teacher = torch.randn(2, 10, 20, device=device)
    # −inf · 0 is NaN in a product, so the logits come from a finite product that overflows.
    if impossible != "for the teacher":
        student[:, 3] = torch.finfo(torch.float32).min
    if impossible != "for the student":
        teacher[:, 3] = torch.finfo(torch.float32).min
    projection = torch.eye(20, device=device)
    projection[3, 3] = 1e3
    student.requires_grad_()
    labels = torch.zeros(10, dtype=torch.int64, device=device)
    options = {"kind": kind, "temperature": 0.5, "hard_weight": 0.1}
    sums = linear_distillation(student, projection, teacher, projection, labels, **options)
    grad = torch.autograd.grad(sums.loss, student)[0]
    assert bool(grad.isfinite().all()) and not any(bool(value.isnan()) for value in sums)
    if impossible == "for both":
        without = [x for x in range(20) if x != 3]
        eye = torch.eye(19, dtype=torch.float64, device=device)
        logits = (x.detach()[:, without].double() for x in (student, teacher))
        expected = linear_distillation_reference(next(logits), eye, next(logits), eye, labels, **options)
        check_all_close(tuple(sums), tuple(expected))


@pytest.mark.usefixtures("way")
def test_ignored_rows_are_worth_nothing(device: torch.device) -> None:
    arguments = inputs(device)
    oracle, ignored = widened(arguments), arguments[4] == -100
    poisoned = tuple(x.detach().clone() for x in arguments)
    poisoned[0][ignored], poisoned[2][ignored] = torch.nan, torch.nan
    poisoned[0].requires_grad_(), poisoned[1].requires_grad_()
    sums, expected = linear_distillation(*poisoned), linear_distillation_reference(*oracle)
    check_all_close(tuple(sums), tuple(expected))
    grads = torch.autograd.grad(sums.loss, poisoned[:2])
    check_all_close(grads, torch.autograd.grad(expected.loss, oracle[:2]))


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.usefixtures("kept_or_not")
def test_no_labels_cost_nothing(device: torch.device, tokens: int) -> None:
    arguments = inputs(device, tokens)
    sums = linear_distillation(*arguments[:4], torch.full((tokens,), -100, device=device), hard_weight=0.5)
    grads = torch.autograd.grad(sums.loss, arguments[:2])
    assert all(bool((value == 0).all()) for value in (*sums, *grads))


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(device: torch.device, frozen: int) -> None:
    arguments = inputs(device)
    oracle = widened(arguments)
    linear_distillation_reference(*oracle).loss.backward()
    arguments[frozen].requires_grad_(False)
    for teachers in arguments[2:4]:
        teachers.requires_grad_()
    linear_distillation(*arguments).loss.backward()
    assert [x.grad is not None for x in arguments[:4]] == [frozen == 1, frozen == 0, False, False]
    check_close(arguments[1 - frozen].grad, oracle[1 - frozen].grad)


def test_tied_weights_add_up(device: torch.device) -> None:
    _, weight, *teacher, labels = inputs(device)
    tokens = torch.arange(len(labels), device=device)
    (oracle,) = wide(weight)
    linear_distillation(weight[tokens], weight, *teacher, labels).loss.backward()
    linear_distillation_reference(oracle[tokens], oracle, *(x.double() for x in teacher), labels).loss.backward()
    check_close(weight.grad, oracle.grad)


def test_autocast_multiplies_in_bf16(device: torch.device) -> None:
    arguments = inputs(device)
    oracle = widened(arguments)
    with torch.autocast(device.type, torch.bfloat16):
        sums = linear_distillation(*arguments)
    grads = torch.autograd.grad(sums.loss, arguments[:2])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    expected = linear_distillation_reference(*oracle)
    check_close(sums.loss, expected.loss, dtype=torch.bfloat16)
    check_all_close(grads, torch.autograd.grad(expected.loss, oracle[:2]), dtype=torch.bfloat16)


def test_labels_outside_of_the_vocabulary_make_nan(device: torch.device) -> None:
    arguments = inputs(device)
    arguments[4][3] = 50  # of the student's padding
    assert linear_distillation(*arguments).cross_entropy.isnan()


def test_bad_inputs_are_errors(device: torch.device) -> None:
    student_hidden, student_weight, *rest = inputs(device)
    with pytest.raises(ValueError, match="float64; Triton kernels take"):
        linear_distillation(student_hidden, student_weight, rest[0].double(), *rest[1:])
    with pytest.raises(ValueError, match="do not fit each other"):
        linear_distillation(student_hidden, rest[1], *rest)
    with pytest.raises(ValueError, match="unknown divergence"):
        linear_distillation(student_hidden, student_weight, *rest, kind="kl")
