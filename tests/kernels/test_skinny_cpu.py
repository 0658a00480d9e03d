"""Skinny products in C on the CPU against fp64 products with the dequantized weight, and its rows to the bit."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.linear._skinny_cpu as products
from kernels.common.processor import processor_features
from kernels.linear._quantized_cpu import shares_codes
from kernels.linear._skinny_cpu import SkinnyWeight, expanded_rows, multiplies, prepare_skinny, skinny_product
from kernels.linear._turned_cpu import TurnedWeight
from kernels.linear.quantization import (
    Fp8Weight,
    Int8Weight,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int6,
    quantize_int8,
    quantize_nf4,
)
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from tests.compare import check_close
from tests.kernels.integers import from_minima, in_halves

HAS_AMX = "amx_bf16" in processor_features()
DTYPES = [dtype for dtype in (torch.bfloat16, torch.float32) if multiplies(dtype)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="no C compiler, or a processor without AVX2")
EACH = pytest.mark.parametrize("dtype", DTYPES, ids=str)

QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": lambda w: quantize_nf4(w, double=False),
    "int4": quantize_int4,
    "int4 asymmetric": lambda w: quantize_int4(w, group=32, symmetric=False),
    "int4 in groups that do not divide a row": lambda w: quantize_int4(w, group=96, symmetric=False),
    "int4 from minima": from_minima,
    "int6": quantize_int6,
    "int6 asymmetric": lambda w: quantize_int6(w, group=96, symmetric=False),
    "int8": quantize_int8,
    "int8 in groups": lambda w: in_halves(quantize_int8(w, group=32)),
    "int8 in sixteens": lambda w: quantize_int8(w, group=16),
    "fp8": quantize_fp8,
}
ALL = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)
Quantize = Callable[[Tensor], QuantizedWeight]


@pytest.fixture(params=["for fewer lanes", "for more lanes"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both C forms of fp32 rows, whichever this processor is given, where it can run them."""
    if request.param == "for fewer lanes":
        monkeypatch.setattr(products, "_library_of_outputs", lambda: None)
    elif products._library_of_outputs() is None:
        pytest.skip("the processor has no AVX-512")


def prepared(weight: QuantizedWeight) -> SkinnyWeight:
    result = prepare_skinny(weight)
    assert result is not None
    return result


def fewest_alike(weight: SkinnyWeight, dtype: torch.dtype) -> int:
    """So many rows, and more, have the same bits in any company: the registers of AMX do not multiply fewer."""
    if dtype == torch.float32 or not isinstance(weight.held, TurnedWeight) or not HAS_AMX:
        return 1
    return 5 if getattr(weight.held.rest, "group", 0) == 16 else 2


def with_random_codes(weight: QuantizedWeight) -> QuantizedWeight:
    codes = torch.randint(0, 256, weight.codes.shape, dtype=torch.uint8)
    if isinstance(weight, Fp8Weight):
        codes[(codes & 127) == 127] = 0  # NaN: no weight has it
    weight.codes.view(torch.uint8).copy_(codes)
    return weight


