"""The quantized linear layer natively: every format, dtype and number of rows, CUDA graphs, huge outputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels.linear.quantized as module
from kernels.linear.quantization import (
    Int8Weight,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear, quantized_linear_reference
from tests.compare import check_close

pytestmark = pytest.mark.gpu
QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": quantize_nf4,
    "nf4 single": lambda w: quantize_nf4(w, double=False),
    "int4": quantize_int4,
    "int4 g32 asymmetric": lambda w: quantize_int4(w, group=32, symmetric=False),
    "int8": quantize_int8,
    "fp8": quantize_fp8,
}
ALL = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def weight_of(quantize: Callable[[Tensor], QuantizedWeight], n: int, k: int) -> QuantizedWeight:
    return quantize(0.02 * torch.randn(n, k, device="cuda"))


@pytest.mark.covering(pairs=True)
@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (1536, 576), (1000, 1100), (129, 2050)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 128, 130, 1037])
def test_values_and_gradients(
    quantize: Callable[[Tensor], QuantizedWeight], dtype: torch.dtype, shape: tuple[int, int], tokens: int
) -> None:
    weight, bias = weight_of(quantize, *shape), rows(shape[0], dtype=dtype).requires_grad_()
    x = rows(tokens, shape[1], dtype=dtype).requires_grad_()
    y = quantized_linear(x, prepare_quantized_weight(weight), bias)
    wide, wide_bias = (t.detach().double().requires_grad_() for t in (x, bias))
    expected = quantized_linear_reference(wide, weight, wide_bias)
    check_close(y.detach(), expected.detach())
    grad = torch.randn_like(y)
    actual = torch.autograd.grad(y, (x, bias), grad)
    for one, other in zip(actual, torch.autograd.grad(expected, (wide, wide_bias), grad.double()), strict=True):
        check_close(one, other)


@ALL
def test_the_same_bits_in_every_run(quantize: Callable[[Tensor], QuantizedWeight]) -> None:
    prepared = prepare_quantized_weight(weight_of(quantize, 2048, 8192))
    for tokens in (1, 8, 64):
        x = rows(tokens, 8192)
        first = quantized_linear(x, prepared)
        assert all(torch.equal(quantized_linear(x, prepared), first) for _ in range(5))


@ALL
def test_expanding_first_gives_what_the_fused_kernel_gives(
    quantize: Callable[[Tensor], QuantizedWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, x = prepare_quantized_weight(weight_of(quantize, 1024, 1024)), rows(64, 1024)
    fused = quantized_linear(x, prepared)
    monkeypatch.setattr(module, "MOST_FUSED_ROWS", 0)
    check_close(quantized_linear(x, prepared), fused.double())


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_in_a_cuda_graph(tokens: int) -> None:
    prepared = prepare_quantized_weight(weight_of(quantize_nf4, 1024, 4096))
    x, bias = rows(tokens, 4096), rows(1024)
    quantized_linear(x, prepared, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantized_linear(x, prepared, bias)
    x.copy_(rows(tokens, 4096))
    graph.replay()
    assert torch.equal(captured, quantized_linear(x, prepared, bias))


def test_offsets_beyond_31_bits() -> None:
    """A head so large that its last outputs lie beyond 2³¹ elements."""
    n, k = 2**31 // 2048 + 200, 2048
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda").view(torch.int8)
    weight = Int8Weight(codes, torch.rand(n, 1, device="cuda"), codes.shape[1])
    prepared = prepare_quantized_weight(weight)
    for tokens in (1, 4):
        x = rows(tokens, k)
        y = quantized_linear(x, prepared)
        tail = x.double() @ weight.dequantize(torch.float64, slice(n - 200, n)).t()
        check_close(y[:, -200:], tail)
