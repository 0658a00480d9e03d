"""Rows of quantized weights, and products of rounded activations, against their definitions."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels.linear._rounded_cpu as integers
from kernels.common.processor import processor_features
from kernels.linear._quantized_tiles import tile_weight
from kernels.linear._rounded_cpu import has_vnni, library_of, source_for, takes
from kernels.linear._skinny_cpu import multiplies, prepare_skinny
from kernels.linear.quantization import (
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    integer_weight,
    quantize_fp8,
    quantize_int4,
    quantize_int6,
    quantize_int8,
    quantize_nf4,
)
from kernels.linear.quantized import prepare_quantized_weight
from kernels.linear.quantized_embedding import quantized_embedding, quantized_embedding_reference
from kernels.linear.rounded import Rounding, _multiplies_codes, round_activations, rounded_linear
from tests.compare import check_close
from tests.kernels.test_quantized_linear import to

QUANTIZERS = {
    "int4": lambda w: quantize_int4(w, group=32, symmetric=False),
    "int4 fine": lambda w: quantize_int4(w, group=8),
    "int6": lambda w: quantize_int6(w, group=32, symmetric=False),
    "int8": quantize_int8,
    "fp8": quantize_fp8,
}


def check_rows(name: str, weight: Tensor, *dtypes: torch.dtype) -> None:
    quantized, tokens = QUANTIZERS[name](weight), torch.tensor([3, 0, 3, 39, 7], device=weight.device)
    for dtype in dtypes:
        rows = quantized_embedding(tokens, prepare_quantized_weight(quantized), dtype)
        assert rows.dtype == dtype and torch.equal(rows, quantized_embedding_reference(tokens, quantized, dtype))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("columns", [64, 40])
def test_rows_are_those_of_the_weight(name: str, columns: int, device: torch.device) -> None:
    """In fp32: the interpreter cuts off where a GPU rounds to bf16."""
    check_rows(name, torch.randn(40, columns).to(device), torch.float32)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_rows_on_the_cpu(name: str) -> None:
    check_rows(name, torch.randn(40, 64), torch.float32, torch.bfloat16)


@pytest.mark.skipif(not multiplies(torch.float32), reason="rows are expanded in C where that compiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_is_not_there_is_no_number(dtype: torch.dtype) -> None:
    weight = prepare_quantized_weight(quantize_int8(torch.randn(40, 64)))
    rows = quantized_embedding(torch.tensor([39, 40, -1, 0]), weight, dtype)
    assert rows.isnan().all(dim=1).tolist() == [False, True, True, False]


def test_blocks_across_rows_hold_no_embedding() -> None:
    with pytest.raises(ValueError, match="NF4 run across rows"):
        quantized_embedding(
            torch.tensor([0]), prepare_quantized_weight(quantize_nf4(torch.randn(4, 64))), torch.float32
        )


def test_int8_activations_by_hand() -> None:
    x = torch.tensor([[127.5, -127.5, 0.4, 0.5, 1.5, -2.6], [0.0] * 6])
    q, scales = round_activations(x, Rounding(torch.int8))
    assert q[0].tolist() == [127, -128, 0, 0, 2, -3] and scales[0].item() == 1
    assert not q[1].any() and bool((scales > 0).all())


def test_fp8_activations_by_hand() -> None:
    """e4m3 between 16 and 32 has steps of 2; ties go to the even one."""
    q, scales = round_activations(
        torch.tensor([[448.0, -448.0, 17.0, 19.0, 0.3, 0.0009]]), Rounding(torch.float8_e4m3fn)
    )
    assert scales.item() == 1 and q[0].tolist() == [448, -448, 16, 20, 0.3125, 0]


def rounded(x: Tensor, rounding: Rounding) -> Tensor:
    """s · q in fp64."""
    q, scales = round_activations(x, rounding)
    return (q.double().unflatten(-1, (scales.shape[1], -1)) * scales.double()[..., None]).flatten(1)


@pytest.mark.parametrize("rounding", [Rounding(torch.int8), Rounding(torch.int8, 32), Rounding(torch.float8_e4m3fn)])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
def test_products_and_gradients(rounding: Rounding, of: torch.dtype) -> None:
    """With or without gradients the same bits; the gradient is that of the product without rounding."""
    weight, bias = quantize_int8(torch.randn(48, 64)), torch.randn(48).to(of)
    prepared, x = prepare_quantized_weight(weight), (3 * torch.randn(5, 64)).to(of)
    y = rounded_linear(x, prepared, bias, rounding)
    check_close(y, rounded(x, rounding) @ weight.dequantize(torch.float64).t() + bias)
    leaf = x.clone().requires_grad_()
    learned = rounded_linear(leaf, prepared, bias, rounding)
    assert torch.equal(learned.detach(), y)
    grad = torch.randn_like(y)
    (actual,) = torch.autograd.grad(learned, leaf, grad)
    check_close(actual, grad.double() @ weight.dequantize(torch.float64))


@pytest.mark.parametrize("shape", [(48, 64), (41, 200), (130, 70)], ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_many_rows_multiply_integers_exactly(device: torch.device, shape: tuple[int, int], narrow: bool) -> None:
    """All scales are 1."""
    lowest = -127 if narrow else -128
    codes = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    weight = prepare_quantized_weight(Int8Weight(codes, torch.ones(shape[0], 1, device=device), shape[1]))
    x = torch.randint(-127, 128, (131, shape[1]), device=device).float()
    x[:, 0] = 127 if narrow else -127.5  # s is 1
    y = rounded_linear(x, weight, None, Rounding(torch.int8, narrow=narrow))
    assert torch.equal(y.long().cpu(), x.round().clamp(min=lowest).long().cpu() @ codes.long().t().cpu())


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("of", [torch.float32, torch.float16], ids=str)
def test_many_rows_multiply_codes(device: torch.device, format: str, of: torch.dtype) -> None:
    """With or without gradients the same bits, by one kernel; the gradient is that of the product without rounding."""
    rounding = Rounding(torch.int8 if format == "int8" else torch.float8_e4m3fn)
    weight, bias = QUANTIZERS[format](torch.randn(48, 200)), torch.randn(48).to(of).to(device)
    prepared = prepare_quantized_weight(to(weight, device))
    x = (3 * torch.randn(131, 200)).to(of).to(device)
    y = rounded_linear(x, prepared, bias, rounding)
    expected = rounded(x, rounding) @ weight.dequantize(torch.float64).to(device).t()
    check_close(y, expected + bias)
    leaf = x.clone().requires_grad_()
    learned = rounded_linear(leaf, prepared, bias, rounding)
    assert torch.equal(learned.detach(), y)
    grad = torch.randn_like(y)
    (actual,) = torch.autograd.grad(learned, leaf, grad)
    check_close(actual, grad.double() @ weight.dequantize(torch.float64).to(device))


def test_codes_are_multiplied_where_both_sides_are_such_codes(device: torch.device) -> None:
    def takes_codes(weight: QuantizedWeight, rounding: Rounding, rows: int = 129) -> bool:
        return _multiplies_codes(torch.empty(rows, 64), tile_weight(to(weight, device)), rounding)

    w, eights, floats = torch.randn(8, 64), Rounding(torch.int8), Rounding(torch.float8_e4m3fn)
    assert takes_codes(quantize_int8(w), eights) and takes_codes(quantize_fp8(w), floats)
    assert not takes_codes(quantize_int8(w), eights, 128)
    assert not takes_codes(quantize_int8(w), floats) and not takes_codes(quantize_fp8(w), eights)
    assert not takes_codes(quantize_int8(w, group=32), eights) and not takes_codes(quantize_int4(w), eights)
    assert not takes_codes(quantize_int8(w), Rounding(torch.int8, 32))


def from_minima(weight: Tensor) -> Int4Weight:
    """Groups of 32 with fp16 minima, as in Q4_1."""
    source = quantize_int4(weight, group=32, symmetric=False)
    minima = -source.zeros.float() * source.scales
    return replace(source, scales=source.scales.half(), zeros=None, minima=minima.half())


def in_halves(weight: Int8Weight) -> Int8Weight:
    return replace(weight, scales=weight.scales.half())


INTEGERS = QUANTIZERS | {
    "int4 of 32": lambda w: quantize_int4(w, group=32),
    "int4 of 64": lambda w: quantize_int4(w, group=64),
    "int4 in groups that do not divide a row": lambda w: quantize_int4(w, group=128, symmetric=False),
    "int4 rows": lambda w: quantize_int4(w, group=w.shape[1]),
    "int4 with zeros": lambda w: quantize_int4(w + 0.5, group=64, symmetric=False),
    "int4 from minima": from_minima,
    "int6 of 64": quantize_int6,
    "int6 with zeros": lambda w: quantize_int6(w + 0.5, group=64, symmetric=False),
    "int6 in groups that do not divide a row": lambda w: quantize_int6(w, group=128, symmetric=False),
    "int8 of 32 in halves": lambda w: in_halves(quantize_int8(w, group=32)),
    "int8 of 64": lambda w: quantize_int8(w, group=64),
}


ZEN = frozenset({"avx2", "fma", "f16c"})
VNNI = ZEN | {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}


@pytest.fixture(params=["_rounded.c", "_rounded_lanes.c"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both C forms, whichever this processor is given, where it can run them; without a compiler torch's."""
    if request.param == source_for(VNNI) and not has_vnni(processor_features()):
        pytest.skip("the processor has no AVX-512 VNNI")
    library = library_of(request.param)
    monkeypatch.setattr(integers, "_library", lambda: library)