@ALL
@pytest.mark.parametrize("shape", [(64, 256), (7, 64), (1, 192), (130, 1088)], ids=str)
def test_rows_are_the_dequantized_ones_to_the_bit(quantize: Quantize, shape: tuple[int, int]) -> None:
    weight = with_random_codes(quantize(0.05 * torch.randn(shape)))
    for rows in (slice(0, shape[0]), slice(shape[0] // 3, shape[0] // 2)):
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(expanded_rows(prepared(weight), dtype, rows), weight.dequantize(dtype, rows))


@pytest.mark.usefixtures("form")
@ALL
@EACH
@pytest.mark.parametrize("n", [1, 2, 3, 4, 65])
def test_products_of_any_number_of_rows(quantize: Quantize, n: int, dtype: torch.dtype) -> None:
    """Each row alone against fp64, and the same bits whatever up to 32 rows are beside it; with AMX few have others."""
    weight = with_random_codes(quantize(torch.randn(n, 320)))
    x = torch.randn(33, 320).to(dtype)
    expected = x.double() @ weight.dequantize(torch.float64).t()
    check_close(skinny_product(x, prepared(weight)), expected)
    every = skinny_product(x[:32], prepared(weight))
    for rows in range(32):
        y = skinny_product(x[:rows], prepared(weight))
        assert y.shape == (rows, n)
        if rows < fewest_alike(prepared(weight), dtype):
            check_close(y, expected[:rows])
        else:
            assert torch.equal(y, every[:rows])


@pytest.mark.usefixtures("form")
@ALL
@EACH
def test_threads_change_no_bit(quantize: Quantize, dtype: torch.dtype) -> None:
    weight, x = prepared(quantize(torch.randn(100, 512))), torch.randn(9, 512).to(dtype)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 2, 5):
            torch.set_num_threads(threads)
            results.append((skinny_product(x, weight), expanded_rows(weight, dtype, slice(0, 100))))
    finally:
        torch.set_num_threads(before)
    for product, rows in results[1:]:
        assert torch.equal(product, results[0][0]) and torch.equal(rows, results[0][1])


@pytest.mark.usefixtures("form")
@ALL
@EACH
def test_zeros_outliers_and_what_is_not_finite_keep_to_their_row(quantize: Quantize, dtype: torch.dtype) -> None:
    weight, x = quantize(0.01 * torch.randn(96, 4096)), torch.randn(6, 4096).to(dtype)
    x[1, 17], x[2], x[3], x[4, 5], x[5, 6] = 1e4, 0, 1e30, torch.inf, torch.nan
    y, expected = skinny_product(x, prepared(weight)), x.double() @ weight.dequantize(torch.float64).t()
    for row in (0, 1, 3):
        check_close(y[row], expected[row])
    assert not y[2].any()
    assert not y[4:].isfinite().any()


def test_the_largest_scales() -> None:
    codes = torch.tensor([[127, -128] * 32], dtype=torch.int8)
    for weight in (
        Int8Weight(codes, torch.tensor([[1e36]]), 64),
        Fp8Weight(torch.full((1, 64), 448).to(torch.float8_e4m3fn), torch.tensor([7e35])),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(expanded_rows(prepared(weight), dtype, slice(0, 1)), weight.dequantize(dtype))


TURNED = {name: make for name, make in QUANTIZERS.items() if name.startswith("int")}
turns = pytest.mark.skipif(products._library_of_pairs() is None, reason="weights are turned only for AVX-512 BF16")


@turns
@pytest.mark.parametrize("quantize", TURNED.values(), ids=TURNED)
@pytest.mark.parametrize("shape", [(64, 256), (7, 64), (1, 192), (130, 1088)], ids=str)
def test_turned_weights_are_the_same_numbers(quantize: Quantize, shape: tuple[int, int]) -> None:
    weight = with_random_codes(quantize(torch.randn(shape)))
    held = prepared(weight).held
    assert isinstance(held, TurnedWeight) and held.shape == weight.shape
    assert torch.equal(held.codes, weight.codes) and held.codes.dtype == weight.codes.dtype
    for name in weight.__dataclass_fields__:
        stored, expected = getattr(held.stored(), name), getattr(weight, name)
        assert torch.equal(stored, expected) if isinstance(expected, torch.Tensor) else stored == expected
    for rows in (slice(None), slice(shape[0] // 3, shape[0] // 2), torch.tensor([shape[0] - 1, 0, 0])):
        assert torch.equal(held.dequantize(torch.bfloat16, rows), weight.dequantize(torch.bfloat16, rows))


@turns
@pytest.mark.parametrize("quantize", TURNED.values(), ids=TURNED)
@pytest.mark.parametrize("n", [1, 49, 200])
def test_many_rows_of_bf16_are_multiplied_with_a_weight_in_bf16(quantize: Quantize, n: int) -> None:
    """The products of chunks of rows, in fp32: of more than 32, with AMX of more than 128."""
    weight, x = with_random_codes(quantize(torch.randn(n, 320))), torch.randn(1100, 320).bfloat16()
    y, expected = skinny_product(x, prepared(weight)), x.double() @ weight.dequantize(torch.bfloat16).double().t()
    check_close(y, expected)
    for rows in (129, 130, 257, 1030) if HAS_AMX else (33, 40, 257, 1030):
        assert torch.equal(skinny_product(x[:rows], prepared(weight)), y[:rows])


@ALL
@EACH
def test_codes_are_held_once_and_prepared_weights_are_copied_whole(quantize: Quantize, dtype: torch.dtype) -> None:
    weight, x = quantize(torch.randn(32, 128)), torch.randn(3, 128).to(dtype)
    ready = prepare_quantized_weight(weight)
    assert ready.packed is None and shares_codes(ready) == (ready.held.codes.data_ptr() == weight.codes.data_ptr())
    other, expected = copy.deepcopy(ready), quantized_linear(x, ready)
    weight.codes.view(torch.uint8).zero_()
    assert torch.equal(quantized_linear(x, other), expected)


@ALL
@EACH
def test_weights_whose_memory_has_gaps(quantize: Quantize, dtype: torch.dtype) -> None:
    weight, x = quantize(torch.randn(24, 256)), torch.randn(5, 256).to(dtype)
    twice = torch.zeros(*weight.codes.shape, 2, dtype=weight.codes.dtype)
    twice[..., 0] = weight.codes
    spread = dataclasses.replace(weight, codes=twice[..., 0])
    assert torch.equal(skinny_product(x, prepared(spread)), skinny_product(x, prepared(weight)))


@pytest.mark.parametrize("shape", [(70, 130), (33, 7), (40, 48)], ids=str)
def test_shapes_that_do_not_fit_go_elsewhere(shape: tuple[int, int]) -> None:
    x = torch.randn(5, shape[1]).bfloat16()
    for quantize in QUANTIZERS.values():
        weight = quantize(torch.randn(shape))
        assert prepare_skinny(weight) is None
        y = quantized_linear(x, prepare_quantized_weight(weight))
        check_close(y, x.double() @ weight.dequantize(torch.float64).t())
    for quantize in (quantize_int4, quantize_int8):
        assert prepare_skinny(quantize(torch.randn(4, 128), group=8)) is None
    assert prepare_skinny(dataclasses.replace(quantize_fp8(torch.randn(4, 128)), scales=torch.ones(4).half())) is None


def test_shares_torchs_threads() -> None:
    """A second OpenMP library would bring threads of its own, which wait for work while torch's work."""
    maps = Path("/proc/self/maps").read_text().split()
    assert len({name for name in maps if "libgomp" in name}) == 1
