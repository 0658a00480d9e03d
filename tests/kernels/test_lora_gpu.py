"""LoRA natively: prompts and decoding, many adapters, CUDA graphs, the fused products, huge outputs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.linear.lora import LoraWeights, lora_add
from kernels.linear.quantization import QuantizedWeight, quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from kernels.linear.quantized_swiglu import quantized_swiglu
from tests.compare import check_all_close, check_close
from tests.kernels import adapters
from tests.kernels.adapters import BOTH, DTYPES, Product, double

pytestmark = pytest.mark.gpu
rows = partial(adapters.rows, "cuda", dtype=torch.bfloat16)
make_slots = partial(adapters.make_slots, "cuda")
make_weights = partial(adapters.make_weights, "cuda", dtype=torch.bfloat16)


def expected_sum(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor) -> Tensor:
    """In fp64, an adapter at a time."""
    result, x = y.double(), x.double()
    for adapter in range(len(weights.a)):
        mine = slots == adapter
        shrunk = x[mine] @ weights.a[adapter].double().t()
        result[mine] += weights.scales[adapter].double() * (shrunk @ weights.b[adapter].double().t())
    return result


@pytest.mark.covering(pairs=True)
@DTYPES
@pytest.mark.parametrize("shape", [(1, 16, 4096, 4096), (8, 64, 4096, 1024), (33, 7, 1030, 777)], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 16, 33, 64, 65, 1037])
def test_equals_fp64(dtype: torch.dtype, shape: tuple[int, int, int, int], tokens: int) -> None:
    count, _, k, n = shape
    weights, slots = make_weights(shape, dtype=dtype), make_slots(tokens, count)
    x = rows(tokens, k, dtype=dtype)
    for y in (rows(tokens, n, dtype=dtype), torch.zeros(tokens, n, dtype=dtype, device="cuda")):
        result = lora_add(y, x, weights, slots)
        check_close(result, expected_sum(y, x, weights, slots))
        assert torch.equal(result[slots < 0], y[slots < 0])


@DTYPES
def test_sums_are_as_exact_as_in_fp32(dtype: torch.dtype) -> None:
    """What TF32 or a rounded A x would lose shows where y takes the size of the sum away."""
    shape = (1, 64, 4096, 512)
    weights, x = make_weights(shape, dtype=dtype), rows(8, 4096, dtype=dtype)
    slots = torch.zeros(8, dtype=torch.int32, device="cuda")
    exact = expected_sum(torch.zeros(8, 512, device="cuda"), x, weights, slots)
    y = -exact.to(dtype)
    rest = exact + y.double()
    error = (lora_add(y, x, weights, slots).double() - rest).square().mean().sqrt() / exact.square().mean().sqrt()
    # The rest is a rounding of the sum, below 2⁻⁸ of it, and itself rounded; the sum's error is to be below 2⁻¹⁶.
    assert error.item() < 2**-16


@DTYPES
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    weights, slots = make_weights((8, 16, 4096, 1000), dtype=dtype), make_slots(64, 8)
    y, x = rows(64, 1000, dtype=dtype), rows(64, 4096, dtype=dtype)
    whole = lora_add(y, x, weights, slots)
    order = torch.randperm(64, device="cuda")
    assert torch.equal(lora_add(y[order], x[order], weights, slots[order]), whole[order])
    for first, last in ((0, 1), (5, 13), (30, 64)):
        part = lora_add(y[first:last], x[first:last], weights, slots[first:last])
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_in_a_cuda_graph(tokens: int) -> None:
    """One graph serves all assignments of rows to adapters."""
    weights, slots = make_weights((8, 16, 2048, 1024)), make_slots(tokens, 8)
    quantized = prepare_quantized_weight(quantize_nf4(0.02 * torch.randn(1024, 2048, device="cuda")))
    y, x = rows(tokens, 1024), rows(tokens, 2048)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        gated = quantized_swiglu(x, quantized, None, weights, slots)
        return lora_add(y, x, weights, slots), quantized_linear(x, quantized, None, weights, slots), gated

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for _ in range(3):
        x.copy_(rows(tokens, 2048))
        slots.copy_(make_slots(tokens, 8))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, work(), strict=True))


@pytest.mark.covering(pairs=True)
@BOTH
@DTYPES
@pytest.mark.parametrize("quantize", [quantize_nf4, quantize_int4, quantize_int8, quantize_fp8])
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 1024), (1006, 1030), (72, 33)], ids=str)
def test_fused_products(
    product: Product, dtype: torch.dtype, quantize: Callable[[Tensor], QuantizedWeight], shape: tuple[int, int]
) -> None:
    """With and without splits of K; bias, adapters, one adapter, none."""
    (n, k), (function, reference) = shape, product
    weight = quantize(torch.randn(n, k, device="cuda") / k**0.5)
    prepared, lora = prepare_quantized_weight(weight), make_weights((4, 16, k, n), dtype=dtype)
    bias = rows(n, dtype=dtype)
    for tokens in (1, 2, 16, 33, 128) if function is quantized_swiglu else (1, 2, 16, 33, 128, 130):
        x, slots = rows(tokens, k, dtype=dtype), make_slots(tokens, 4)
        check_close(function(x, prepared, bias), reference(x.double(), weight, bias.double()))
        changed = reference(x.double(), weight, bias.double(), double(lora), slots)
        check_close(function(x, prepared, bias, lora, slots), changed)
        changed = reference(x.double(), weight, None, double(lora), None)
        check_close(function(x, prepared, None, lora), changed)


@BOTH
def test_the_same_bits_in_every_run(product: Product) -> None:
    function, _ = product
    prepared = prepare_quantized_weight(quantize_nf4(0.02 * torch.randn(2048, 8192, device="cuda")))
    lora = make_weights((8, 16, 8192, 2048))
    for tokens in (1, 8, 64):
        x, slots = rows(tokens, 8192), make_slots(tokens, 8)
        first = function(x, prepared, None, lora, slots)
        assert all(torch.equal(function(x, prepared, None, lora, slots), first) for _ in range(5))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_gradients(dtype: torch.dtype, tokens: int) -> None:
    shape = (1, 16, 1024, 768)
    weights, weight = make_weights(shape, dtype=dtype), quantize_nf4(0.02 * torch.randn(768, 1024, device="cuda"))
    inputs = [t.requires_grad_() for t in (rows(tokens, 1024, dtype=dtype), weights.a, weights.b)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    y = quantized_linear(inputs[0], prepare_quantized_weight(weight), None, weights)
    base = wide[0] @ weight.dequantize(torch.float64).t()
    change = wide[0] @ wide[1][0].t() @ wide[2][0].t()
    expected = base + weights.scales[0].double() * change
    grad = torch.randn_like(y)
    check_close(y.detach(), expected.detach())
    check_all_close(torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, wide, grad.double()))


def test_offsets_beyond_31_bits() -> None:
    """A table of adapters, and an output, of more than 2³¹ elements."""
    count, rank, k = 9, 64, 2**22
    a = torch.zeros(count, rank, k, dtype=torch.bfloat16, device="cuda")
    b = rows(count, 16, rank)
    a[8] = torch.randn(rank, k, device="cuda") / k**0.5
    weights = LoraWeights(a, b, torch.ones(count, device="cuda"))
    x, slots = torch.randn(3, k, device="cuda").bfloat16(), torch.tensor([8, 0, 8], dtype=torch.int32, device="cuda")
    y = torch.zeros(3, 16, dtype=torch.bfloat16, device="cuda")
    check_close(lora_add(y, x, weights, slots), expected_sum(y, x, weights, slots))
    del a, weights, x
    n, tokens = 2**16, 2**15 + 8
    weights = make_weights((1, 16, 64, n))
    y, x = torch.zeros(tokens, n, dtype=torch.bfloat16, device="cuda"), rows(tokens, 64)
    tail = slice(tokens - 8, tokens)
    zeros = torch.zeros(8, dtype=torch.int32, device="cuda")
    check_close(lora_add(y, x, weights, None)[tail], expected_sum(y[tail], x[tail], weights, zeros))
