from copy import deepcopy

import pytest
import torch
from torch import Tensor

import kernels.linear._pairs_cpu as pairs
from kernels.linear._skinny_cpu import SkinnyWeight, multiplies
from kernels.linear.dense import (
    linear,
    linear_in_fp32,
    linear_reference,
    prepare_head_weight,
    prepare_linear_weight,
)
from tests.compare import check_close

SHAPES = pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(0, 64, 48), (1, 7, 5), (1, 640, 512), (9, 513, 700)]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


@SHAPES
@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_equals_the_reference(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype, has_bias: bool, prepared: bool
) -> None:
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    result = linear(x, prepare_linear_weight(weight) if prepared else weight, bias)
    assert result.dtype == dtype
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    check_close(result, expected)


@DTYPES
def test_prepared_weight_takes_strided_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(6, 1300).to(dtype)[::2, ::2], torch.randn(800, 650).to(dtype)
    check_close(linear(x, prepare_linear_weight(weight)), linear_reference(x.double(), weight.double()))


@DTYPES
def test_preparing_copies_strided_weights(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 650).to(dtype), torch.randn(650, 800).to(dtype).t()
    check_close(linear(x, prepare_linear_weight(weight)), linear_reference(x.double(), weight.double()))


@pytest.mark.parametrize("inputs", [640, 650], ids=["in C", "where C does not fit"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp32_products_with_numbers_of_bf16(inputs: int, has_bias: bool) -> None:
    """Within the rounding of fp32 sums, far below that of bf16, at few rows and at many."""
    weight, bias = torch.randn(500, inputs).bfloat16().float(), torch.randn(500) if has_bias else None
    prepared = prepare_linear_weight(weight)
    for rows in (1, 2, 3, 5, 8, 9, 17, 32, 33, 70):
        x = torch.randn(rows, inputs)
        expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
        assert (linear(x, prepared, bias) - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.skipif(not multiplies(torch.float32), reason="C has no products of fp32 here")
def test_numbers_of_bf16_take_half_the_memory_and_keep_their_bits() -> None:
    weight = torch.randn(512, 640).bfloat16().float()
    prepared, identity = prepare_linear_weight(weight), torch.eye(640)
    assert isinstance(prepared.held, SkinnyWeight) and prepared.held.held.nbytes == weight.nbytes // 2
    assert torch.equal(linear(identity, prepared).t(), weight)
    x = torch.randn(8, 640)
    for rows in (1, 3, 8):
        assert torch.equal(linear(x[:rows], prepared), linear(x, prepared)[:rows])  # a row does not see the others


@pytest.mark.parametrize("number", [1.0 + 2**-8, 2.0**-149, 3.0e38], ids=str)
def test_one_number_that_bf16_does_not_hold_is_kept(number: float) -> None:
    weight = torch.zeros(512, 640)
    weight[300, 7] = number
    assert linear(torch.eye(640)[7:8], prepare_linear_weight(weight))[0, 300] == weight[300, 7]


def test_writing_rows() -> None:
    """Numbers of bf16 stay in bf16, others become fp32, and go back."""
    whole, x = torch.randn(512, 640).bfloat16().float(), torch.randn(3, 640)
    prepared = prepare_linear_weight(whole)
    for values in (torch.randn(100, 640).bfloat16(), torch.randn(100, 640), torch.zeros(100, 640)):
        whole[50:150] = values
        prepared.write(slice(50, 150), values)
        assert prepared.shape == (512, 640)
        check_close(linear(x, prepared), linear_reference(x.double(), whole.double()))


@pytest.mark.skipif(pairs._library() is None, reason="no C compiler, or a processor without AVX-512 BF16")
def test_bf16_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has the same numbers, and so has a row in any company, on any number of threads; rows can be written."""
    whole, x, bias = torch.randn(500, 640).bfloat16(), torch.randn(1100, 640).bfloat16(), torch.randn(500).bfloat16()
    prepared = deepcopy(prepare_linear_weight(whole))
    assert isinstance(prepared.held, pairs.PairedWeight) and prepared.shape == (500, 640)
    assert prepared.held.panels.nbytes == 528 * 640 * 2  # whole panels of 48
    assert torch.equal(linear(torch.eye(640).bfloat16(), prepared).t(), whole)
    expected = linear(x, prepared, bias)
    check_close(expected, linear_reference(x.double(), whole.double(), bias.double()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33, 48, 49, 64, 65, 257, 1030):
        assert torch.equal(linear(x[:rows], prepared, bias), expected[:rows])
    whole[50:150] = 1
    prepared.write(slice(50, 150), whole[50:150])
    check_close(linear(x, prepared), linear_reference(x.double(), whole.double()))


@pytest.mark.skipif(pairs._library() is None, reason="no C compiler, or a processor without AVX-512 BF16")
def test_bf16_in_panels_of_a_number_of_inputs_that_no_tile_has() -> None:
    whole, x = torch.randn(70, 84).bfloat16(), torch.randn(40, 84).bfloat16()
    expected = linear_reference(x.double(), whole.double())
    for rows in (1, 16, 40):
        check_close(linear(x[:rows], prepare_linear_weight(whole)), expected[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(500, 640), (70, 84), (5, 7)], ids=str)
def test_sums_in_fp32(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Within the rounding of fp32 sums where C multiplies; whoever rounds them has what `linear` returns."""
    weight, x = torch.randn(shape).to(dtype), torch.randn(300, shape[1]).to(dtype)
    prepared, in_pairs = prepare_head_weight(weight), pairs.multiplies_pairs() and not shape[1] % 2
    in_c = dtype == torch.bfloat16 and (in_pairs or not isinstance(prepared.held, Tensor))
    for rows in (0, 1, 2, 8, 9, 33, 300):
        for given in (prepared, weight):
            sums, expected = linear_in_fp32(x[:rows], given), linear_reference(x[:rows].double(), weight.double())
            assert sums.dtype == torch.float32
            check_close(sums.to(dtype), expected)
            if given is prepared and rows and (in_c or dtype == torch.float32):
                assert (sums - expected).abs().max() <= 2e-5 * expected.abs().max()
            if given is prepared and dtype == torch.bfloat16 and in_pairs:
                assert torch.equal(sums.bfloat16(), linear(x[:rows], prepared))


@pytest.mark.skipif(not multiplies(torch.float32), reason="C has no products of fp32 here")
def test_sums_in_fp32_where_there_are_no_products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_library", lambda: None)
    weight, x = torch.randn(500, 640).bfloat16(), torch.randn(40, 640).bfloat16()
    prepared, expected = prepare_head_weight(weight), linear_reference(x.double(), weight.double())
    assert isinstance(prepared.held, SkinnyWeight)
    for rows in (1, 40):
        assert (linear_in_fp32(x[:rows], prepared) - expected[:rows]).abs().max() <= 2e-5 * expected.abs().max()


def test_sums_in_fp32_have_gradients() -> None:
    x, weight = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(4, 8).bfloat16().requires_grad_()
    linear_in_fp32(x, weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad[0], x.grad[1]) and weight.grad is not None


def test_gradients() -> None:
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (4, 5), (4,)))
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
