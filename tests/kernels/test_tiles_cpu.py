"""Products by AMX against fp64 products with the dequantized weight; only where the processor has it."""

import logging

import pytest
import torch
from torch import Tensor

import kernels.linear._tiles_cpu as module
from kernels.linear._rounded_cpu import rounded_rows
from kernels.linear._skinny_cpu import skinny_product
from kernels.linear._tiles_cpu import has_tiles, tiled_product
from kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_nf4
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from kernels.linear.rounded import Rounding, round_activations, rounded_linear
from tests.compare import check_close
from tests.kernels.test_skinny_cpu import QUANTIZERS, TURNED, Quantize, fewest_alike, prepared, with_random_codes

pytestmark = pytest.mark.skipif(not has_tiles(torch.zeros(2, 64).bfloat16()), reason="no C compiler or no AMX")
AS_STORED = {name: make for name, make in QUANTIZERS.items() if name not in TURNED}
ALL = pytest.mark.parametrize("quantize", AS_STORED.values(), ids=AS_STORED)


def inputs(rows: int, k: int) -> Tensor:
    return torch.randn(rows, k).bfloat16()


@ALL
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 130])
def test_products_of_any_number_of_rows(quantize: Quantize, n: int) -> None:
    """The bits of a row do not depend on the rows beside it."""
    weight, x = with_random_codes(quantize(torch.randn(n, 320))), inputs(70, 320)
    every = tiled_product(x, prepared(weight))
    check_close(every, x.double() @ weight.dequantize(torch.float64).t())
    for rows in (0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65):
        y = tiled_product(x[:rows], prepared(weight))
        assert y.shape == (rows, n) and torch.equal(y, every[:rows])


@pytest.mark.parametrize("quantize", TURNED.values(), ids=TURNED)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 130])
def test_products_with_turned_weights_of_any_number_of_rows(quantize: Quantize, n: int) -> None:
    """The same from a few rows on; also with groups of no whole step, which become bf16 first."""
    weight, x = with_random_codes(quantize(torch.randn(n, 320))), inputs(128, 320)
    every = skinny_product(x, prepared(weight))
    check_close(every, x.double() @ weight.dequantize(torch.float64).t())
    for rows in (0, fewest_alike(prepared(weight), x.dtype), 15, 16, 17, 31, 32, 33, 48, 64, 65, 127):
        y = skinny_product(x[:rows], prepared(weight))
        assert y.shape == (rows, n) and torch.equal(y, every[:rows])


def test_more_rows_than_the_cache_holds_and_rows_that_lie_apart() -> None:
    weight, x = quantize_nf4(torch.randn(48, 4096), double=False), inputs(400, 8192)[:, ::2][:, :4096]
    y = tiled_product(x, prepared(weight))
    check_close(y, x.double() @ weight.dequantize(torch.float64).t())
    part = inputs(150, 4160)[:, :4096]
    assert torch.equal(tiled_product(part, prepared(weight)), tiled_product(part.clone(), prepared(weight)))


def test_threads_change_no_bit() -> None:
    weight, x, before = prepared(quantize_fp8(torch.randn(100, 512))), inputs(50, 512), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(tiled_product(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@ALL
def test_zeros_outliers_and_what_is_not_finite_keep_to_their_row(quantize: Quantize) -> None:
    weight, x = quantize(0.01 * torch.randn(96, 1024)), inputs(6, 1024)
    x[1, 17], x[2], x[3], x[4, 5], x[5, 6] = 1e4, 0, 1e30, torch.inf, torch.nan
    y, expected = tiled_product(x, prepared(weight)), x.double() @ weight.dequantize(torch.float64).t()
    for row in (0, 1, 3):
        check_close(y[row], expected[row])
    assert not y[2].any()
    assert not y[4:].isfinite().any()


def test_in_turns_with_onednn_which_has_shapes_of_its_own_for_the_registers() -> None:
    weight, x = torch.randn(64, 256).bfloat16(), inputs(40, 256)
    quantized, packed = quantize_fp8(weight.float()), torch.ops.mkldnn._reorder_linear_weight(weight)

    def linear(x: Tensor, packed: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")

    ours, theirs = tiled_product(x, prepared(quantized)), linear(x, packed)
    for _ in range(3):
        assert torch.equal(tiled_product(x, prepared(quantized)), ours) and torch.equal(linear(x, packed), theirs)


def test_quantized_layers_use_them_with_a_bias() -> None:
    weight, x, bias = quantize_fp8(torch.randn(40, 128)), inputs(9, 128), torch.randn(40).bfloat16()
    y = quantized_linear(x, prepare_quantized_weight(weight), bias)
    assert torch.equal(y, tiled_product(x, prepared(weight)) + bias)


@pytest.mark.parametrize("rows", [5, 12])
@pytest.mark.parametrize("group", [32, 64, 192])
def test_rows_that_are_rounded(group: int, rows: int) -> None:
    """s · q to the bit, and its product, by tiles where rows are many; NaN and infinity spoil their row alone."""
    x, rounding = 3 * inputs(rows, 192), Rounding(torch.int8, group)
    q, scales = round_activations(x, rounding)
    expected = (q.float().unflatten(-1, (-1, group)) * scales[..., None]).flatten(1).bfloat16()
    assert torch.equal(rounded_rows(x, group), expected)
    weight = quantize_int4(torch.randn(40, 192))
    y = rounded_linear(x, prepare_quantized_weight(weight), None, rounding)
    check_close(y, expected.double() @ weight.dequantize(torch.float64).t())
    x[1, 3], x[2, 4] = torch.nan, torch.inf
    broken = rounded_linear(x, prepare_quantized_weight(weight), None, rounding)
    assert torch.equal(broken[0], y[0]) and torch.equal(broken[3:], y[3:]) and not broken[1:3].isfinite().any()


def test_a_system_that_refuses_the_registers_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def permit_tiles(self) -> int:
            return 1

    monkeypatch.setattr(module, "compiled", lambda source, needs: Refusing())
    module._library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, module.__name__):
            assert not has_tiles(inputs(4, 64)) and not has_tiles(inputs(4, 64))
        assert caplog.text.count("does not permit") == 1
    finally:
        module._library.cache_clear()
