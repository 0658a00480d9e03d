"""LoRA for several adapters in one batch: on the CPU and in Triton, against fp64 and itself with other neighbours."""

import pytest
import torch
from torch import Tensor

from kernels.linear.lora import LoraWeights, lora_add, lora_reference
from tests.compare import check_all_close, check_close
from tests.kernels.adapters import DTYPES, double, make_slots, make_weights, rows

# (S, R, K, N): ranks and sizes of several tiles, and none that tiles divide.
SHAPES = pytest.mark.parametrize("shape", [(3, 5, 37, 70), (2, 16, 128, 64), (4, 67, 1100, 33), (1, 1, 3, 1)], ids=str)


def make_rows(
    device: torch.device | str, tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """y and x."""
    return rows(device, tokens, shape[3], dtype=dtype), rows(device, tokens, shape[2], dtype=dtype)


def check(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor | None) -> None:
    """What is added, not the sum that might hide it; rows without an adapter to the bit."""
    before = y.clone()
    result = lora_add(y, x, weights, slots)
    assert result.dtype == y.dtype
    assert torch.equal(y, before)
    expected = lora_reference(y.double(), x.double(), double(weights), slots)
    check_close(result, expected)
    if slots is not None:
        assert torch.equal(result[slots < 0].view(torch.uint8), y[slots < 0].view(torch.uint8))


def check_everything(device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype, tokens: int) -> None:
    weights = make_weights(device, shape, dtype)
    y, x = make_rows(device, tokens, shape, dtype)
    for slots in (make_slots(device, tokens, shape[0]), None, torch.full((tokens,), -1).int().to(device)):
        check(y, x, weights, slots)
        check(torch.zeros_like(y), x, weights, slots)


@DTYPES
@SHAPES
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_on_the_cpu(shape: tuple[int, int, int, int], dtype: torch.dtype, tokens: int) -> None:
    check_everything(torch.device("cpu"), shape, dtype, tokens)


@pytest.mark.covering
@DTYPES
@SHAPES
def test_in_triton(device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    for tokens in (1, 18):
        check_everything(device, shape, dtype, tokens)


@pytest.mark.parametrize("tokens", [0, 64, 70])
def test_many_rows_in_triton(device: torch.device, tokens: int) -> None:
    check_everything(device, (3, 20, 600, 130), torch.bfloat16, tokens)


def test_minus_zero_stays(device: torch.device) -> None:
    y = torch.full((3, 2), -0.0, device=device)
    slots = torch.tensor([0, -1, 0], dtype=torch.int32, device=device)
    result = lora_add(y, torch.ones(3, 4, device=device), make_weights(device, (1, 1, 4, 2)), slots)
    assert result[1].signbit().all()


@DTYPES
def test_a_row_keeps_its_bits_whatever_is_beside_it(device: torch.device, dtype: torch.dtype) -> None:
    """Other neighbours with other adapters. (Other places too, but only on a GPU: numpy's products have none of it.)"""
    shape = (3, 20, 1100, 40)
    weights, slots = make_weights(device, shape, dtype), make_slots(device, 33, 3)
    (y, x), (other_y, other_x) = (make_rows(device, 33, shape, dtype) for _ in range(2))
    kept = torch.rand(33, device=device) < 0.5
    whole = lora_add(y, x, weights, slots)
    beside = make_slots(device, 33, 3)
    beside[kept], other_y[kept], other_x[kept] = slots[kept], y[kept], x[kept]
    assert torch.equal(lora_add(other_y, other_x, weights, beside)[kept], whole[kept])


def test_bad_numbers_stay_with_their_adapter(device: torch.device) -> None:
    """Infinite weights, and rows of NaN, spoil no row of another adapter."""
    shape = (3, 5, 37, 70)
    weights, slots = make_weights(device, shape), make_slots(device, 16, 3)
    y, x = make_rows(device, 16, shape)
    weights.a[1], weights.b[1] = torch.inf, torch.inf
    x[slots < 0], x[1] = torch.nan, torch.nan
    result = lora_add(y, x, weights, slots)
    fine = (slots != 1) & (torch.arange(16, device=device) != 1)
    assert result[fine].isfinite().all()


def test_rows_need_not_be_neighbours(device: torch.device) -> None:
    shape = (3, 5, 37, 70)
    weights, slots = make_weights(device, shape), make_slots(device, 8, 3)
    y, x = (torch.cat((part, part), 1)[::2] for part in make_rows(device, 16, shape))
    check(y[:, :70], x[:, :37], weights, slots)
    check(y[:, 70:], x[:, 37:], weights, slots)


def test_slots_beyond_the_table_count_as_none_in_triton(device: torch.device) -> None:
    shape = (2, 5, 37, 70)
    weights, slots = make_weights(device, shape), torch.tensor([0, 2, 1, 100, -5], dtype=torch.int32, device=device)
    y, x = make_rows(device, 5, shape)
    changed = (lora_add(y, x, weights, slots) != y).any(1)
    assert changed.tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_gradients(device: torch.device, tokens: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_gradients(device, tokens, dtype)


def test_gradients_on_the_cpu() -> None:
    check_gradients(torch.device("cpu"), 9, torch.bfloat16)
    weights = make_weights("cpu", (1, 3, 5, 4), torch.float64)
    y, x = make_rows("cpu", 6, (1, 3, 5, 4), torch.float64)
    inputs = tuple(t.requires_grad_() for t in (y, x, weights.a, weights.b))

    def add(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_add(y, x, LoraWeights(a, b, weights.scales), None)

    assert torch.autograd.gradcheck(add, inputs)


def check_gradients(device: torch.device, tokens: int, dtype: torch.dtype) -> None:
    shape = (1, 20, 140, 70)
    weights, (y, x) = make_weights(device, shape, dtype), make_rows(device, tokens, shape, dtype)
    inputs = [t.requires_grad_() for t in (y, x, weights.a, weights.b)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    result = lora_add(y, x, weights, None)
    expected = lora_reference(wide[0], wide[1], LoraWeights(wide[2], wide[3], weights.scales), None)
    check_close(result.detach(), expected.detach())
    grad = torch.randn_like(result)
    actual = torch.autograd.grad(result, inputs, grad)
    assert all(one.dtype == dtype for one in actual)
    check_all_close(actual, torch.autograd.grad(expected, wide, grad.double()))


def test_refuses_what_does_not_fit() -> None:
    shape = (2, 5, 37, 70)
    weights, slots = make_weights("cpu", shape), make_slots("cpu", 4, 2)
    y, x = make_rows("cpu", 4, shape)
    wrong = {
        "do not fit": {"x": x[:, :36]},
        r"do not fit torch.float64 rows \[4, 37\] and 70": {"x": x.double()},
        "do not fit .* 69 outputs": {"y": y[:, :69]},
        r"y must be torch.float32 \[4, 70\]": {"y": y[:3]},
        r"slots must be int32 \[4\]": {"slots": slots.long()},
        "name adapter 2; there are 2": {"slots": torch.full_like(slots, 2)},
        "only one adapter can be trained": {"y": y.clone().requires_grad_()},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            lora_add(**({"y": y, "x": x, "weights": weights, "slots": slots} | change))
    a, b, scales = weights.a, weights.b, weights.scales
    for message, parts in {
        "a \\[S, R, K\\] and b \\[S, N, R\\]": (a, b[:, :, :4], scales),
        "S and R of at least 1": (a[:, :0], b[:, :, :0], scales),
        "one dtype": (a.bfloat16(), b, scales),
        "be contiguous": (a[:, :, ::2], b, scales),
        r"scales of adapters must be float32 \[2\]": (a, b, scales[:1]),
    }.items():
        with pytest.raises(ValueError, match=message):
            LoraWeights(*parts)


def test_programs_share_the_adapters_of_a_tile(device: torch.device) -> None:
    """A tile with more adapters than programs take apart: one takes several, one after another."""
    shape = (40, 4, 40, 20)
    weights = make_weights(device, shape)
    y, x = make_rows(device, 40, shape)
    check(y, x, weights, (torch.arange(40, device=device) * 7 % 41 - 1).int())