def test_each_processor_has_its_form() -> None:
    for lesser in (ZEN, VNNI - {"avx512_vnni"}, VNNI - {"avx512bw"}):
        assert source_for(lesser) == "_rounded_lanes.c"
    assert source_for(VNNI) == "_rounded.c"


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("group", [32, 64, None])
def test_integers_multiply_as_their_values_do(name: str, group: int | None) -> None:
    """Whether C takes them or not; 41 and 5 outputs are no multiple of anything."""
    weight, rounding = INTEGERS[name](torch.randn(41 if group else 5, 192)), Rounding(torch.int8, group)
    for rows in (0, 1, 2, 3, 4, 9):
        x = torch.randn(rows, 192)
        y = rounded_linear(x, prepare_quantized_weight(weight), None, rounding)
        expected = rounded(x, rounding) @ weight.dequantize(torch.float32).double().t()
        assert torch.allclose(y.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", INTEGERS)
def test_rows_of_bf16_are_those_of_fp32_rounded_at_the_end(name: str) -> None:
    """To the bit: nothing between is rounded."""
    weight = prepare_quantized_weight(INTEGERS[name](torch.randn(41, 192)))
    if not integers.takes(weight.skinny, 32):
        pytest.skip("not multiplied as integers")
    for rows in (1, 3, 9):
        wide = torch.randn(rows, 400).bfloat16()[:, 100:292]
        y = integers.rounded_product(wide, weight.skinny, 32)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, integers.rounded_product(wide.float(), weight.skinny, 32).bfloat16())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_integer_products_are_exact(bits: int) -> None:
    """Of the largest numbers, and of any below 2^24."""
    levels = torch.randint(0, 1 << bits, (40, 256), dtype=torch.uint8)
    levels[0], levels[1] = 0, (1 << bits) - 1
    weight = integer_weight(levels, torch.ones(40, 4), bits=bits, group=64)
    x = torch.randint(-127, 128, (6, 256)).float()
    x[:, ::32] = -127.5  # s is 1; rounds to −128
    x[0], x[1] = -127.5, 127.5
    q = x.round().clamp(-128, 127)
    y = rounded_linear(x, prepare_quantized_weight(weight), None, Rounding(torch.int8, 32))
    assert torch.equal(y.double(), q.double() @ weight.dequantize(torch.float64).t())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", ["int4 of 32", "int4 with zeros", "int4 from minima", "int6", "int8"])
