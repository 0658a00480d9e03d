"""RMSNorm natively: every size and dtype, reproducible gradients, huge tensors, CUDA graphs, torch.compile."""

import pytest
import torch
from torch import Tensor

from kernels.rms_norm import rms_norm, rms_norm_reference
from tests.compare import check_all_close, check_close

pytestmark = pytest.mark.gpu
SIZES = (64, 80, 128, 576, 896, 1024, 2048, 2560, 4096, 5120, 8192, 14_336, 16_384)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(shape, device="cuda")).to(dtype)


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [1, 3, 1037])
@DTYPES
def test_values_and_gradients(size: int, tokens: int, dtype: torch.dtype) -> None:
    x, residual, weight = rows(tokens, size, dtype=dtype), rows(tokens, size, dtype=dtype), rows(size, dtype=dtype)
    leaves = tuple(t.requires_grad_() for t in (x, residual, weight))
    oracle = tuple(t.detach().double().requires_grad_() for t in leaves)
    actual = rms_norm(x, weight, 1e-5, residual)
    expected_sum = oracle[0] + oracle[1]
    expected = rms_norm_reference(expected_sum, oracle[2], 1e-5), expected_sum
    check_all_close(actual, expected)
    grads = rows(tokens, size, dtype=dtype), rows(tokens, size, dtype=dtype)
    check_all_close(
        torch.autograd.grad(actual, leaves, grads),
        torch.autograd.grad(expected, oracle, tuple(g.double() for g in grads)),
    )


@pytest.mark.parametrize("shape", [(513, 32, 128), (77, 8, 64), (300, 5, 96), (2, 3, 4, 256)], ids=str)
@DTYPES
def test_rows_that_are_heads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = rows(*shape, dtype=dtype).requires_grad_(), rows(shape[-1], dtype=dtype).requires_grad_()
    oracle = tuple(t.detach().double().requires_grad_() for t in (x, weight))
    actual, expected = rms_norm(x, weight, 1e-6), rms_norm_reference(*oracle, 1e-6)
    check_close(actual, expected)
    grad = rows(*shape, dtype=dtype)
    check_all_close(
        torch.autograd.grad(actual, (x, weight), grad), torch.autograd.grad(expected, oracle, grad.double())
    )


@pytest.mark.parametrize("size", [128, 4096])
def test_gradients_have_the_same_bits_in_every_run(size: int) -> None:
    x, weight = rows(9000, size, dtype=torch.bfloat16), rows(size, dtype=torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    grad = rows(9000, size, dtype=torch.bfloat16)
    first, *others = (torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), grad) for _ in range(4))
    for other in others:
        assert all(map(torch.equal, first, other))


def test_offsets_beyond_31_bits() -> None:
    size = 2048
    count = 2**31 // size + 5
    x, weight = torch.empty(count, size, dtype=torch.bfloat16, device="cuda"), rows(size, dtype=torch.bfloat16)
    x.zero_()[-9:] = rows(9, size, dtype=torch.bfloat16)
    tail = x[-9:].clone().requires_grad_()
    expected = rms_norm(tail, weight, 1e-5)
    x.requires_grad_()
    y = rms_norm(x, weight, 1e-5)
    assert torch.equal(y[-9:], expected)
    (expected_grad,) = torch.autograd.grad(expected, (tail,), torch.ones_like(expected))
    (grad,) = torch.autograd.grad(y, (x,), torch.ones_like(y))
    assert torch.equal(grad[-9:], expected_grad)


def test_in_a_cuda_graph() -> None:
    x, residual, weight = (rows(*s, dtype=torch.bfloat16) for s in ((8, 4096), (8, 4096), (4096,)))
    rms_norm(x, weight, 1e-5, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rms_norm(x, weight, 1e-5, residual)
    x.copy_(rows(8, 4096, dtype=torch.bfloat16))
    graph.replay()
    for one, other in zip(captured, rms_norm(x, weight, 1e-5, residual), strict=True):
        assert torch.equal(one, other)


def test_inside_a_compiled_function() -> None:
    def block(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y, summed = rms_norm(2 * x, weight, 1e-5, residual)
        return y + 1, summed

    leaves = tuple(rows(*s, dtype=torch.bfloat16).requires_grad_() for s in ((64, 512), (512,), (64, 512)))
    actual, expected = torch.compile(block)(*leaves), block(*leaves)
    for one, other in zip(actual, expected, strict=True):
        check_close(one, other.double())
    grads = tuple(torch.randn_like(x) for x in expected)
    for one, other in zip(
        torch.autograd.grad(actual, leaves, grads), torch.autograd.grad(expected, leaves, grads), strict=True
    ):
        check_close(one, other.double())
