"""The formats, to the bit: literal fixtures, the published constants, and what follows from the definitions."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.linear.quantization import (
    NF4_TABLE,
    Int4Weight,
    Int6Weight,
    Int8Weight,
    NF4Weight,
    QuantizedWeight,
    dynamic_table,
    nf4_table,
    quantize_fp8,
    quantize_int4,
    quantize_int6,
    quantize_int8,
    quantize_nf4,
    stack_nf4,
)
from tests.compare import relative_rms
from tests.kernels.integers import from_minima, in_halves

CPU = torch.device("cpu")
QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": quantize_nf4,
    "nf4 single": lambda w: quantize_nf4(w, double=False),
    "int4": lambda w: quantize_int4(w, group=32),
    "int4 asymmetric": lambda w: quantize_int4(w, group=32, symmetric=False),
    "int4 from minima": from_minima,
    "int6": lambda w: in_halves(quantize_int6(w, group=16)),
    "int6 asymmetric": lambda w: quantize_int6(w, group=32, symmetric=False),
    "int8": quantize_int8,
    "int8 in groups": lambda w: in_halves(quantize_int8(w, group=32)),
    "int8 from minima": lambda w: from_minima(w, 16, bits=5),
    "fp8": quantize_fp8,
}
ALL = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 70), (7, 33), (300, 96), (2, 1000)], ids=str)


def same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether two weights hold the same bits."""
    fields = [[getattr(w, name) for name in type(w).__dataclass_fields__] for w in (one, other)]
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if isinstance(a, Tensor) and a.ndim else bool(a == b)
        for a, b in zip(*fields, strict=True)
    )


def test_nf4_fixture() -> None:
    """One row of 70: a full block and a shorter one. The bytes are those of bitsandbytes 0.50.2's plain functions."""
    weight = (torch.arange(70) * 37 % 101 - 50).float().view(1, 70) / 64
    doubly = quantize_nf4(weight)
    assert doubly.codes.numpy().tobytes().hex() == (
        "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16e18f2"
    )
    assert doubly.absmax.tolist() == [255, 0]
    assert doubly.nested_absmax is not None and doubly.nested_absmax.tolist() == [0.0625]
    assert doubly.offset is not None and doubly.offset.item() == 0.71875
    single = quantize_nf4(weight, double=False)
    assert torch.equal(single.codes, doubly.codes)
    assert single.absmax.tolist() == [0.78125, 0.65625]
    # −1 times the absmax of the first block; the second block begins with element 64. Its absmax is off: −0.99296875
    # is the dynamic code's lowest value.
    expected = -50 / 64, NF4_TABLE[14] * 0.65625, NF4_TABLE[14] * (0.0625 * -0.99296875 + 0.71875)
    values = single.dequantize()[0, 0], single.dequantize()[0, 69], doubly.dequantize()[0, 69]
    codes = doubly.elements()[0]
    assert codes[0] == 0 and codes[68] == 15 and codes[69] == 2
    expected = -50 / 64, NF4_TABLE[2] * 0.65625, NF4_TABLE[2] * (0.0625 * -0.99296875 + 0.71875)
    assert [v.item() for v in values] == pytest.approx(expected, rel=1e-7)


def test_nf4_decodes_every_byte() -> None:
    """The high nibble is the even element; an absmax of 1 shows the table itself."""
    weight = NF4Weight(torch.arange(256, dtype=torch.uint8), torch.ones(8), (1, 512))
    pairs = weight.dequantize().view(256, 2)
    for byte, (first, second) in enumerate(pairs.tolist()):
        assert (first, second) == tuple(nf4_table(CPU)[[byte >> 4, byte & 15]].tolist())
    for scale in (1.0, 0.3, 7e-5):  # every 32 of these bytes hold a −1, so their block's absmax is known
        scaled = replace(weight, absmax=scale * weight.absmax)
        assert same(quantize_nf4(scaled.dequantize(), double=False), scaled)


