"""Grids of integers: against the kernels' own quantization, brute force, and what must never get worse."""

import pytest
import torch
from torch import Tensor

import compress.quantize.grid as grid_module
from compress.quantize.grid import Grid, covered, diagonal_blocks, min_max, searched
from kernels.linear.quantization import quantize_int4, quantize_int8
from tests.compress.quantizing import Scheme, correlated_inputs


def random_weight(rows: int = 8, columns: int = 96, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def weighted_error(weight: Tensor, grid: Grid, importance: Tensor) -> Tensor:
    """Of each group, [N, G]."""
    errors = (weight - grid.values(grid.levels(weight))).square() * importance
    return errors.view(len(weight), -1, grid.group).sum(-1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 40, 96])
def test_min_max_in_4_bits_is_what_the_kernels_quantize(group: int, symmetric: bool) -> None:
    """To the bit, a shorter last group included."""
    weight = random_weight()
    expected = quantize_int4(weight, group=group, symmetric=symmetric)
    grid = min_max(weight, Scheme(4, group, symmetric))
    assert torch.equal(grid.scales, expected.scales)
    assert torch.equal(grid.levels(weight), expected.elements())
    assert torch.equal(grid.values(grid.levels(weight)), expected.dequantize())
    assert torch.equal(covered(weight, Scheme(4, group, symmetric)), expected.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_min_max_in_8_bits_is_what_the_kernels_quantize(dtype: torch.dtype) -> None:
    weight = random_weight().to(dtype)
    expected = quantize_int8(weight)
    grid = min_max(weight, Scheme(8, None), dtype)
    assert torch.equal(grid.scales, expected.scales)
    assert torch.equal(grid.levels(weight).int() - 128, expected.codes.int())
    assert torch.equal(grid.values(grid.levels(weight)), expected.dequantize())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_searching_never_costs_more_than_covering(bits: int, symmetric: bool) -> None:
    weight, scheme = random_weight(), Scheme(bits, 32, symmetric)
    importance = torch.rand(96, generator=torch.Generator().manual_seed(3)).square() + 1e-3
    covering, found = min_max(weight, scheme), searched(weight, scheme, importance)
    before, after = (weighted_error(weight, grid, importance) for grid in (covering, found))
    assert (after <= before).all() and after.sum() < (0.85 if bits == 4 else 1) * before.sum()


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_found_scale_is_near_the_best_of_all(symmetric: bool) -> None:
    """Of 300 scales, with every zero, for each group."""
    weight, scheme = random_weight(rows=4), Scheme(4, 32, symmetric)
    importance = torch.rand(96, generator=torch.Generator().manual_seed(3)) + 0.1
    least = torch.full((4, 3), torch.inf)
    for zero in [8] if symmetric else range(16):
        zeros = None if symmetric else torch.full((4, 3), zero, dtype=torch.uint8)
        for scale in torch.linspace(5e-3, 0.03, 300).tolist():
            grid = Grid(torch.full((4, 3), scale), zeros, 16, 32)
            least = torch.minimum(least, weighted_error(weight, grid, importance))
    found = weighted_error(weight, searched(weight, scheme, importance), importance)
    assert found.sum() < 1.08 * least.sum()


def test_the_blocks_of_h_decide_what_the_diagonal_cannot_see() -> None:
    """Inputs that go together: the error of outputs, by H itself, is less than with its diagonal alone."""
    weight, scheme = random_weight(rows=64, columns=64), Scheme(4, 32)
    x = correlated_inputs(512, 64, seed=1)
    hessian = x.T @ x
    errors = []
    for moments in (hessian.diagonal(), diagonal_blocks(hessian, 32)):
        grid = searched(weight, scheme, moments)
        difference = (weight - grid.values(grid.levels(weight))).view(64, 2, 32)
        inputs = x.view(-1, 2, 32)
        errors.append(float(torch.einsum("tgi,ngi->tng", inputs, difference).square().sum()))
    assert errors[1] < 0.9 * errors[0]


def test_diagonal_blocks_are_cut_out_and_filled_up() -> None:
    hessian = torch.arange(25.0).view(5, 5)
    blocks = diagonal_blocks(hessian, 3)
    assert torch.equal(blocks[0], hessian[:3, :3]) and torch.equal(blocks[1, :2, :2], hessian[3:, 3:])
    assert not blocks[1, 2].any() and not blocks[1, :, 2].any()


def test_scales_are_numbers_of_the_dtype_that_stores_them() -> None:
    weight = random_weight()
    for grid in (
        min_max(weight, Scheme(4, 32), torch.bfloat16),
        searched(weight, Scheme(4, 32), torch.ones(96), torch.bfloat16),
    ):
        assert torch.equal(grid.scales, grid.scales.bfloat16().float())


def test_a_matrix_in_pieces_gets_the_same_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(rows=11)
    whole = searched(weight, Scheme(4, 32, False), torch.ones(96))
    monkeypatch.setattr(grid_module, "_PIECE_ELEMENTS", 200)
    pieces = searched(weight, Scheme(4, 32, False), torch.ones(96))
    assert whole.zeros is not None and pieces.zeros is not None
    assert torch.equal(whole.scales, pieces.scales) and torch.equal(whole.zeros, pieces.zeros)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_stays_zero(symmetric: bool) -> None:
    weight = random_weight()
    weight[2, 32:64] = 0
    for grid in (min_max(weight, Scheme(4, 32, symmetric)), searched(weight, Scheme(4, 32, symmetric), torch.ones(96))):
        assert grid.scales[2, 1] == 1 and not grid.values(grid.levels(weight))[2, 32:64].any()


def test_inputs_that_never_come_decide_nothing() -> None:
    """A group whose importance is zero keeps the grid that covers it."""
    weight, importance = random_weight(), torch.ones(96)
    importance[:32] = 0
    found, covering = searched(weight, Scheme(4, 32), importance), min_max(weight, Scheme(4, 32))
    assert torch.equal(found.scales[:, 0], covering.scales[:, 0])
    assert not torch.equal(found.scales[:, 1], covering.scales[:, 1])
