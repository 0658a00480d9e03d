"""The quantized linear layer against fp64 products with the dequantized weight, on the CPU and in Triton."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels.linear.quantized as module
from kernels.linear._quantized_cpu import _expanded, prepare_for_cpu
from kernels.linear._skinny_cpu import multiplies
from kernels.linear.quantization import (
    Fp8Weight,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int6,
    quantize_int8,
    quantize_nf4,
    stack_nf4,
)
from kernels.linear.quantized import (
    prepare_quantized_weight,
    quantized_linear,
    quantized_linear_in_fp32,
    quantized_linear_reference,
)
from tests.compare import check_close
from tests.kernels.integers import from_minima, in_halves

QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": quantize_nf4,
    "nf4 single": lambda w: quantize_nf4(w, double=False),
    "int4": lambda w: quantize_int4(w, group=128),
    "int4 asymmetric": lambda w: quantize_int4(w, group=32, symmetric=False),
    "int4 from minima": from_minima,
    "int6": quantize_int6,
    "int6 asymmetric": lambda w: quantize_int6(w, group=16, symmetric=False),
    "int8": quantize_int8,
    "int8 in groups": lambda w: in_halves(quantize_int8(w, group=32)),
    "int8 from minima": lambda w: from_minima(w, 16, bits=5),
    "fp8": quantize_fp8,
}
ALL = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
Quantize = Callable[[Tensor], QuantizedWeight]


def to(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    fields = {name: getattr(weight, name) for name in type(weight).__dataclass_fields__}
    return type(weight)(**{n: v.to(device) if isinstance(v, Tensor) else v for n, v in fields.items()})


def check(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
    """Values and gradients."""
    prepared = prepare_quantized_weight(weight)
    x = x.detach().requires_grad_()
    y = quantized_linear(x, prepared, bias)
    assert y.dtype == x.dtype
    wide = x.detach().double().requires_grad_()
    wide_bias = None if bias is None else bias.detach().double().requires_grad_()
    expected = quantized_linear_reference(wide, weight, wide_bias)
    check_close(y.detach(), expected)
    grad = torch.randn_like(y)
    inputs, wide_inputs = ([x], [wide]) if bias is None else ([x, bias], [wide, wide_bias])
    grads = torch.autograd.grad(y, inputs, grad)
    for one, leaf, other in zip(grads, inputs, torch.autograd.grad(expected, wide_inputs, grad.double()), strict=True):
        assert one.dtype == leaf.dtype
        check_close(one, other)


def rows(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


def weight_of(device: torch.device, quantize: Quantize, n: int, k: int) -> QuantizedWeight:
    return to(quantize(0.05 * torch.randn(n, k)), device)


# On the CPU: skinny products (which want K in 32s, NF4 in 64s), and blocks of outputs.
@ALL
@DTYPES
@pytest.mark.parametrize("shape", [(64, 256), (192, 384), (70, 130), (33, 7)], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 8, 130])
def test_cpu(quantize: Quantize, dtype: torch.dtype, shape: tuple[int, int], tokens: int) -> None:
    cpu = torch.device("cpu")
    bias = rows(cpu, shape[0], dtype=dtype).requires_grad_()
    check(rows(cpu, tokens, shape[1], dtype=dtype), weight_of(cpu, quantize, *shape), bias if tokens == 8 else None)


def check_sums(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """That they are right, and in fp32; they are returned."""
    prepared = prepare_quantized_weight(weight)
    sums = quantized_linear_in_fp32(x, prepared)
    assert sums.dtype == torch.float32
    check_close(sums.to(x.dtype), quantized_linear_reference(x.double(), weight))
    return sums


@ALL
@DTYPES
@pytest.mark.parametrize("shape", [(64, 256), (192, 384), (70, 130)], ids=str)
def test_cpu_sums_in_fp32(quantize: Quantize, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    cpu = torch.device("cpu")
    weight, x = weight_of(cpu, quantize, *shape), rows(cpu, 130, shape[1], dtype=dtype)
    prepared = prepare_quantized_weight(weight)
    for tokens in (0, 1, 2, 8, 30, 130):
        sums = check_sums(x[:tokens], weight)
        if not tokens or prepared.skinny is None:
            continue
        if dtype == torch.bfloat16 and multiplies(dtype) and tokens <= 30:
            assert torch.equal(sums.bfloat16(), quantized_linear(x[:tokens], prepared))
        assert not torch.equal(sums, sums.to(torch.bfloat16).float())


def test_cpu_sums_in_fp32_have_gradients() -> None:
    weight = prepare_quantized_weight(quantize_int8(torch.randn(48, 64)))
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(quantized_linear_in_fp32(x, weight).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(quantized_linear(x, weight).sum(), x)[0])


def test_cpu_expands_the_weight_block_by_block() -> None:
    """Weights of more than two million elements, in shapes for C and in others."""
    cpu = torch.device("cpu")
    for name in ("nf4", "int4", "fp8"):
        for n, k in ((5000, 450), (5000, 448)):
            check(rows(cpu, 40, k), weight_of(cpu, QUANTIZERS[name], n, k), rows(cpu, n).requires_grad_())


def test_cpu_takes_rows_that_are_not_neighbours() -> None:
    cpu = torch.device("cpu")
    for quantize in QUANTIZERS.values():
        weight = weight_of(cpu, quantize, 64, 128)
        for dtype in (torch.float32, torch.bfloat16):
            check(rows(cpu, 6, 256, dtype=dtype)[::2, :128], weight)
            check(rows(cpu, 128, 3, dtype=dtype).t(), weight)


def test_cpu_reads_every_fp8_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[127] = codes[255] = 0  # NaN: no weight has it
    weight = Fp8Weight(codes.view(torch.float8_e4m3fn).view(4, 64), torch.ones(4))
    for dtype in (torch.float32, torch.bfloat16):
        expanded = _expanded(prepare_for_cpu(weight), dtype, slice(1, 4))
        assert torch.equal(expanded, weight.dequantize(dtype, rows=slice(1, 4)))


@pytest.mark.covering
# The Triton kernels.
@ALL
@DTYPES
def test_kernel_in_every_format_and_dtype(device: torch.device, quantize: Quantize, dtype: torch.dtype) -> None:
    weight, bias = weight_of(device, quantize, 72, 256), rows(device, 72, dtype=dtype).requires_grad_()
    for tokens in (1, 3, 17):
        check(rows(device, tokens, 256, dtype=dtype), weight, bias if tokens != 3 else None)
    check_sums(rows(device, 3, 256, dtype=dtype), weight)


@pytest.mark.covering
@ALL
@pytest.mark.parametrize("k", [64 * 3, 96, 70, 33, 5])
def test_kernel_with_odd_sizes(device: torch.device, quantize: Quantize, k: int) -> None:
    """K that tiles, groups and NF4's blocks do not divide; N that is no multiple of anything."""
    weight = weight_of(device, quantize, 37, k)
    for tokens in (1, 2):
        check(rows(device, tokens, k, dtype=torch.bfloat16), weight)


