"""ggml's blocks, to the bit as the gguf library, which llama.cpp's own converter uses, packs and unpacks them."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from model.files.safe_io import CheckpointError
from model.formats.gguf.blocks import BLOCK_TYPES, SmallBlocks

SMALL = [name for name, type in BLOCK_TYPES.items() if isinstance(type, SmallBlocks)]
LARGE = [name for name in BLOCK_TYPES if name not in SMALL]


def weights(rows: int = 64, columns: int = 512) -> Tensor:
    """Rows of very different sizes, with outliers, ties at both ends, and blocks of zeros and of one number."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    x[1, 5] *= 50
    x[2, 3:5] = torch.tensor([9.0, -9.0])
    x[3, :256], x[4, :256], x[5, :256] = 0, 0.125, -0.125
    return x


def theirs(name: str, stored: Tensor) -> Tensor:
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(gguf.dequantize(stored.numpy(), gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", SMALL)
def test_the_plain_types_quantize_as_llama_cpp(name: str) -> None:
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = gguf.quantize(weights().numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(BLOCK_TYPES[name].quantize(weights()), torch.from_numpy(expected))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_whatever_is_stored_expands_to_the_same_bits(name: str) -> None:
    type = BLOCK_TYPES[name]
    stored = torch.randint(
        0, 256, (8, 6 * type.num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    expected = theirs(name, stored)
    finite = expected.isfinite()  # a random scale may be infinite
    found = type.unpack(stored).dequantize()
    assert finite.float().mean() > 0.5
    assert torch.equal(found[finite], expected[finite])
    assert (type.num_weights, type.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_levels_packed_again_are_the_same_bytes(name: str) -> None:
    """Units of the large types' scales are found again."""
    stored = BLOCK_TYPES[name].quantize(weights())
    assert torch.equal(BLOCK_TYPES[name].repack(BLOCK_TYPES[name].unpack(stored)), stored)


@pytest.mark.parametrize("name", LARGE)
def test_scales_split_otherwise_are_the_same_numbers(name: str) -> None:
    """Random multiples, as another program may choose them; what no unit divides is refused."""
    type = BLOCK_TYPES[name]
    stored = torch.randint(0, 256, (64, type.num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    units = slice(0, 4) if name == "Q4_K" else slice(208, 210)
    stored[:, units] = type.quantize(weights(64, 256))[:, units]
    found = type.unpack(stored)
    again = type.unpack(type.repack(found))
    assert torch.equal(again.dequantize(), found.dequantize()) and torch.equal(again.levels, found.levels)
    found.scales[10, 2] *= 1.001
    with pytest.raises(CheckpointError, match="not multiples of a number in fp16"):
        type.repack(found)


@pytest.mark.parametrize(("name", "bits", "zero"), [("Q4_K", 4, None), ("Q6_K", 6, 32)])
def test_the_large_types_are_better_than_a_plain_grid_of_as_many_bits(name: str, bits: int, zero: int | None) -> None:
    """Even one whose scales, of as many weights, take no bits at all."""
    x = weights()[6:]
    groups = x.view(-1, 32 if zero is None else 16)
    if zero is None:
        low = groups.amin(1, keepdim=True)
        scale = (groups.amax(1, keepdim=True) - low) / (2**bits - 1)
        plain = ((groups - low) / scale).round() * scale + low
    else:
        scale = groups.abs().amax(1, keepdim=True) / (zero - 1)
        plain = (groups / scale).round() * scale
    importance = (groups.square().mean(1, keepdim=True).sqrt() + groups.abs()) / groups.square().mean(1, keepdim=True)
    errors = [
        (importance * (found.reshape(groups.shape) - groups).square()).sum().item()
        for found in (BLOCK_TYPES[name].unpack(BLOCK_TYPES[name].quantize(x)).dequantize(), plain)
    ]
    assert errors[0] < 0.97 * errors[1]


@pytest.mark.parametrize("name", LARGE)
def test_the_large_types_keep_zeros_and_single_numbers(name: str) -> None:
    found = BLOCK_TYPES[name].unpack(BLOCK_TYPES[name].quantize(weights()[3:6, :256])).dequantize()
    assert not found[0].any()
    torch.testing.assert_close(found[1:], weights()[4:6, :256], rtol=0.04, atol=0)
