import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.rms_norm import rms_norm, rms_norm_reference
from tests.compare import check_all_close, check_close

# One row, few rows (a path of its own) and many; normalised over heads as well.
SHAPES = pytest.mark.parametrize(
    "shape", [(0, 8), (1, 576), (16, 33), (17, 33), (200, 7), (5, 3, 16), (30, 2, 24)], ids=str
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


@SHAPES
@DTYPES
@pytest.mark.parametrize("differentiable", [False, True])
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, differentiable: bool) -> None:
    x, weight = (3 * torch.randn(shape)).to(dtype).requires_grad_(differentiable), torch.randn(shape[-1]).to(dtype)
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    check_close(result, rms_norm_reference(x.double(), weight.double(), 1e-5))


@SHAPES
def test_returns_the_sum_with_the_residual(shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    normalized, summed = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normalized, rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str)
def test_equals_transformers(rows: int, dtype: torch.dtype, bound: float) -> None:
    x = (3 * torch.randn(rows, 64)).to(dtype)
    oracle = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    oracle.weight.data.uniform_(0.5, 1.5)
    torch.testing.assert_close(rms_norm(x, oracle.weight.detach(), 1e-5), oracle(x).detach(), rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", [(1, 8), (40, 3), (7, 2, 6)], ids=str)
def test_gradients(shape: tuple[int, ...]) -> None:
    x, residual, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, shape, shape[-1:]))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w, r: rms_norm(x, w, 1e-3, r), (x, weight, residual))


def test_mixed_dtypes_as_under_autocast() -> None:
    """A bf16 branch added to an fp32 residual stream: the stream stays fp32, the branch bf16, gradients follow."""
    x, residual, weight = torch.randn(50, 64).bfloat16(), torch.randn(50, 64), torch.rand(64) + 0.5
    leaves = tuple(t.clone().requires_grad_() for t in (x, residual, weight))
    normalized, summed = rms_norm(leaves[0], leaves[2], 1e-5, leaves[1])
    assert (normalized.dtype, summed.dtype) == (torch.bfloat16, torch.float32)
    wide = tuple(t.double().requires_grad_() for t in (x, residual, weight))
    expected_sum = wide[0] + wide[1]
    expected = rms_norm_reference(expected_sum, wide[2], 1e-5)
    check_close(normalized, expected)
    grads = torch.randn(50, 64), torch.randn(50, 64)
    actual = torch.autograd.grad((normalized, summed), leaves, (grads[0].bfloat16(), grads[1]))
    check_all_close(
        actual,
        torch.autograd.grad((expected, expected_sum), wide, tuple(g.double() for g in grads)),
        dtype=torch.bfloat16,
    )
    assert [g.dtype for g in actual] == [torch.bfloat16, torch.float32, torch.float32]
