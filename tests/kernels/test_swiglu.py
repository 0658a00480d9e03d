import pytest
import torch

from kernels.swiglu import swiglu, swiglu_reference
from tests.compare import check_close


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
