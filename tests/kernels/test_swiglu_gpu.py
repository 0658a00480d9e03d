"""SwiGLU natively: model sizes in every dtype, huge tensors, CUDA graphs, torch.compile."""

import pytest
import torch
from torch import Tensor

from kernels.swiglu import swiglu, swiglu_reference
from tests.compare import check_all_close, check_close

pytestmark = pytest.mark.gpu


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [160, 1536, 4864, 8960, 11_008, 14_336])
@pytest.mark.parametrize("tokens", [1, 3, 777])
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_gradients(dtype: torch.dtype, size: int, tokens: int, fused: bool) -> None:
    joint = (3 * torch.randn(tokens, 2 * size, device="cuda")).to(dtype)
    gate, up = joint.split(size, dim=-1) if fused else (half.contiguous() for half in joint.split(size, dim=-1))
    leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
    wide = gate.double().requires_grad_(), up.double().requires_grad_()
    actual, expected = swiglu(*leaves), swiglu_reference(*wide)
    check_close(actual, expected)
    grad = torch.randn(tokens, size, device="cuda").to(dtype)
    check_all_close(torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, wide, grad.double()))


def test_offsets_beyond_31_bits() -> None:
    size = 8192
    count = 2**31 // (2 * size) + 5
    joint = torch.zeros(count, 2 * size, dtype=torch.bfloat16, device="cuda")
    joint[-3:] = torch.randn(3, 2 * size, device="cuda")
    gate, up = joint.split(size, dim=-1)
    assert torch.equal(swiglu(gate, up)[-3:], swiglu(gate[-3:].clone(), up[-3:].clone()))


def test_in_a_cuda_graph() -> None:
    gate, up = (torch.randn(4, 4864, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    swiglu(gate, up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = swiglu(gate, up)
    gate.normal_()
    graph.replay()
    assert torch.equal(captured, swiglu(gate, up))


def test_inside_a_compiled_function() -> None:
    def block(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(2 * gate, up) + 1

    leaves = tuple(torch.randn(64, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    actual, expected = torch.compile(block)(*leaves), block(*leaves)
    check_close(actual, expected.double())
    grad = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        check_close(one, other.double())
