"""Quantized layers: exact against the dequantized weight, and faithful when they move."""

from typing import Any

import pytest
import torch

from kernels.linear._quantized_tiles import tile_weight
from kernels.linear.quantization import quantize_nf4
from kernels.linear.quantized import stored_codes
from model.formats.bitnet import Ternary
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Fp8, Int4, Int8
from model.formats.ggml import Ggml
from model.packed import Packing
from model.quantized import QuantizedEmbedding, QuantizedLinear


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


FORMATS = [
    NF4(),
    NF4(double=False),
    Int4(symmetric=False),
    Int4(16),
    Int8().rounded(128),
    Fp8(),
    Ternary(),
    Ggml("Q4_K"),
]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.title} {format.rounds_activations}")
def test_a_packed_layer_is_the_same_wherever_its_bytes_are(format: Any) -> None:
    """Between forward and backward they are freed and come back elsewhere, as `fully_shard` does it."""
    columns = 256 if isinstance(format, Ggml) else 128
    weight, x = format.quantize(torch.randn(48, columns)), torch.randn(5, columns, requires_grad=True)
    layer, alone = (QuantizedLinear(weight, format) for _ in range(2))
    layer.pack()
    assert layer.packed is not None and [*layer.parameters()] == [layer.packed] and not layer.packed.requires_grad
    expected, y = alone(x), layer(x)
    assert torch.equal(y, expected)
    memory, kept = layer.packed.untyped_storage(), layer.packed.clone()
    memory.resize_(0)
    elsewhere = torch.full_like(kept, 255)  # takes the place that was freed
    memory.resize_(kept.nbytes)
    layer.packed.data.copy_(kept)
    gradients = [torch.autograd.grad(one.square().sum(), x)[0] for one in (y, expected)]
    assert torch.equal(*gradients) and int(elsewhere.min()) == 255
    for name, tensor in format.tensors(layer.weight).items():
        stored = format.tensors(weight)[name]
        assert torch.equal(*(part.reshape(-1).view(torch.uint8) for part in (tensor, stored))), name


def test_a_packed_embedding_gives_its_rows() -> None:
    weight, tokens = Int8().quantize(torch.randn(20, 64)), torch.tensor([3, 19])
    layer = QuantizedEmbedding(weight, Int8(), torch.float32)
    expected = layer(tokens)
    layer.pack()
    assert torch.equal(layer(tokens), expected) and torch.equal(layer.weight.codes, weight.codes)


@pytest.mark.parametrize("shape", [(48, 128), (7, 33)])
def test_weights_in_tiles_are_packed_too(shape: tuple[int, int]) -> None:
    """As a GPU reads them; other dtypes than bytes begin where those may."""
    weight = quantize_nf4(torch.randn(shape))
    held = tile_weight(weight), weight
    packing = Packing(held)
    tiled, again = packing.unpack(packing.pack(held))
    assert torch.equal(stored_codes(tiled), weight.codes) and torch.equal(again.dequantize(), weight.dequantize())
    assert tiled.tile == held[0].tile and tiled.arrived.data_ptr() % 64 == packing.pack(held).data_ptr() % 64


@pytest.mark.parametrize("format", [Int4(32, symmetric=False), Int8()], ids=lambda format: format.title)
def test_a_layer_holds_its_codes_once(format: Any) -> None:
    """As files have them, or turned."""
    weight = format.quantize(torch.randn(48, 128))
    layer, stored = QuantizedLinear(weight, format), weight.codes.clone()
    layer(torch.randn(3, 128))
    assert len(layer._weight.codes) == 0 or layer._weight.codes is layer._prepared.held.codes
    assert torch.equal(layer.weight.codes, stored) and torch.equal(layer.weight.dequantize(), weight.dequantize())


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
