"""What only the CPU does with quantized weights: the product of bytes for INT8, and NF4 read four codes at a time."""

import copy

import pytest
import torch
from torch import Tensor

import kernels._quantized_linear_cpu as module
from kernels._byte_product import ByteWeight, byte_product, multiplies_bytes, pack_bytes
from kernels.quantization import Int8Weight, quantize_int8, quantize_nf4
from kernels.quantized_linear import prepare_quantized_weight, quantized_linear
from tests.compare import check_close, relative_rms

needs_bytes = pytest.mark.skipif(not multiplies_bytes(), reason="this processor sums products of bytes inexactly")


def product(x: Tensor, weight: Int8Weight) -> Tensor:
    return x.double() @ weight.dequantize(torch.float64).t()


@needs_bytes
@pytest.mark.parametrize("shape", [(64, 256), (70, 130), (33, 7), (1, 64), (5, 1)], ids=str)
def test_loses_less_than_the_rounding_of_x(shape: tuple[int, int]) -> None:
    weight = quantize_int8(0.05 * torch.randn(shape))
    for tokens in (1, 2, 9, 40):
        x = torch.randn(tokens, shape[1]).bfloat16()
        assert relative_rms(byte_product(x, pack_bytes(weight)).double(), product(x, weight)) < 3e-4


@needs_bytes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("outlier", [1e2, 1e4, -6e4])
def test_one_huge_element_in_a_row(dtype: torch.dtype, outlier: float) -> None:
    """The row itself, and the rows beside it, each with its own unit."""
    weight = quantize_int8(0.01 * torch.randn(96, 4096))
    x = torch.randn(3, 4096).to(dtype)
    x[1, 17] = outlier
    y = quantized_linear(x, prepare_quantized_weight(weight))
    for row in range(3):
        check_close(y[row], product(x, weight)[row])


@needs_bytes
def test_the_largest_numbers_and_none() -> None:
    """Every byte at its end does not saturate; zeros stay zeros; what is not finite spoils its own row only."""
    weight = Int8Weight(torch.full((32, 8192), 127, dtype=torch.int8), torch.rand(32))
    x = torch.ones(5, 8192, dtype=torch.bfloat16) * torch.tensor([1e30, -1e-30, 0, 1, 1]).bfloat16()[:, None]
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    y = byte_product(x, pack_bytes(weight))
    for row in range(2):
        check_close(y[row], product(x, weight)[row], dtype=torch.bfloat16)
    assert not y[2].bfloat16().any()
    assert not y[3:].isfinite().any()


@needs_bytes
def test_keeps_the_codes_and_copies_them() -> None:
    weight = quantize_int8(torch.randn(70, 130))
    packed = pack_bytes(weight)
    for each in (packed, copy.deepcopy(packed)):
        assert isinstance(each, ByteWeight)
        assert each.shape == weight.shape
        assert torch.equal(each.unpack().dequantize(), weight.dequantize())


@pytest.mark.parametrize("tokens", [1, 8, 17, 65])
def test_processors_that_cannot_use_the_other_product(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiplies_bytes", lambda: False)
    weight, x, bias = quantize_int8(torch.randn(64, 128)), torch.randn(tokens, 128).bfloat16(), torch.randn(64)
    prepared = module.prepare_for_cpu(weight)
    assert isinstance(prepared.held, Int8Weight)
    check_close(module.linear_on_cpu(x, prepared, bias.bfloat16()), product(x, weight) + bias.bfloat16())


@needs_bytes
def test_many_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BYTE_ROWS_AT_ONCE", 4)
    weight, x = quantize_int8(torch.randn(64, 128)), torch.randn(11, 128).bfloat16()
    check_close(quantized_linear(x, prepare_quantized_weight(weight)), product(x, weight))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("k", [64, 192, 96, 7])
def test_reads_every_pair_of_nf4_bytes(k: int, double: bool) -> None:
    """To the bit, whether 64 divides the rows or not."""
    weight = quantize_nf4(torch.randn(40, k), double=double)
    weight.codes[:] = torch.randint(0, 256, weight.codes.shape, dtype=torch.uint8)
    prepared = module.prepare_for_cpu(weight).unpacked()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (slice(0, 40), slice(3, 8)):
            assert torch.equal(module._expanded(prepared, dtype, rows), weight.dequantize(dtype, rows))
