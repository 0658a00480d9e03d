"""Rows of quantized weights, and products of rounded activations, against their definitions."""

import pytest
import torch
from torch import Tensor

from kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from kernels.linear.quantized import prepare_quantized_weight
from kernels.linear.quantized_embedding import quantized_embedding, quantized_embedding_reference
from kernels.linear.rounded import round_activations, rounded_linear
from tests.compare import check_close

QUANTIZERS = {
    "int4": lambda w: quantize_int4(w, group=32, symmetric=False),
    "int4 fine": lambda w: quantize_int4(w, group=8),
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


def test_blocks_across_rows_hold_no_embedding() -> None:
    with pytest.raises(ValueError, match="NF4 run across rows"):
        quantized_embedding(
            torch.tensor([0]), prepare_quantized_weight(quantize_nf4(torch.randn(4, 64))), torch.float32
        )


def test_int8_activations_by_hand() -> None:
    x = torch.tensor([[127.5, -127.5, 0.4, 0.5, 1.5, -2.6], [0.0] * 6])
    q, scales = round_activations(x, torch.int8)
    assert q[0].tolist() == [127, -128, 0, 0, 2, -3] and scales[0].item() == 1
    assert not q[1].any() and bool((scales > 0).all())


def test_fp8_activations_by_hand() -> None:
    """e4m3 between 16 and 32 has steps of 2; ties go to the even one."""
    q, scales = round_activations(torch.tensor([[448.0, -448.0, 17.0, 19.0, 0.3, 0.0009]]), torch.float8_e4m3fn)
    assert scales.item() == 1 and q[0].tolist() == [448, -448, 16, 20, 0.3125, 0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
def test_products_and_gradients(dtype: torch.dtype, of: torch.dtype) -> None:
    """With or without gradients the same bits; the gradient is that of the product without rounding."""
    weight, bias = quantize_int8(torch.randn(48, 64)), torch.randn(48).to(of)
    prepared, x = prepare_quantized_weight(weight), (3 * torch.randn(5, 64)).to(of)
    q, scales = round_activations(x, dtype)
    y = rounded_linear(x, prepared, bias, dtype)
    check_close(y, q.double() * scales.double() @ weight.dequantize(torch.float64).t() + bias)
    leaf = x.clone().requires_grad_()
    learned = rounded_linear(leaf, prepared, bias, dtype)
    assert torch.equal(learned.detach(), y)
    grad = torch.randn_like(y)
    (actual,) = torch.autograd.grad(learned, leaf, grad)
    check_close(actual, grad.double() @ weight.dequantize(torch.float64))
