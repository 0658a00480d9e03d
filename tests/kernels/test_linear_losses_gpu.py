"""Losses on an output projection at the sizes and tiles of real training: only a GPU can."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.losses._streamed_projection as streamed
from kernels.losses.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from kernels.losses.linear_distillation import DistillationSums, linear_distillation, linear_distillation_reference
from tests.compare import check_all_close, check_close
from tests.kernels.losses import choose_logits, wide

pytestmark = pytest.mark.gpu

KINDS = ("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(params=["kept", "never kept"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_logits(monkeypatch, request.param)


def needs_gib(gib: int) -> None:
    if torch.cuda.get_device_properties(0).total_memory < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory")


def inputs(
    tokens: int, vocabularies: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """student_hidden, student_weight, teacher_hidden, teacher_weight, labels; logits of about 2."""
    tensors = []
    for size, vocabulary in zip(sizes, vocabularies, strict=True):
        tensors.append(torch.randn(tokens, size, device="cuda", dtype=dtype))
        tensors.append(torch.randn(vocabulary, size, device="cuda", dtype=dtype).mul_(2 / size**0.5))
    labels = torch.randint(0, min(vocabularies), (tokens,), device="cuda")
    labels[::7] = -100
    return tensors[0].requires_grad_(), tensors[1].requires_grad_(), *tensors[2:], labels


def as_trained(exact: Sequence[Tensor], arguments: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Hidden states and weights of student and teacher whose logits are those that training has, in fp64.

    Kept logits are rounded to the dtype of the products, and what softmax makes of a logit z is off by |z| times as
    much: with exact logits beside them, gradients of these inputs would be off by up to 1.3e-2 in bf16, where half a
    unit in the last place is |z| / 256 to |z| / 512, and by up to 2.6e-6 in fp32, for cuBLAS rounds each of 640 to 1000
    partial sums. So there are two steps, each of them held to the bound of the dtype: the logits, and all that follows
    from those. Gradients go to the exact tensors: the kept logits stand as hidden states before a weight that is 1.
    """
    if not streamed._KEPT_LOGITS:
        return list(exact)
    vocabulary, labels = min(len(arguments[1]), len(arguments[3])), arguments[4]
    one, valid = torch.eye(vocabulary, dtype=torch.float64, device=labels.device), labels != -100
    tensors = []
    for number in (0, 2):
        hidden, weight = arguments[number : number + 2]
        head = streamed.make_head(hidden, weight, labels, vocabulary=vocabulary, dtype=dtype, soft_cap=None)
        [(_, [source])] = streamed.sources([head], trains=True)
        logits = exact[number] @ exact[number + 1][:vocabulary].t()
        check_close(source.rows[valid], logits[valid], what="logits")
        tensors += [logits + (source.rows - logits).detach(), one]
    return tensors


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return how much memory a call takes at most, above what was taken before."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@DTYPES
@pytest.mark.usefixtures("way")
def test_cross_entropy_equals_the_reference(dtype: torch.dtype) -> None:
    for tokens, vocabulary, size in ((300, 5003, 640), (1000, 4096, 577)):
        hidden, weight, _, _, labels = inputs(tokens, (vocabulary, vocabulary), (size, 16), dtype)
        oracle = wide(hidden, weight)
        loss, expected = linear_cross_entropy(hidden, weight, labels), linear_cross_entropy_reference(*oracle, labels)
        check_close(loss, expected, dtype=dtype)
        grads = torch.autograd.grad(loss / 10, (hidden, weight))
        check_all_close(grads, torch.autograd.grad(expected / 10, oracle))


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("way")
def test_distillation_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    arguments = inputs(300, (5003, 4999), (640, 1000), dtype)
    exact, labels = (*wide(*arguments[:2]), *(x.double() for x in arguments[2:4])), arguments[4]
    for temperature, hard_weight in ((1.0, 0.0), (2.0, 0.3)):
        options: dict[str, Any] = {"kind": kind, "temperature": temperature, "hard_weight": hard_weight}
        sums = linear_distillation(*arguments, **options)
        expected = linear_distillation_reference(*exact, labels, **options)
        with torch.no_grad():
            evaluated = linear_distillation(*arguments, **options)
        for name, one, also, other in zip(DistillationSums._fields, sums, evaluated, expected, strict=True):
            if name == "agreement":
                assert abs(one - other) <= 6 and abs(also - other) <= 1  # logits tie in 16 bits
            else:
                check_close(one, other, dtype=dtype, what=name)
                check_close(also, other, dtype=dtype, what=name)
        grads = torch.autograd.grad(sums.loss / 10, arguments[:2])
        trained = linear_distillation_reference(*as_trained(exact, arguments, dtype), labels, **options)
        check_all_close(grads, torch.autograd.grad(trained.loss / 10, exact[:2]))


