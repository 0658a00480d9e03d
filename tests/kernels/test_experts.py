"""Products of all experts in one launch against fp64 products of each token with each of its experts' weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.linear.dense import PreparedWeight
from kernels.linear.experts import arrange_rows, expert_products, expert_products_reference, stack_experts
from kernels.linear.quantized import prepare_quantized_weight
from tests.compare import check_close
from tests.kernels.test_quantized_linear import ALL, DTYPES, QUANTIZERS, Quantize, rows, weight_of

E, PER_TOKEN = 5, 2


def choices(device: torch.device, tokens: int) -> Tensor:
    """Two experts a token; nobody chooses the fourth, and most choose the first."""
    scores = torch.rand(tokens, E) + torch.tensor([1.0, 0, 0, -9.0, 0])
    return scores.topk(PER_TOKEN).indices.to(device)


def check(x: Tensor, dense: list[Tensor], prepared: list, chosen: Tensor) -> None:
    """Of tokens, and of rows that already lie as the experts want them."""
    stacked = stack_experts(prepared)
    assert stacked is not None
    arranged = arrange_rows(chosen, E, x.dtype)
    y = expert_products(x, stacked, arranged)
    assert y.dtype == x.dtype
    expected = expert_products_reference(x.double(), [one.double() for one in dense], chosen)
    check_close(y[arranged.back], expected)
    again = expert_products(x[arranged.sources.long()], stacked, arranged)
    assert torch.equal(again, y)


@pytest.mark.covering
@ALL
@DTYPES
def test_every_format_and_dtype(device: torch.device, quantize: Quantize, dtype: torch.dtype) -> None:
    weights = [weight_of(device, quantize, 72, 128) for _ in range(E)]
    prepared = [prepare_quantized_weight(weight) for weight in weights]
    x = rows(device, 9, 128, dtype=dtype)
    check(x, [weight.dequantize(torch.float32) for weight in weights], prepared, choices(device, 9))


@DTYPES
@pytest.mark.parametrize("shape", [(72, 128), (37, 70)], ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_dense_weights(device: torch.device, dtype: torch.dtype, shape: tuple[int, int], tokens: int) -> None:
    dense = [rows(device, *shape, dtype=dtype) for _ in range(E)]
    check(
        rows(device, tokens, shape[1], dtype=dtype),
        dense,
        [PreparedWeight(one) for one in dense],
        choices(device, tokens),
    )


def test_tokens_that_are_not_neighbours_and_none(device: torch.device) -> None:
    dense = [rows(device, 40, 64) for _ in range(E)]
    prepared = [PreparedWeight(one) for one in dense]
    check(rows(device, 6, 128)[::2, :64], dense, prepared, choices(device, 3))
    check(rows(device, 0, 64), dense, prepared, choices(device, 0))


def test_parts_lie_in_the_same_memory(device: torch.device) -> None:
    dense = stack_experts([PreparedWeight(rows(device, 8, 16)) for _ in range(E)])
    weights = [prepare_quantized_weight(weight_of(device, QUANTIZERS["nf4"], 72, 256)) for _ in range(E)]
    tiled = stack_experts(weights)
    assert dense is not None and tiled is not None
    part = dense[2]
    part.write(slice(0, 8), torch.ones(8, 16, device=device))
    assert (dense.stacked[2] == 1).all() and not (dense.stacked[1] == 1).any()
    for number, weight in enumerate(weights):
        assert torch.equal(tiled[number].words, weight.words) and torch.equal(tiled[number].scales, weight.scales)
    assert tiled[3].words.data_ptr() == tiled.stacked.words[3].data_ptr()


def test_weights_that_are_not_alike_stay_apart(device: torch.device) -> None:
    one, other = (prepare_quantized_weight(weight_of(device, QUANTIZERS["int4"], 72, k)) for k in (128, 256))
    assert stack_experts([one, other]) is None
    assert stack_experts([one, PreparedWeight(rows(device, 72, 128))]) is None
    assert stack_experts([one, replace(one, zero=0)]) is None
    assert stack_experts([PreparedWeight(rows(device, 8, n)) for n in (16, 24)]) is None


def test_what_does_not_fit_is_an_error(device: torch.device) -> None:
    stacked = stack_experts([PreparedWeight(rows(device, 8, 16)) for _ in range(E)])
    arranged = arrange_rows(choices(device, 3), E, torch.float32)
    assert stacked is not None
    with pytest.raises(ValueError, match=r"^x must be \[3 or 6, 16\] for weights \[8, 16\], not \[4, 16\]$"):
        expert_products(rows(device, 4, 16), stacked, arranged)


def test_the_cpu_keeps_its_own_forms() -> None:
    cpu = torch.device("cpu")
    assert stack_experts([PreparedWeight(rows(cpu, 8, 16)) for _ in range(2)]) is None
    assert stack_experts([prepare_quantized_weight(QUANTIZERS["int4"](rows(cpu, 8, 128)))] * 2) is None
