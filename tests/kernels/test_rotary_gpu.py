"""Rotation natively: every head layout and dtype, huge tensors, CUDA graphs, torch.compile."""

import pytest
import torch
from torch import Tensor

from kernels.attention.rotary import apply_rotary, apply_rotary_reference, rope_frequencies, rotary_tables
from tests.compare import check_all_close, check_close

pytestmark = pytest.mark.gpu


def tables(tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(tokens, device="cuda") % 32_768
    return rotary_tables(positions, rope_frequencies(head_dim, 1e6).cuda())


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (14, 2), (32, 8), (40, 40), (71, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 515])
def test_values_and_gradients(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, tokens: int) -> None:
    q_heads, kv_heads = heads
    joint = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device="cuda").to(dtype).requires_grad_()
    wide = joint.detach().double().requires_grad_()
    cos, sin = tables(tokens, head_dim)
    split = (q_heads, kv_heads, kv_heads)
    actual = apply_rotary(*joint.split(split, dim=1)[:2], cos, sin)
    expected = apply_rotary_reference(*wide.split(split, dim=1)[:2], cos.double(), sin.double())
    check_all_close(actual, expected)
    grads = tuple(torch.randn_like(x) for x in actual)
    (grad,) = torch.autograd.grad(actual, (joint,), grads)
    check_close(grad, torch.autograd.grad(expected, (wide,), tuple(g.double() for g in grads))[0])


def test_offsets_beyond_31_bits() -> None:
    q_heads, d = 32, 128
    count = 2**31 // (q_heads * d) + 5
    q = torch.zeros(count, q_heads, d, dtype=torch.bfloat16, device="cuda")
    q[-2:] = torch.randn(2, q_heads, d, device="cuda")
    k = torch.zeros(count, 1, d, dtype=torch.bfloat16, device="cuda")
    cos, sin = tables(count, d)
    turned, _ = apply_rotary(q, k, cos, sin)
    expected, _ = apply_rotary(q[-2:].clone(), k[-2:].clone(), cos[-2:], sin[-2:])
    assert torch.equal(turned[-2:], expected)


def test_in_a_cuda_graph() -> None:
    q, k = (torch.randn(8, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8))
    cos, sin = tables(8, 128)
    apply_rotary(q, k, cos, sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = apply_rotary(q, k, cos, sin)
    q.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, apply_rotary(q, k, cos, sin)))


def test_inside_a_compiled_function() -> None:
    cos, sin = tables(33, 64)

    def block(q: Tensor, k: Tensor) -> Tensor:
        q, k = apply_rotary(2 * q, k, cos, sin)
        return (q * k).sum(-1)

    leaves = tuple(torch.randn(33, heads, 64, device="cuda", requires_grad=True) for heads in (4, 1))
    actual, expected = torch.compile(block)(*leaves), block(*leaves)
    check_close(actual, expected.double())
    grad = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        check_close(one, other.double())
