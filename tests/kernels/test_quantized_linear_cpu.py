"""Quantized weights on processors for which nothing can be compiled: torch's packed products, and NF4 by four codes."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import kernels.linear._quantized_cpu as module
from kernels.linear.quantization import (
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int6,
    quantize_int8,
    quantize_nf4,
)
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from tests.compare import check_close

QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": quantize_nf4,
    "int4": quantize_int4,
    "int4 asymmetric": lambda w: quantize_int4(w, group=32, symmetric=False),
    "int6": quantize_int6,
    "int8": quantize_int8,
    "fp8": quantize_fp8,
}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "prepare_skinny", lambda weight: None)
    yield


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("tokens", [1, 8, 17, 65])
def test_products(name: str, tokens: int) -> None:
    weight = QUANTIZERS[name](torch.randn(64, 256))
    x, bias = torch.randn(tokens, 256).bfloat16(), torch.randn(64).bfloat16()
    prepared = prepare_quantized_weight(weight)
    assert (prepared.packed is not None) == name.startswith(("int4", "int8"))
    check_close(quantized_linear(x, prepared, bias), x.double() @ weight.dequantize(torch.float64).t() + bias)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("shape", [(70, 130), (33, 7)], ids=str)
def test_odd_shapes(name: str, shape: tuple[int, int]) -> None:
    weight, x = QUANTIZERS[name](torch.randn(shape)), torch.randn(3, shape[1]).bfloat16()
    prepared = prepare_quantized_weight(weight)
    assert prepared.packed is None
    check_close(quantized_linear(x, prepared), x.double() @ weight.dequantize(torch.float64).t())


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("k", [64, 192, 96, 7])
def test_reads_every_pair_of_nf4_bytes(k: int, double: bool) -> None:
    """To the bit, whether 64 divides the rows or not."""
    weight = quantize_nf4(torch.randn(40, k), double=double)
    weight.codes[:] = torch.randint(0, 256, weight.codes.shape, dtype=torch.uint8)
    prepared = module.prepare_for_cpu(weight)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (slice(0, 40), slice(3, 8)):
            assert torch.equal(module._expanded(prepared, dtype, rows), weight.dequantize(dtype, rows))