def test_nf4_values_are_quantiles_of_the_normal_distribution() -> None:
    """Seven negative and eight positive ones, then 0, all over the largest; the constants were rounded elsewhere."""

    def quantiles(count: int) -> Tensor:
        offset = ((1 - 1 / 30) + (1 - 1 / 32)) / 2
        return torch.special.ndtri(torch.linspace(offset, 0.5, count, dtype=torch.float64)[:-1])

    values = torch.cat((-quantiles(8), torch.zeros(1, dtype=torch.float64), quantiles(9).flip(0)))
    assert (values / values.max() - nf4_table(CPU)).abs().max() < 2.5e-7


def test_nf4_ties_go_to_the_lower_code() -> None:
    """The code is the number of midpoints strictly below the value."""
    midpoints = (nf4_table(CPU)[1:] + nf4_table(CPU)[:-1]) / 2
    above = torch.nextafter(midpoints, torch.tensor(2.0))
    weight = torch.zeros(1, 64)
    weight[0, :31] = torch.cat((midpoints, above, torch.ones(1)))
    codes = quantize_nf4(weight, double=False).elements()[0]
    assert codes[:15].tolist() == list(range(15)) and codes[15:31].tolist() == [*range(1, 16), 15]


def test_nf4_codes_survive_a_round_trip() -> None:
    """Blocks that hold +1 or −1 quantize back to their own codes."""
    codes = torch.randint(0, 16, (256, 64), dtype=torch.uint8)
    codes[:, 0] = torch.where(torch.arange(256) % 2 == 0, 0, 15)
    weight = NF4Weight((codes[:, ::2] << 4 | codes[:, 1::2]).view(-1), torch.rand(256) + 0.1, (128, 128))
    assert same(quantize_nf4(weight.dequantize(), double=False), weight)


@SHAPES
def test_quantizing_again_changes_nothing(shape: tuple[int, int]) -> None:
    weight = quantize_nf4(torch.randn(shape), double=False)
    assert same(quantize_nf4(weight.dequantize(), double=False), weight)
    doubly = quantize_nf4(torch.randn(shape))
    again = quantize_nf4(doubly.dequantize(), double=False)
    assert torch.equal(again.codes, doubly.codes) and torch.equal(again.absmax, doubly.block_scales())


def test_nf4_error_of_a_weight() -> None:
    """At most half the widest gap of the table, in units of the block's absmax."""
    weight = torch.cat((torch.linspace(-1, 1, 4096), 3 * torch.randn(4096))).view(64, 128)
    error = (quantize_nf4(weight, double=False).dequantize() - weight).view(-1, 64).abs()
    widest = max(b - a for a, b in pairwise(NF4_TABLE))
    assert widest / 2 == pytest.approx(0.1519, abs=1e-4)
    assert bool((error <= (widest / 2 + 1e-6) * weight.view(-1, 64).abs().amax(-1, keepdim=True)).all())


@pytest.mark.parametrize(
    ("quantize", "expected"),
    [
        (QUANTIZERS["nf4 single"], 0.0919),
        (QUANTIZERS["nf4"], 0.0920),
        (lambda w: quantize_int4(w, group=64), 0.1077),
    ],
)
def test_error_on_gaussian_weights(quantize: Callable[[Tensor], QuantizedWeight], expected: float) -> None:
    weight = 0.02 * torch.randn(2048, 1024)
    tolerance = 3e-4 if expected < 0.1 else 0.012  # the scale of int4 is absmax/7.5, not absmax/7
    assert relative_rms(quantize(weight).dequantize(), weight) == pytest.approx(expected, abs=tolerance)


def test_nf4_codes_of_gaussian_weights_are_not_equally_common() -> None:
    """Scaling by the largest of 64 takes the tails: the published shares are 1.7 to 9.3 %."""
    codes = quantize_nf4(torch.randn(2048, 1024), double=False).elements()
    shares = torch.bincount(codes.flatten().long(), minlength=16) / codes.numel()
    assert [shares.min().item(), shares.max().item()] == pytest.approx([0.017, 0.093], abs=1e-3)


