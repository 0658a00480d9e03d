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


# The Triton kernels: rows that are heads (several in a program, more than one program), a long row, an odd size.
TRITON_SHAPES = pytest.mark.parametrize(
    "shape", [(0, 8), (1, 576), (30, 1030), (70, 64), (3, 5, 20), (90, 3, 16), (2, 3, 2, 8)], ids=str
)
TRITON_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def rows(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(shape)).to(dtype).to(device)


def wide(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().double().requires_grad_() for x in tensors)


@TRITON_SHAPES
@TRITON_DTYPES
@pytest.mark.parametrize("differentiable", [False, True])
def test_kernel_equals_the_reference(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, differentiable: bool
) -> None:
    x, weight = rows(device, *shape, dtype=dtype), rows(device, shape[-1], dtype=dtype)
    result = rms_norm(x.requires_grad_(differentiable), weight, 1e-5)
    assert (result.dtype, result.requires_grad) == (dtype, differentiable)
    check_close(result, rms_norm_reference(x.double(), weight.double(), 1e-5))


@TRITON_SHAPES
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16], ids=str)
@TRITON_DTYPES
def test_kernel_with_residual_and_its_gradients(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    x, residual = rows(device, *shape, dtype=dtype), rows(device, *shape, dtype=residual_dtype)
    weight = rows(device, shape[-1], dtype=dtype).float()
    leaves = tuple(t.requires_grad_() for t in (x, residual, weight))
    normalized, summed = rms_norm(x, weight, 1e-5, residual)
    assert (normalized.dtype, summed.dtype) == (dtype, torch.promote_types(dtype, residual_dtype))
    if summed.dtype == torch.float32:  # the interpreter cuts digits of bf16 off
        assert torch.equal(summed, x + residual)
    oracle = wide(*leaves)
    expected_sum = oracle[0] + oracle[1]
    expected = rms_norm_reference(expected_sum, oracle[2], 1e-5)
    lowest = max((dtype, residual_dtype), key=lambda kind: torch.finfo(kind).eps)
    check_close(summed, expected_sum, dtype=lowest)
    check_close(normalized, expected, dtype=lowest)
    grads = rows(device, *shape, dtype=normalized.dtype), rows(device, *shape, dtype=summed.dtype)
    actual = torch.autograd.grad((normalized, summed), leaves, grads)
    assert [g.dtype for g in actual] == [t.dtype for t in leaves]
    oracle_grads = torch.autograd.grad((expected, expected_sum), oracle, tuple(g.double() for g in grads))
    check_all_close(actual, oracle_grads, dtype=lowest)


@pytest.mark.parametrize("used", ["y", "sum", "both"])
def test_kernel_gradients_where_a_result_is_not_used(device: torch.device, used: str) -> None:
    """The gradients may be views that repeat one number, as the gradient of a sum is."""
    leaves = tuple(rows(device, *shape).requires_grad_() for shape in ((40, 96), (40, 96), (96,)))
    oracle = wide(*leaves)

    def total(y: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
        return {"y": y.sum(), "sum": summed.sum(), "both": y.sum() + summed.sum()}[used]

    x, residual, weight = leaves
    loss = total(*rms_norm(x, weight, 1e-5, residual))
    actual = torch.autograd.grad(loss, leaves, materialize_grads=True)
    x, residual, weight = oracle
    loss = total(rms_norm_reference(x + residual, weight, 1e-5), x + residual)
    expected = torch.autograd.grad(loss, oracle, materialize_grads=True)
    check_all_close(actual, expected, dtype=torch.float32)


def test_kernel_takes_heads_of_a_projection(device: torch.device) -> None:
    joint, weight = rows(device, 9, 7 * 16).requires_grad_(), rows(device, 16).requires_grad_()
    grad = rows(device, 9, 3, 16)
    for first in (0, 4):
        heads = joint.view(9, 7, 16)[:, first : first + 3]
        actual = torch.autograd.grad(rms_norm(heads, weight, 1e-5), (joint, weight), grad)
        copied = rms_norm(heads.contiguous(), weight, 1e-5)
        assert torch.equal(rms_norm(heads, weight, 1e-5), copied)
        for one, other in zip(actual, torch.autograd.grad(copied, (joint, weight), grad), strict=True):
            assert torch.equal(one, other)


def test_kernel_with_a_frozen_weight(device: torch.device) -> None:
    x, weight, grad = rows(device, 20, 40).requires_grad_(), rows(device, 40), rows(device, 20, 40)
    (frozen,) = torch.autograd.grad(rms_norm(x, weight, 1e-5), (x,), grad)
    trained, _ = torch.autograd.grad(rms_norm(x, weight.requires_grad_(), 1e-5), (x, weight), grad)
    assert torch.equal(frozen, trained)


def test_kernel_refuses_what_it_cannot_take(device: torch.device) -> None:
    x, weight = rows(device, 4, 8), rows(device, 8)
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        rms_norm(x.double(), weight, 1e-5)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        rms_norm(rows(device, 8, 4).T, weight, 1e-5)
    with pytest.raises(ValueError, match="as many weights"):
        rms_norm(x, weight[:4], 1e-5)
    with pytest.raises(ValueError, match="of the shape of x"):
        rms_norm(x, weight, 1e-5, x[:2])