@pytest.mark.parametrize("tokens", [0, 1, 16, 64, 130])
def test_kernel_with_any_number_of_rows(device: torch.device, tokens: int) -> None:
    for name in ("nf4", "int8"):
        weight = weight_of(device, QUANTIZERS[name], 72, 192)
        check(rows(device, tokens, 192), weight, rows(device, 72).requires_grad_())


@ALL
def test_gradients_of_many_rows_expand_the_weight_once(
    device: torch.device, quantize: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same gradients on both sides of the crossover; beyond it no kernel decodes tiles for every 128 rows again."""
    weight = weight_of(device, quantize, 40, 128)
    for dtype in (torch.float32, torch.float16):
        check(rows(device, 256, 128, dtype=dtype), weight, rows(device, 40, dtype=dtype).requires_grad_())
    monkeypatch.setattr(module, "_grad_input_kernel", None)
    for dtype in (torch.float32, torch.float16):
        check(rows(device, 257, 128, dtype=dtype), weight, rows(device, 40, dtype=dtype).requires_grad_())
    with pytest.raises(TypeError):
        check(rows(device, 256, 128), weight)


@pytest.mark.parametrize("group", [16, 48, 4, 200])
def test_kernel_with_groups_of_other_sizes(device: torch.device, group: int) -> None:
    for symmetric in (True, False):
        weight = to(quantize_int4(torch.randn(20, 200), group=group, symmetric=symmetric), device)
        check(rows(device, 3, 200), weight)
        check(rows(device, 1, 200), weight)
    for weight in (from_minima(torch.randn(20, 200), group), quantize_int8(torch.randn(20, 200), group=group)):
        check(rows(device, 3, 200), to(weight, device))
        check(rows(device, 1, 200), to(weight, device))


def test_kernel_reads_stacked_weights(device: torch.device) -> None:
    """Whose offsets of nested absmax differ: the second part is a hundred times the first."""
    parts = [quantize_nf4(size * torch.randn(n, 256)) for n, size in ((64, 0.05), (70, 5.0))]
    stacked = stack_nf4(parts)
    assert stacked is not None
    for tokens in (1, 3, 130):
        check(rows(device, tokens, 256), to(stacked, device))


@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_kernel_adds_splits_in_order(device: torch.device, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole splits and a shorter last one; the bits of a row do not depend on the rows beside it.

    The last to arrive adds all of them and leaves the counters as they were.
    """
    monkeypatch.setattr(module, "_MOST_SPLITS", splits)
    monkeypatch.setattr(module, "num_processors", lambda device: 100)
    weight, x = weight_of(device, quantize_nf4, 40, 320), rows(device, 5, 320)
    prepared = prepare_quantized_weight(weight)
    check(x, weight, rows(device, 40).requires_grad_())
    check(x[:1], weight, rows(device, 40).requires_grad_())
    assert torch.equal(quantized_linear(x, prepared)[:2], quantized_linear(x[:2], prepared))
    assert prepared.arrived is not None and not prepared.arrived.any()


def test_kernel_takes_rows_that_are_not_neighbours(device: torch.device) -> None:
    prepared = prepare_quantized_weight(weight_of(device, quantize_nf4, 24, 128))
    x = rows(device, 6, 256)
    for part in (x[::2, :128], x[:1, 128:], x[:, 128:].repeat(30, 1)[:150]):
        assert torch.equal(quantized_linear(part, prepared), quantized_linear(part.contiguous(), prepared))


def test_kernel_expands_to_the_bit(device: torch.device) -> None:
    """What is multiplied at many rows is the dequantized weight. A GPU may fuse product and sum of a nested absmax."""
    for name, quantize in QUANTIZERS.items():
        for n, k in ((20, 128), (20, 70)):
            weight = weight_of(device, quantize, n, k)
            expanded = module.expand(prepare_quantized_weight(weight), torch.float32)
            if name == "nf4" and device.type == "cuda":
                check_close(expanded, weight.dequantize())
            else:
                assert torch.equal(expanded, weight.dequantize())


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    prepared = prepare_quantized_weight(weight_of(device, quantize_nf4, 8, 64))
    with pytest.raises(ValueError, match=r"x must be \[T, 64\]"):
        quantized_linear(rows(device, 2, 32), prepared)
    with pytest.raises(ValueError, match=r"bias must be \[8\]"):
        quantized_linear(rows(device, 2, 64), prepared, rows(device, 4))
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        quantized_linear(rows(device, 64, 2).t(), prepared)
