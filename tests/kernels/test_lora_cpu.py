"""Adapters of a few bf16 rows in C on the CPU: each row against fp64, its bits whatever is beside it."""

import pytest
import torch
from torch import Tensor

import kernels.linear._lora_cpu as module
from kernels.linear.lora import LoraWeights, lora_add, lora_reference
from tests.compare import check_close
from tests.kernels.adapters import double, make_slots, make_weights, rows

pytestmark = pytest.mark.skipif(module._library() is None, reason="no C compiler, or a processor without AVX-512 BF16")

CPU = torch.device("cpu")
# (S, R, K, N): none, one and several of what fits a register, and what is left over.
SHAPES = pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 16, 64, 48), (3, 5, 37, 70), (2, 67, 1100, 33), (4, 48, 576, 960)], ids=str
)
Shape = tuple[int, int, int, int]


def make(shape: Shape, tokens: int) -> tuple[Tensor, Tensor, LoraWeights]:
    """y, x and adapters, bf16."""
    y, x = (rows(CPU, tokens, width, dtype=torch.bfloat16) for width in (shape[3], shape[2]))
    return y, x, make_weights(CPU, shape, torch.bfloat16)


@SHAPES
def test_rows_against_fp64_and_alone(shape: Shape) -> None:
    y, x, weights = make(shape, 32)
    slots = make_slots(CPU, 32, shape[0])
    for of_row in (slots, None):
        assert module.takes(x)
        every = lora_add(y, x, weights, of_row)
        check_close(every, lora_reference(y.double(), x.double(), double(weights), of_row))
        for row in range(32):
            own = None if of_row is None else of_row[row : row + 1]
            assert torch.equal(lora_add(y[row : row + 1], x[row : row + 1], weights, own)[0], every[row])


@SHAPES
def test_agrees_with_torch(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    y, x, weights = make(shape, 9)
    slots = make_slots(CPU, 9, shape[0])
    in_c = lora_add(torch.zeros_like(y), x, weights, slots)
    monkeypatch.setattr(module, "takes", lambda x: False)
    check_close(lora_add(torch.zeros_like(y), x, weights, slots), in_c.double())


def test_more_rows_than_are_taken_at_once() -> None:
    """The C function itself has no such limit."""
    y, x, weights = make((3, 20, 70, 50), 75)
    slots = make_slots(CPU, 75, 3)
    result = module.add_adapters(y, x, weights.a, weights.b, weights.scales, slots)
    check_close(result, lora_reference(y.double(), x.double(), double(weights), slots))


def test_threads_change_no_bit() -> None:
    y, x, weights = make((3, 20, 300, 200), 9)
    slots, before = make_slots(CPU, 9, 3), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(lora_add(y, x, weights, slots))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_and_slots_with_gaps_in_memory() -> None:
    y, x, weights = make((3, 5, 37, 70), 8)
    slots = make_slots(CPU, 8, 3)
    expected = lora_add(y, x, weights, slots)
    beside = [torch.cat((part, part), 1)[:, : part.shape[1]] for part in (y, x)]
    apart = [torch.stack((part, part), -1)[..., 0] for part in (y, x)]
    for spread_y, spread_x in (beside, apart):
        assert torch.equal(lora_add(spread_y, spread_x, weights, torch.stack((slots, slots), -1)[:, 0]), expected)


def test_what_is_not_finite_stays_with_its_row_and_adapter() -> None:
    y, x, weights = make((3, 17, 70, 50), 16)
    slots = make_slots(CPU, 16, 3)
    weights.a[1], weights.b[1] = torch.inf, torch.inf
    x[slots < 0], x[1], y[2] = torch.nan, torch.nan, torch.inf
    result = lora_add(y, x, weights, slots)
    fine = (slots != 1) & (torch.arange(16) != 1) & (torch.arange(16) != 2)
    assert result[fine].isfinite().all()
    assert torch.equal(result[slots < 0], y[slots < 0])
    assert not result[slots == 1].isfinite().any()


def test_no_rows_and_unknown_adapters() -> None:
    y, x, weights = make((2, 5, 37, 70), 4)
    assert lora_add(y[:0], x[:0], weights, make_slots(CPU, 4, 2)[:0]).shape == (0, 70)
    with pytest.raises(ValueError, match="name adapter 2; there are 2"):
        lora_add(y, x, weights, torch.full((4,), 2, dtype=torch.int32))
    below = torch.full((4,), -7, dtype=torch.int32)
    assert torch.equal(lora_add(y, x, weights, below), y)
