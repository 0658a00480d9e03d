"""All experts of a layer in one call of C against one expert after the other: the same bits."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.common.cpu_graph import CpuGraph, GraphMemory
from kernels.geglu import geglu
from kernels.linear._quantized_cpu import quantized_c_product
from kernels.linear.c_product import CProduct
from kernels.linear.dense import PreparedWeight, dense_c_product, linear, prepare_linear_weight
from kernels.linear.experts_on_cpu import ExpertsOnCpu
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from kernels.linear.rounded import Rounding, rounded_linear, rounded_linear_c_product
from kernels.swiglu import swiglu
from tests.kernels.test_quantized_linear import ALL, QUANTIZERS, Quantize

E, PER_TOKEN, D, NEURONS = 6, 3, 128, 192
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
INT4 = QUANTIZERS["int4"]


ROUNDINGS = {"rows": Rounding(torch.int8), "groups of 32": Rounding(torch.int8, group=32)}
Prepared = list[list[object]]
"""Of each expert, its weights."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def mlps(quantize: Quantize, shapes: Sequence[tuple[int, int]] = ((2 * NEURONS, D), (D, NEURONS))) -> Prepared:
    """Weights of these shapes."""
    return [[prepare_quantized_weight(quantize(torch.randn(shape) / 8)) for shape in shapes] for _ in range(E)]


def rows(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs, and what they choose: nobody the fourth expert, all but a few the first."""
    scores = torch.rand(tokens, E) + torch.tensor([1.0, 0, 0, -9.0, 0, 0])
    return torch.randn(tokens, D).to(dtype), scores.topk(PER_TOKEN).indices


def one_after_the_other(
    experts: Prepared,
    x: Tensor,
    chosen: Tensor,
    *,
    uses_gelu: bool = False,
    product: Callable[..., Tensor] = quantized_linear,
) -> Tensor:
    y = x.new_full((*chosen.shape, D), torch.nan)
    for number, (*gate_up, down) in enumerate(experts):
        tokens, places = (chosen == number).nonzero(as_tuple=True)
        if len(tokens):
            made = [product(x[tokens], weight) for weight in gate_up]
            gate, up = made if len(made) > 1 else made[0].chunk(2, dim=1)
            y[tokens, places] = product((geglu if uses_gelu else swiglu)(gate, up), down)
    return y


def together(
    experts: Prepared,
    dtype: torch.dtype,
    *,
    uses_gelu: bool = False,
    c_product: Callable[..., CProduct | None] = quantized_c_product,
) -> ExpertsOnCpu:
    products = [[c_product(weight, dtype) for weight in mine] for mine in experts]
    found = [[product for product in mine if product is not None] for mine in products]
    if found != products:
        pytest.skip("C has no products with these weights on this processor")
    return ExpertsOnCpu(found, dtype, uses_gelu=uses_gelu)


@BOTH
@ALL
@pytest.mark.parametrize("tokens", [1, 9, 32])
def test_every_format(quantize: Quantize, dtype: torch.dtype, tokens: int) -> None:
    experts = mlps(quantize)
    made, (x, chosen) = together(experts, dtype), rows(tokens, dtype)
    assert made.takes(x)
    assert torch.equal(made(x, chosen), one_after_the_other(experts, x, chosen))


@BOTH
@pytest.mark.parametrize("tokens", [1, 9, 32])
def test_dense_weights(dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.linear.dense._SMALLEST_FP32_WEIGHT_TO_PREPARE", 1)
    shapes = (2 * NEURONS, D), (D, NEURONS)
    numbers = [[(torch.randn(shape) / 8).bfloat16().to(dtype) for shape in shapes] for _ in range(E)]
    experts = [[prepare_linear_weight(weight) for weight in mine] for mine in numbers]
    made, (x, chosen) = together(experts, dtype, c_product=dense_c_product), rows(tokens, dtype)
    assert torch.equal(made(x, chosen), one_after_the_other(experts, x, chosen, product=linear))


@BOTH
@pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=ROUNDINGS)
@pytest.mark.parametrize("name", ["int4", "int6", "int8 in groups"])
def test_rounded_inputs(name: str, rounding: Rounding, dtype: torch.dtype) -> None:
    experts = mlps(QUANTIZERS[name])
    product = partial(rounded_linear, bias=None, rounding=rounding)
    made = together(experts, dtype, c_product=lambda w, dtype: rounded_linear_c_product(w, rounding, dtype))
    for tokens in (1, 9):
        x, chosen = rows(tokens, dtype)
        assert made.takes(x)
        assert torch.equal(made(x, chosen), one_after_the_other(experts, x, chosen, product=product))


@BOTH
def test_gelu_and_gate_and_up_apart(dtype: torch.dtype) -> None:
    for shapes in (((2 * NEURONS, D), (D, NEURONS)), ((NEURONS, D), (NEURONS, D), (D, NEURONS))):
        experts = mlps(INT4, shapes)
        made, (x, chosen) = together(experts, dtype, uses_gelu=True), rows(5, dtype)
        assert torch.equal(made(x, chosen), one_after_the_other(experts, x, chosen, uses_gelu=True))


@BOTH
def test_rows_that_are_not_neighbours_and_two_threads(dtype: torch.dtype) -> None:
    experts = mlps(INT4)
    made, (x, chosen) = together(experts, dtype), rows(7, dtype)
    wide = torch.cat((x, torch.full_like(x, torch.nan)), dim=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(made(wide[:, :D], chosen.t().contiguous().t()), one_after_the_other(experts, x, chosen))
        assert torch.equal(made(x.t().contiguous().t(), chosen), one_after_the_other(experts, x, chosen))
    finally:
        torch.set_num_threads(threads)


def test_a_replay_computes_what_is_chosen_then() -> None:
    experts = mlps(INT4)
    made, (x, chosen) = together(experts, torch.float32), rows(5, torch.float32)
    graph = CpuGraph(GraphMemory())
    with graph.capture():
        y = made(x, chosen)
    for _ in range(2):
        others = rows(5, torch.float32)
        x.copy_(others[0])
        chosen.copy_(others[1])
        graph.replay()
        assert torch.equal(y, one_after_the_other(experts, x, chosen))


def test_what_c_does_not_multiply() -> None:
    assert dense_c_product(PreparedWeight(torch.randn(8, 64)), torch.float32) is None
    (int4, _), *_ = mlps(INT4)
    assert quantized_c_product(int4, torch.float16) is None
    assert quantized_c_product(torch.randn(8, 64), torch.float32) is None
    assert rounded_linear_c_product(int4, ROUNDINGS["rows"], torch.float16) is None
    assert rounded_linear_c_product(int4, Rounding(torch.float8_e4m3fn), torch.float32) is None
    made = together(mlps(INT4), torch.float32)
    assert not made.takes(torch.zeros(2, D, dtype=torch.bfloat16))
    assert not made.takes(torch.zeros(4096, D))
    assert not made.takes(torch.zeros(0, D))
