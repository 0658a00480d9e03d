import pytest
import torch

from kernels.swiglu import swiglu, swiglu_reference
from tests.compare import check_all_close, check_close


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_equals_the_reference(dtype: torch.dtype, differentiable: bool, tokens: int) -> None:
    # Two halves of one matrix, as a fused projection leaves them.
    gate, up = (3 * torch.randn(tokens, 2 * 75)).to(dtype).requires_grad_(differentiable).split(75, dim=-1)
    result = swiglu(gate, up)
    assert result.dtype == dtype
    check_close(result, swiglu_reference(gate.double(), up.double()))


def test_gradients() -> None:
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))


def test_inputs_stay() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    kept = gate.clone(), up.clone()
    swiglu(gate, up)
    assert torch.equal(gate, kept[0]) and torch.equal(up, kept[1])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1500), (9, 75), (3, 1024)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_kernel_equals_the_reference(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], fused: bool
) -> None:
    """Values so large that the logistic function is 0 or 1 among them, in two matrices or in halves of one."""
    tokens, size = shape
    joint = (3 * torch.randn(tokens, 2 * size)).to(dtype).to(device)
    joint[:, ::50] *= 20
    gate, up = joint.split(size, dim=-1) if fused else (half.contiguous() for half in joint.split(size, dim=-1))
    leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
    wide = gate.double().requires_grad_(), up.double().requires_grad_()
    result, expected = swiglu(*leaves), swiglu_reference(*wide)
    assert result.dtype == dtype and torch.equal(result, swiglu(gate, up))
    check_close(result, expected)
    grad = torch.randn(shape, device=device).to(dtype)
    check_all_close(torch.autograd.grad(result, leaves, grad), torch.autograd.grad(expected, wide, grad.double()))


def test_kernel_takes_gradients_of_any_strides(device: torch.device) -> None:
    gate, up = (torch.randn(5, 33, device=device, requires_grad=True) for _ in range(2))
    wide = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    actual = torch.autograd.grad(swiglu(gate, up).sum(), (gate, up))
    expected = torch.autograd.grad(swiglu_reference(*wide).sum(), wide)
    check_all_close(actual, expected, dtype=torch.float32)


def test_kernel_refuses_what_it_cannot_take(device: torch.device) -> None:
    x = torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match="one shape and dtype"):
        swiglu(x, x.bfloat16())
    with pytest.raises(ValueError, match="one shape and dtype"):
        swiglu(x, x[:2])
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        swiglu(x.T, x.T)