def test_dynamic_table() -> None:
    """256 rising values; 2^i in the decade 10^(i−6), each sign, and 0 and 1."""
    table = dynamic_table(CPU).tolist()
    assert len(table) == 256 and table == sorted(set(table))
    assert table[0] == pytest.approx(-0.99296875) and table[-1] == 1.0 and table[127] == 0.0
    for i in range(7):
        decade = [v for v in table if 10 ** (i - 7) < v < 10 ** (i - 6)]
        assert len(decade) == 2**i
        assert decade[0] == pytest.approx(10 ** (i - 6) * (0.1 + 0.45 / 2**i), rel=1e-6)


def test_int4_by_hand() -> None:
    """−7.5 and 7.5 reach the ends; half-way values round to even; the last group is shorter."""
    weight = torch.tensor([[7.5, -7.5, 0.5, 1.5, -0.5, 3.0, 0.0, 0.0], [0.0] * 4 + [15.0, 1.0, 2.0, 3.5]])
    quantized = quantize_int4(weight, group=4)
    assert quantized.scales.tolist() == [[1.0, pytest.approx(0.4)], [1.0, 2.0]]
    assert (quantized.elements().int() - 8).tolist() == [[7, -8, 0, 2, -1, 7, 0, 0], [0, 0, 0, 0, 7, 0, 1, 2]]
    assert quantized.codes[0, 0] == 15 | 0 << 4
    asymmetric = quantize_int4(torch.tensor([[-3.0, 12.0, 0.0, 4.6, 2.0]]), group=4, symmetric=False)
    assert asymmetric.zeros is not None and asymmetric.zeros.tolist() == [[3, 0]]
    assert asymmetric.elements().tolist() == [[0, 15, 3, 8, 15]]
    assert asymmetric.dequantize()[0].tolist() == pytest.approx([-3.0, 12.0, 0.0, 5.0, 2.0])


def test_groups_from_minima_by_hand() -> None:
    """w = code · scale + minimum: no zero beside it, codes of 8 bits signed."""
    scales, minima = torch.tensor([[0.5, 2.0]]).half(), torch.tensor([[-1.0, 3.0]]).half()
    four = Int4Weight(torch.tensor([[15 << 4, 8 | 1 << 4]], dtype=torch.uint8), scales, (1, 4), 2, minima=minima)
    assert four.dequantize().tolist() == [[-1.0, 6.5, 19.0, 5.0]]
    eight = Int8Weight(torch.tensor([[0, 31, -1, 127]], dtype=torch.int8), scales, 2, minima=minima)
    assert eight.dequantize().tolist() == [[-1.0, 14.5, 1.0, 257.0]]
    assert quantize_int8(torch.tensor([[127.5, -3.0, 255.0, 2.0]]), group=2).scales.tolist() == [[1.0, 2.0]]


def test_int4_decodes_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    values = Int4Weight(codes, torch.tensor([[0.5]]), (1, 512), 512).dequantize().view(256, 2)
    assert values.tolist() == [[((b & 15) - 8) / 2, ((b >> 4) - 8) / 2] for b in range(256)]


def test_int6_by_hand() -> None:
    """−31.5 and 31.5 reach the ends; element 35 is the fourth of a second block, which is filled up."""
    weight = torch.zeros(1, 36)
    weight[0, :3], weight[0, 17], weight[0, 35] = torch.tensor([31.5, -31.5, 2.5]), 5.0, -31.5
    quantized = quantize_int6(weight, group=36)
    levels = quantized.elements().int()[0] - 32
    assert quantized.scales.tolist() == [[1.0]] and quantized.codes.shape == (1, 48)
    assert levels[:3].tolist() == [31, -32, 2] and levels[17] == 5 and levels[35] == -32 and not levels[3:17].any()
    codes = torch.zeros(1, 24, dtype=torch.uint8)
    codes[0, 1], codes[0, 16 + 1] = 0x3A, 0b11_00_01_10  # of elements 1 and 17; of 1, 9, 17 and 25
    whole = Int6Weight(codes, torch.tensor([[0.5]]), (1, 32), 32, torch.tensor([[5]], dtype=torch.uint8))
    expected = dict.fromkeys(range(32), 0) | {1: 0x2A, 9: 0x10, 17: 0x03, 25: 0x30}
    assert whole.elements()[0].tolist() == list(expected.values())
    assert whole.dequantize()[0].tolist() == [(level - 5) / 2 for level in expected.values()]