@pytest.mark.usefixtures("way")
def test_autocast() -> None:
    arguments = inputs(200, (3000, 3000), (320, 640), torch.float32)
    exact = *wide(*arguments[:2]), *(x.double() for x in arguments[2:4])
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_distillation(*arguments).loss
    grads = torch.autograd.grad(loss, arguments[:2])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    trained = linear_distillation_reference(*as_trained(exact, arguments, torch.bfloat16), arguments[4])
    check_all_close(grads, torch.autograd.grad(trained.loss, exact[:2]), dtype=torch.bfloat16)


@pytest.mark.parametrize("way", ["kept", "never kept, in windows"])
def test_the_same_bits_every_time_and_no_wait_for_the_device(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_logits(monkeypatch, way)
    if way == "kept":
        monkeypatch.setattr(streamed, "_KEPT_LOGITS", 2**20)  # four chunks
    arguments = inputs(500, (8192, 8192), (256, 512), torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        hidden, weight, *_, labels = arguments
        grads = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
        sums = linear_distillation(*arguments, kind="jsd", temperature=2.0, hard_weight=0.5)
        return *grads, *torch.autograd.grad(sums.loss, (hidden, weight)), *(value.detach() for value in sums)

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_peak_memory_beside_all_logits_at_once(kind: str) -> None:
    """8k tokens x 128k vocabulary."""
    needs_gib(100)
    arguments = inputs(8192, (131_072, 131_072), (2048, 4096), torch.bfloat16)

    def dense() -> None:
        student, teacher = arguments[0] @ arguments[1].t(), (arguments[2] @ arguments[3].t()).float()
        valid = (arguments[4] != -100)[:, None]
        log_p, log_q = torch.log_softmax(teacher, -1), torch.log_softmax(student.float(), -1)
        torch.where(valid, log_p.exp() * (log_p - log_q), 0).sum().backward()

    def ours() -> None:
        linear_distillation(*arguments, kind=kind).loss.backward()

    def evaluation() -> None:
        with torch.no_grad():
            linear_distillation(*arguments, kind=kind)

    dense_bytes = peak_bytes(dense)
    for leaf in arguments[:2]:
        leaf.grad = None
    assert peak_bytes(ours) <= 0.15 * dense_bytes
    assert peak_bytes(evaluation) <= 0.02 * dense_bytes


def test_logits_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2³¹ logits in one chunk, with a sum of rows that smaller chunks must reproduce."""
    needs_gib(60)
    arguments = inputs(20_000, (131_072, 131_072), (64, 64), torch.bfloat16)
    expected = linear_distillation(*arguments, kind="jsd")
    expected_grads = torch.autograd.grad(expected.loss, arguments[:2])
    monkeypatch.setattr(streamed, "_KEPT_LOGITS", 2**32)
    sums = linear_distillation(*arguments, kind="jsd")
    check_all_close(tuple(sums), tuple(expected), dtype=torch.bfloat16)
    check_all_close(torch.autograd.grad(sums.loss, arguments[:2]), expected_grads)


@pytest.mark.usefixtures("way")
def test_weights_beyond_32_bits() -> None:
    needs_gib(60)
    vocabulary, size = 530_000, 4096
    hidden, weight, _, _, labels = inputs(16, (vocabulary, 1), (size, 16), torch.bfloat16)
    assert weight.numel() > 2**31
    labels[1:] = torch.arange(vocabulary - 15, vocabulary, device="cuda")
    loss = linear_cross_entropy(hidden, weight, labels)
    expected = linear_cross_entropy_reference(hidden, weight, labels)
    check_close(loss, expected, dtype=torch.bfloat16)
    with torch.no_grad():
        check_close(linear_cross_entropy(hidden, weight, labels), expected, dtype=torch.bfloat16)
    grads = torch.autograd.grad(loss, (hidden, weight))
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    check_close(grads[0], expected_grads[0], dtype=torch.bfloat16)
    check_close(grads[1][-100:], expected_grads[1][-100:])
