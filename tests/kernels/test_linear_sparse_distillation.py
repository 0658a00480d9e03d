"""KL from a few listed tokens: both forms beside all logits at once, in fp64."""

import pytest
import torch
from torch import Tensor

from kernels.losses import _projection
from kernels.losses import linear_sparse_distillation as forms
from kernels.losses.linear_sparse_distillation import (
    SparseDistillationSums,
    SparseTargets,
    linear_sparse_distillation,
    linear_sparse_distillation_reference,
)
from tests.compare import check_all_close, check_close, check_slopes

FORMS = pytest.mark.parametrize("on_gpu", [False, True], ids=["in chunks", "as on a GPU"])
EXACT, VOCABULARY = (torch.float64, torch.float32), 101


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_projection, "_LOGITS_PER_CHUNK", 7 * VOCABULARY)
    monkeypatch.setattr(_projection, "_LOGITS_PER_BLOCK", 3 * VOCABULARY)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(30, 24).to(dtype), (0.3 * torch.randn(VOCABULARY, 24)).to(dtype)
    labels = torch.randint(0, VOCABULARY, (30,))
    labels[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def targets_of(labels: Tensor, *, with_rest: bool) -> SparseTargets:
    """Up to six tokens of each labelled position, and for some that have none a few, which must not count.

    Some tokens are of a teacher whose vocabulary is padded.
    """
    sizes = torch.randint(1, 7, labels.shape).where((labels >= 0) | (torch.arange(len(labels)) % 2 == 0), 0)
    ids = torch.cat([torch.randperm(VOCABULARY + 5)[:size] for size in sizes.tolist()])
    rows = torch.arange(len(labels)).repeat_interleave(sizes)
    shares = torch.rand(len(ids)) + 0.1
    rest = torch.rand(len(labels)) * (torch.arange(len(labels)) % 3 > 0) if with_rest else torch.zeros(len(labels))
    sums = torch.zeros(len(labels)).index_add(0, rows, shares)
    weights = shares / sums[rows] * (1 - rest[rows])
    return SparseTargets(ids, weights, sizes.cumsum(0) - sizes, torch.rand(len(labels)), rest if with_rest else None)


def compute(
    hidden: Tensor, weight: Tensor, labels: Tensor, targets: SparseTargets, *, on_gpu: bool, **options: float | None
) -> SparseDistillationSums:
    with pytest.MonkeyPatch.context() as patch:
        if on_gpu:
            patch.setattr(forms, "runs_triton", lambda _: True)
        return linear_sparse_distillation(hidden, weight, labels, targets, **options)


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().double().clone().requires_grad_() for x in tensors)


@pytest.mark.parametrize(
    ("on_gpu", "dtype"),
    [*((False, dtype) for dtype in (*EXACT, torch.bfloat16)), *((True, dtype) for dtype in EXACT)],
    ids=str,
)  # the form of a GPU adds up three gradients, each of them rounded: no bf16 weights there, which nobody trains
@pytest.mark.parametrize("with_rest", [False, True], ids=["whole", "rest"])
@pytest.mark.parametrize(("hard_weight", "soft_cap"), [(0.0, None), (0.3, None), (0.3, 2.0)])
def test_equals_the_reference(
    on_gpu: bool, dtype: torch.dtype, with_rest: bool, hard_weight: float, soft_cap: float | None
) -> None:
    hidden, weight, labels = inputs(dtype)
    oracle, targets = wide(hidden, weight), targets_of(labels, with_rest=with_rest)
    found = compute(hidden, weight, labels, targets, on_gpu=on_gpu, hard_weight=hard_weight, soft_cap=soft_cap)
    expected = {
        share: linear_sparse_distillation_reference(*oracle, labels, targets, hard_weight=share, soft_cap=soft_cap)
        for share in (hard_weight, 0.0, 1.0)
    }
    for value, share in zip(found, (hard_weight, 0.0, 1.0), strict=True):
        check_close(value, expected[share], dtype=dtype if dtype == torch.bfloat16 else torch.float32)
    grads = torch.autograd.grad(found.loss / 7, (hidden, weight))
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    wanted = torch.autograd.grad(expected[hard_weight] / 7, oracle)
    check_all_close(grads, wanted, dtype=torch.float32 if dtype == torch.float64 else dtype)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_gradients_are_slopes(soft_cap: float | None) -> None:
    hidden, weight, labels = inputs(torch.float64)
    targets = targets_of(labels, with_rest=True)
    check_slopes(
        lambda h, w: linear_sparse_distillation(h, w, labels, targets, hard_weight=0.2, soft_cap=soft_cap).loss,
        (hidden, weight),
    )


@FORMS
def test_where_every_token_is_listed_nothing_is_left_to_the_rest(on_gpu: bool) -> None:
    hidden, weight, labels = inputs()
    labels = labels.clamp(min=0)
    p = torch.softmax(torch.randn(30, VOCABULARY), -1)
    ids, starts = torch.arange(VOCABULARY).repeat(30), torch.arange(30) * VOCABULARY
    targets = SparseTargets(ids, p.flatten(), starts, torch.special.entr(p).sum(-1), torch.zeros(30))
    found = compute(hidden, weight, labels, targets, on_gpu=on_gpu)
    expected = torch.nn.functional.kl_div((hidden @ weight.t()).log_softmax(-1), p, reduction="sum")
    check_close(found.loss, expected)
    check_all_close(torch.autograd.grad(found.loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)))


@FORMS
def test_autocast_multiplies_in_bf16_and_sums_in_fp32(on_gpu: bool) -> None:
    hidden, weight, labels = inputs()
    oracle, targets = wide(hidden, weight), targets_of(labels, with_rest=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = compute(hidden, weight, labels, targets, on_gpu=on_gpu).loss
    assert loss.dtype == torch.float32
    expected = linear_sparse_distillation_reference(*oracle, labels, targets)
    check_close(loss, expected, dtype=torch.bfloat16)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    check_all_close(grads, torch.autograd.grad(expected, oracle), dtype=torch.bfloat16)


def test_evaluation_keeps_nothing() -> None:
    hidden, weight, labels = inputs()
    targets = targets_of(labels, with_rest=False)
    with torch.no_grad():
        loss = linear_sparse_distillation(hidden, weight, labels, targets).loss
    assert not loss.requires_grad
    check_close(loss, linear_sparse_distillation_reference(hidden, weight, labels, targets).detach())