def test_int8_and_fp8_by_hand() -> None:
    weight = torch.tensor([[127.5, -127.5, 0.5, 1.5, -3.4], [0.0] * 5])
    int8 = quantize_int8(weight)
    assert int8.codes.tolist() == [[127, -128, 0, 2, -3], [0] * 5]
    assert int8.scales.tolist() == [[1.0], [1.0]]
    fp8 = quantize_fp8(torch.tensor([[-448.0, 440.0, 17.0, 2**-9, 2**-11]]))
    assert fp8.scales.tolist() == [1.0]
    assert fp8.dequantize().tolist() == [[-448.0, 448.0, 16.0, 2**-9, 0.0]]


@ALL
@SHAPES
def test_dequantizes_in_any_dtype_and_by_rows(
    quantize: Callable[[Tensor], QuantizedWeight], shape: tuple[int, int]
) -> None:
    weight = quantize(torch.randn(shape))
    wide = weight.dequantize()
    assert wide.dtype == torch.float32 and wide.shape == shape
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(weight.dequantize(dtype), wide.to(dtype))
    for start, stop in ((0, 1), (1, 3), (shape[0] - 1, shape[0]), (2, 2)):
        assert torch.equal(weight.dequantize(rows=slice(start, stop)), wide[start:stop])


@ALL
def test_zeros_stay_zeros(quantize: Callable[[Tensor], QuantizedWeight]) -> None:
    assert not quantize(torch.zeros(3, 130)).dequantize().any()


@ALL
def test_error_is_bounded_by_the_step(quantize: Callable[[Tensor], QuantizedWeight]) -> None:
    """A comparison with the largest weight of a row; every format has at least 15 steps."""
    weight = torch.randn(50, 96)
    error = (quantize(weight).dequantize() - weight).abs().amax(-1)
    assert bool((error <= 0.16 * weight.abs().max()).all())
    assert relative_rms(quantize(weight).dequantize(), weight) < 0.12


def test_refuses_what_is_not_a_matrix_of_floats() -> None:
    for wrong in (torch.zeros(3), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(0, 4)):
        with pytest.raises(ValueError, match="only a matrix of floats"):
            quantize_nf4(wrong)
    with pytest.raises(ValueError, match="at least one element"):
        quantize_int4(torch.zeros(3, 4), group=0)


def test_bits_a_weight() -> None:
    """4.127 with double quantization, 4.5 without."""
    weight = torch.randn(1024, 1024)
    for double, expected in ((True, 4 + 8 / 64 + 32 / (64 * 256)), (False, 4.5)):
        quantized = quantize_nf4(weight, double=double)
        tensors = [quantized.codes, quantized.absmax, quantized.nested_absmax]
        bits = sum(8 * t.numel() * t.element_size() for t in tensors if t is not None) / weight.numel()
        assert math.isclose(bits, expected)


@pytest.mark.parametrize(("double", "rows"), [(True, (64, 128, 7)), (False, (1, 5, 3))])
def test_stacked_nf4_holds_the_bits_of_its_parts(double: bool, rows: tuple[int, ...]) -> None:
    parts = [quantize_nf4(torch.randn(n, 256) * n, double=double) for n in rows]
    stacked = stack_nf4(parts)
    assert stacked is not None and stacked.shape == (sum(rows), 256)
    expected = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(stacked.dequantize(), expected)
    assert torch.equal(stacked.dequantize(rows=slice(1, sum(rows) - 1)), expected[1:-1])


def test_nf4_does_not_stack_where_a_block_would_hold_parts_of_two() -> None:
    def stack(*shapes: tuple[int, int], double: bool) -> NF4Weight | None:
        return stack_nf4([quantize_nf4(torch.randn(shape), double=double) for shape in shapes])

    assert stack((3, 32), (2, 32), double=False) is None
    assert stack((2, 32), (3, 32), double=False) is not None
    assert stack((63, 256), (64, 256), double=True) is None
    mixed = [quantize_nf4(torch.randn(64, 256), double=double) for double in (True, False)]
    assert stack_nf4(mixed) is None