def test_a_row_has_the_same_bits_beside_any(name: str) -> None:
    weight = prepare_quantized_weight(INTEGERS[name](torch.randn(70, 192)))
    x, rounding = torch.randn(130, 192), Rounding(torch.int8, 32)
    together = rounded_linear(x, weight, None, rounding)
    for rows in (1, 2, 3, 4, 7):
        parts = [rounded_linear(part, weight, None, rounding) for part in x.split(rows)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", ["int4 of 64", "int8"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf], ids=str)
def test_what_is_no_number_is_not_rounded_away(name: str, wrong: float) -> None:
    x = torch.randn(2, 192)
    x[1, 70] = wrong
    y = rounded_linear(x, prepare_quantized_weight(INTEGERS[name](torch.randn(8, 192))), None, Rounding(torch.int8, 32))
    assert y[0].isfinite().all() and not y[1].isfinite().any()


def test_c_multiplies_what_it_is_for() -> None:
    """Where it compiles: else all of this runs in torch, and proves nothing of it."""
    if not multiplies(torch.float32):
        pytest.skip("the processor has no AVX2, or there is no compiler")
    names = {name for name, make in INTEGERS.items() if takes(prepare_skinny(make(torch.randn(8, 192))), 32)}
    assert names == INTEGERS.keys() - {"int4 fine", "fp8"}
