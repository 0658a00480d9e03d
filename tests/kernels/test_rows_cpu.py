"""Norm, gate, rotation and write in C on the CPU: rows alone and together, threads, and torch without a compiler."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels._rows_cpu as rows_cpu
import kernels.attention._rotary_write_cpu as rotary_cpu
from kernels.attention.rotary import rope_frequencies, rotary_tables
from kernels.attention.rotary_write import HeadNorms, rotate_and_write
from kernels.geglu import geglu
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu
from tests.compare import check_close

pytestmark = pytest.mark.skipif(rows_cpu._library() is None, reason="no C compiler, or a processor without AVX2")
EACH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOKENS, D = 70, 600


def norm(x: Tensor) -> tuple[Tensor, ...]:
    weight = 1 + torch.linspace(-0.5, 0.5, D).to(x.dtype)
    return rms_norm(x[:, :D], weight, 1e-5, x[:, D : 2 * D])


def gate(x: Tensor) -> tuple[Tensor, ...]:
    return (swiglu(x[:, :D], x[:, D : 2 * D]),)


def gelu(x: Tensor) -> tuple[Tensor, ...]:
    return (geglu(x[:, :D], x[:, D : 2 * D]),)


def rotate(x: Tensor) -> tuple[Tensor, ...]:
    """Heads of a fused projection; the pages come out too, in the order of the tokens."""
    q, k, v = x[:, : 7 * 64].view(-1, 7, 64).split([3, 2, 2], dim=1)
    k_pages, v_pages = (torch.full((10, 16, 2, 64), 7.0, dtype=x.dtype) for _ in range(2))
    slots = torch.arange(len(x)) * 2 + 1
    weight = 1 + torch.linspace(-0.5, 0.5, 64).to(x.dtype)
    rotary = rotary_tables(torch.full((len(x),), 1234), rope_frequencies(64, 1e4))
    out = rotate_and_write(q, k, v, k_pages, v_pages, slots, rotary=rotary, norms=HeadNorms(weight, weight, 1e-5))
    return out, *(pages.flatten(0, 1)[slots] for pages in (k_pages, v_pages))


PARTS = pytest.mark.parametrize("part", [norm, gate, gelu, rotate])
Part = Callable[[Tensor], tuple[Tensor, ...]]
Gate = Callable[[Tensor, Tensor], Tensor]


@EACH
@PARTS
def test_a_row_has_the_same_bits_alone_and_with_any_number_of_threads(part: Part, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(TOKENS, 2 * D)).to(dtype)
    together, before = part(x), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, part(x), together))
    finally:
        torch.set_num_threads(before)
    for row in (0, 1, TOKENS - 1):
        assert all(map(torch.equal, part(x[row : row + 1]), (whole[row : row + 1] for whole in together)))


@EACH
@PARTS
def test_torch_takes_over_without_a_compiler(part: Part, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (3 * torch.randn(TOKENS, 2 * D)).to(dtype)
    in_c = part(x)
    for module in (rows_cpu, rotary_cpu):
        monkeypatch.setattr(module, "_library", lambda: None)
    in_torch = part(x)
    for one, other in zip(in_c, in_torch, strict=True):
        check_close(one, other.double(), dtype=dtype)


@EACH
@pytest.mark.parametrize("part", [norm, gate, gelu])
def test_training_computes_the_same_bits(part: Part, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(TOKENS, 2 * D)).to(dtype)
    learned = part(x.clone().requires_grad_())
    assert learned[0].requires_grad and all(map(torch.equal, learned, part(x)))


@EACH
@pytest.mark.parametrize(("function", "activation"), [(swiglu, F.silu), (geglu, partial(F.gelu, approximate="tanh"))])
def test_a_gate_of_any_size(function: Gate, activation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, -5.0, -1.0, -1e-20, 0.0, 1e-20, 1.0, 88.0, 200.0, 1e30]).to(dtype)[None]
    result, expected = function(gates, torch.ones_like(gates)).double(), activation(gates.double())
    assert bool(((result - expected).abs() <= 2**-8 * expected.abs() + 1e-7).all())
    wrong = torch.tensor([[torch.nan, torch.inf, 1.0]]).to(dtype)
    assert function(wrong, torch.ones_like(wrong)).isnan().tolist() == [[True, False, False]]
    assert function(wrong, torch.ones_like(wrong))[0, 1] == torch.inf


def test_bf16_is_rounded_to_the_nearest_even() -> None:
    """The sum with a residual, of every pattern of the digits that are lost, and of what is not finite."""
    one = torch.tensor([1.0, 1.0, 1.0, -1.0, 3e38, torch.nan, torch.inf, 1.0]).bfloat16()[None]
    two = torch.tensor([2**-8, 3 * 2**-8, 2**-9, 2**-8, 3e38, 1.0, 1.0, -1.0]).bfloat16()[None]
    summed = rms_norm(one, torch.ones(8).bfloat16(), 1e-5, two)[1]
    assert torch.equal(summed.nan_to_num(9), (one + two).nan_to_num(9))
