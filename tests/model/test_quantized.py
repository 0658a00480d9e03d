"""Quantized layers: exact against the dequantized weight, and faithful when they move."""

import pytest
import torch

from kernels.linear._quantized_tiles import tile_weight
from kernels.linear.quantization import quantize_nf4
from kernels.linear.quantized import stored_codes
from model.formats.bitsandbytes import NF4
from model.quantized import QuantizedLinear


@pytest.mark.parametrize(("out", "features"), [(48, 64), (30, 70), (7, 33)])
@pytest.mark.parametrize("double", [True, False])
def test_a_layer_is_its_dequantized_weight(out: int, features: int, double: bool) -> None:
    weight = quantize_nf4(torch.randn(out, features), double=double)
    layer = QuantizedLinear(weight, NF4(double), torch.nn.Parameter(torch.randn(out)))
    x = torch.randn(5, features, requires_grad=True)
    expected = x @ weight.dequantize().t() + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    (own,) = torch.autograd.grad(layer(x).square().sum(), x)
    (other,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.row_squares(), weight.dequantize().square().sum(1))
    torch.testing.assert_close(layer.times(x), x @ weight.dequantize().t(), rtol=1e-5, atol=1e-5)


def test_a_change_of_dtype_leaves_the_weight_alone() -> None:
    layer = QuantizedLinear(quantize_nf4(torch.randn(48, 64)), NF4())
    before = layer.weight
    layer.to(torch.bfloat16).half()
    assert layer.weight is before and layer.weight.nested_absmax.dtype == torch.float32
    assert not list(layer.parameters()) and not list(layer.buffers())


def test_the_bytes_of_a_weight() -> None:
    """4 bits, 8 bits a block of 64, 32 bits a block of 64 · 256 and 32 for the offset."""
    layer = QuantizedLinear(quantize_nf4(torch.randn(512, 1024)), NF4())
    assert layer.weight_bytes == 512 * 1024 // 2 + 512 * 16 + 4 * 32 + 4
    assert layer.weight_bytes * 8 / (512 * 1024) == pytest.approx(4.127, abs=1e-3)


@pytest.mark.parametrize("shape", [(48, 128), (30, 70), (7, 33), (5, 80)])
def test_repacked_codes_can_be_read_back(shape: tuple[int, int]) -> None:
    weight = quantize_nf4(torch.randn(shape))
    assert torch.equal(stored_codes(tile_weight(weight)), weight.codes)


@pytest.mark.gpu
def test_a_layer_moves_between_devices() -> None:
    weight = quantize_nf4(torch.randn(48, 128))
    layer, x = QuantizedLinear(weight, NF4()), torch.randn(3, 128)
    expected = layer(x)
    layer.to("cuda")
    torch.testing.assert_close(layer(x.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)
    assert not len(layer._weight.codes)
    assert torch.equal(layer.weight.codes.cpu(), weight.codes)
    layer.to("cpu")
    assert torch.equal(layer(x), expected)
