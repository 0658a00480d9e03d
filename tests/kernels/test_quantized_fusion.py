"""Quantized products with adapters, and gate and up as one product: on the CPU and in Triton, against fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels.linear.quantized as module
from kernels.linear.lora import LoraWeights
from kernels.linear.quantization import (
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int6,
    quantize_int8,
    quantize_nf4,
)
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from kernels.linear.quantized_swiglu import quantized_swiglu
from tests.compare import check_all_close, check_close
from tests.kernels.adapters import BOTH, Product, double, make_slots, make_weights, rows
from tests.kernels.test_quantized_linear import to

QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": quantize_nf4,
    "int4": lambda w: quantize_int4(w, group=32, symmetric=False),
    "int8": quantize_int8,
    "fp8": quantize_fp8,
    "int6": lambda w: quantize_int6(w, group=32, symmetric=False),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def weight_of(device: torch.device, n: int, k: int, name: str = "nf4") -> QuantizedWeight:
    return to(QUANTIZERS[name](torch.randn(n, k) / k**0.5), device)


def check(
    product: Product,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    lora: LoraWeights | None,
    slots: Tensor | None = None,
) -> None:
    function, reference = product
    y = function(x, prepare_quantized_weight(weight), bias, lora, slots)
    assert y.dtype == x.dtype
    wide_bias, wide_lora = None if bias is None else bias.double(), None if lora is None else double(lora)
    check_close(y, reference(x.double(), weight, wide_bias, wide_lora, slots))


def check_variants(product: Product, tokens: int, weight: QuantizedWeight, dtypes: tuple[torch.dtype, ...]) -> None:
    """Bias, adapters by slots, one adapter, nobody's adapter."""
    (n, k), device = weight.shape, weight.codes.device
    for dtype in dtypes:
        x, bias = rows(device, tokens, k, dtype=dtype), rows(device, n, dtype=dtype)
        lora = make_weights(device, (3, 5, k, n), dtype)
        check(product, x, weight, bias, None)
        check(product, x, weight, bias, lora, make_slots(device, tokens, 3))
        check(product, x, weight, None, lora)
        check(product, x, weight, None, lora, torch.full((tokens,), -1, dtype=torch.int32, device=device))


def unfused_dtypes(product: Product) -> tuple[torch.dtype, ...]:
    """One function after another rounds too often for the bounds of 16 bits, with the gate behind it."""
    return DTYPES if product[0] is quantized_linear else DTYPES[:1]


@BOTH
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("shape", [(128, 256), (70, 130)], ids=str)
def test_cpu(product: Product, name: str, shape: tuple[int, int]) -> None:
    for tokens in (0, 1, 9, 130):
        check_variants(product, tokens, weight_of(CPU, *shape, name), unfused_dtypes(product))


@BOTH
@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(QUANTIZERS, (*DTYPES, torch.bfloat16, torch.float32), strict=True)), ids=str
)
def test_kernels(device: torch.device, product: Product, name: str, dtype: torch.dtype) -> None:
    """Interpreted, three processors: K is split."""
    for tokens, shape in ((1, (72, 256)), (18, (72, 96)), (3, (70, 33))):
        check_variants(product, tokens, weight_of(device, *shape, name), (dtype,))


@BOTH
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_kernels_whole_and_split(
    device: torch.device, product: Product, splits: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that ends the sums adds the rest: tiles of both halves that I does not divide."""
    monkeypatch.setattr(module, "_MOST_SPLITS", splits)
    monkeypatch.setattr(module, "num_processors", lambda device: 100)
    for n in (72, 300):
        check_variants(product, tokens, weight_of(device, n, 192), (torch.bfloat16,))


@BOTH
def test_many_rows_add_afterwards(device: torch.device, product: Product) -> None:
    check_variants(product, 130, weight_of(device, 72, 64, "int8"), unfused_dtypes(product))


@BOTH
def test_one_launch_gives_what_two_give(device: torch.device, product: Product) -> None:
    """Rows without an adapter have the bits of a product without adapters."""
    weight, x = prepare_quantized_weight(weight_of(device, 72, 256)), rows(device, 8, 256, dtype=torch.bfloat16)
    lora, slots = make_weights(device, (3, 5, 256, 72), torch.bfloat16), make_slots(device, 8, 3)
    function, _ = product
    with_adapters, without = function(x, weight, None, lora, slots), function(x, weight)
    assert torch.equal(with_adapters[slots < 0], without[slots < 0])
    assert not torch.equal(with_adapters, without)


@BOTH
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_gradients(device: torch.device, product: Product, tokens: int) -> None:
    """dX = dY W + s · (dY B) A, and those of bias, a and b."""
    n, k = 72, 128
    weight = weight_of(device, n, k)
    function, reference = product
    for dtype in unfused_dtypes(product)[:2]:
        lora = make_weights(device, (1, 20, k, n), dtype)
        inputs = [t.requires_grad_() for t in (rows(device, tokens, k, dtype=dtype), rows(device, n, dtype=dtype))] + [
            lora.a.requires_grad_(),
            lora.b.requires_grad_(),
        ]
        wide = [t.detach().double().requires_grad_() for t in inputs]
        y = function(inputs[0], prepare_quantized_weight(weight), inputs[1], lora)
        expected = reference(wide[0], weight, wide[1], LoraWeights(wide[2], wide[3], lora.scales))
        grad = torch.randn_like(y)
        actual = torch.autograd.grad(y, inputs, grad)
        assert all(one.dtype == dtype for one in actual)
        check_all_close(actual, torch.autograd.grad(expected, wide, grad.double()), dtype=dtype)


@BOTH
def test_refuses_what_does_not_fit(device: torch.device, product: Product) -> None:
    function, _ = product
    weight, x = prepare_quantized_weight(weight_of(device, 8, 64)), rows(device, 2, 64)
    lora, slots = make_weights(device, (2, 4, 64, 8)), make_slots(device, 2, 2)
    with pytest.raises(ValueError, match=r"do not fit .* 8 outputs"):
        function(x, weight, None, make_weights(device, (2, 4, 64, 4)))
    with pytest.raises(ValueError, match="slots must be int32"):
        function(x, weight, None, lora, slots[:1])
    with pytest.raises(ValueError, match="give lora too"):
        function(x, weight, slots=slots)
    with pytest.raises(ValueError, match="only one adapter can be trained"):
        function(x.clone().requires_grad_(), weight, None, lora, slots)
    odd = prepare_quantized_weight(weight_of(device, 7, 64))
    with pytest.raises(ValueError, match="even number of rows"):
        quantized_swiglu(x, odd)
