"""GPTQ: against rounding, the textbook's elimination in fp64, and the error of outputs."""

import pytest
import torch
from torch import Tensor

from compress.quantize.gptq import compensation, inverse_factor, output_error
from compress.quantize.gptq import gptq_levels as levels_with
from compress.quantize.grid import Grid, min_max
from tests.compress.quantizing import Scheme, correlated_inputs


def a_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error_of(weight: Tensor, hessian: Tensor, grid: Grid, levels: Tensor) -> float:
    return output_error(weight, grid.values(levels), hessian)


def gptq_levels(weight: Tensor, hessian: Tensor, grid: Grid, *, act_order: bool = True) -> Tensor:
    return levels_with(weight, grid, compensation(hessian, act_order=act_order))


def by_elimination(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Column after column as Optimal Brain Surgeon says: the others take over what is lost, and H⁻¹ loses a column."""
    rest, inverse = weight.double().clone(), torch.linalg.inv(hessian.double())
    scales, zeros = grid.columns(slice(weight.shape[1]))
    levels = torch.empty(weight.shape, dtype=torch.uint8)
    for i in range(weight.shape[1]):
        levels[:, i] = ((rest[:, i] / scales[:, i]).round() + zeros[:, i]).clamp(0, grid.highest).to(torch.uint8)
        lost = rest[:, i] - (levels[:, i] - zeros[:, i]) * scales[:, i]
        rest -= lost[:, None] * inverse[i] / inverse[i, i]
        inverse = inverse - inverse[:, i, None] * inverse[i] / inverse[i, i]
        inverse[i, i] = 1
    return levels


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 48, False), Scheme(8, None)])
def test_without_correlations_it_is_rounding(scheme: Scheme, act_order: bool) -> None:
    """H = I, and any other diagonal: no column can make up for another."""
    weight = a_weight(16, 300)
    grid = min_max(weight, scheme)
    for diagonal in (torch.ones(300), torch.rand(300, generator=torch.Generator().manual_seed(1)) + 0.1):
        levels = gptq_levels(weight, diagonal.diag(), grid, act_order=act_order)
        assert torch.equal(levels, grid.levels(weight))


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 32, False)])
def test_it_is_elimination_column_by_column(scheme: Scheme) -> None:
    """The blocked form with a Cholesky factor beside the definition, across the borders of blocks."""
    weight, x = a_weight(24, 160), correlated_inputs(400, 160, seed=2)
    hessian = x.T @ x
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(160)
    grid = min_max(weight, scheme)
    levels = gptq_levels(weight, hessian, grid, act_order=False)
    # A tie that fp32 rounds otherwise changes what follows in its row.
    assert (levels == by_elimination(weight, damped, grid)).all(1).float().mean() > 0.9


def test_act_order_takes_the_strongest_inputs_first() -> None:
    """As if the columns had been sorted beforehand, with scales that stay with their columns."""
    weight, x = a_weight(24, 160), correlated_inputs(400, 160, seed=2) * torch.rand(160)
    hessian = x.T @ x
    order = hessian.diagonal().argsort(descending=True)
    grid = min_max(weight, Scheme(4, 1))
    permuted = Grid(grid.scales[:, order], None, 16, 1)
    expected = gptq_levels(weight[:, order], hessian[order][:, order], permuted, act_order=False)
    assert torch.equal(gptq_levels(weight, hessian, grid, act_order=True)[:, order], expected)


def test_outputs_err_less_than_by_rounding() -> None:
    """Never more, in 10 draws of correlated inputs; on average less than half, and with act-order less than a third."""
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(10):
        weight, x = a_weight(64, 128, seed), correlated_inputs(1024, 128, seed)
        hessian, grid = x.T @ x, min_max(weight, Scheme(4, None))
        rounded = error_of(weight, hessian, grid, grid.levels(weight))
        for act_order, found in ratios.items():
            levels = gptq_levels(weight, hessian, grid, act_order=act_order)
            found.append(error_of(weight, hessian, grid, levels) / rounded)
    plain, ordered = (sum(found) / 10 for found in ratios.values())
    assert max(*ratios[False], *ratios[True]) < 1
    assert plain < 0.5 and ordered < 0.5


@pytest.mark.parametrize("act_order", [False, True])
def test_the_importance_of_columns_is_what_their_rounding_costs_in_the_end(act_order: bool) -> None:
    """Outputs err by the squares of what each column is moved when its turn comes, times its importance."""
    weight, x = a_weight(8, 96), correlated_inputs(400, 96, seed=2)
    hessian, grid = x.T @ x, min_max(weight, Scheme(4, 32))
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(96)
    compensated = compensation(hessian, act_order=act_order)
    values = grid.values(levels_with(weight, grid, compensated))
    # Undone from the first column of the order on: what GPTQ moved column i by is what is left of w − ŵ there.
    order = compensated.order
    moved = torch.linalg.solve_triangular(
        compensated.factor.double(), (weight - values).double()[:, order], upper=True, left=False
    )
    expected = moved.square().sum()
    shifts = moved * compensated.factor.double().diagonal()
    by_importance = (shifts.square() * compensated.importance.double()[order]).sum()
    assert abs(output_error(weight, values, damped) / expected - 1) < 1e-3
    assert abs(by_importance / expected - 1) < 1e-5


def test_fewer_tokens_than_columns_are_enough() -> None:
    weight, x = a_weight(16, 128), correlated_inputs(20, 128, seed=3)
    hessian, grid = x.T @ x, min_max(weight, Scheme(4, 32))
    levels = gptq_levels(weight, hessian, grid)
    assert error_of(weight, hessian, grid, levels) < 0.3 * error_of(weight, hessian, grid, grid.levels(weight))


def few_directions(tokens: int, columns: int, seed: int) -> Tensor:
    """Inputs that some strong directions have in common, with noise of their own; fp32 [T, K]."""
    strong = torch.randn(12, columns, generator=torch.Generator().manual_seed(1000)) / 12**0.5
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 12, generator=chance) @ strong + torch.randn(tokens, columns, generator=chance)


def test_of_few_tokens_it_is_damped_more_and_errs_less_on_others() -> None:
    for seed in range(4):
        weight, x, others = a_weight(64, 96, seed), few_directions(120, 96, seed), few_directions(3000, 96, seed + 50)
        hessian, grid = x.T @ x, min_max(weight, Scheme(4, None))
        known, sampled = (compensation(hessian, tokens=tokens) for tokens in (None, 120))
        damped = hessian + 2 * 96 / 120 * hessian.diagonal().median() * torch.eye(96)
        torch.testing.assert_close(sampled.divide(damped), torch.eye(96), atol=1e-3, rtol=0)
        errors = [error_of(weight, others.T @ others, grid, levels_with(weight, grid, c)) for c in (known, sampled)]
        assert errors[1] < 0.75 * errors[0]


def test_a_huge_feature_damps_the_others_no_more() -> None:
    x = few_directions(120, 96, 0)
    x[:, 7] *= 1e3
    found, expected = compensation(x.T @ x, tokens=120), compensation(x.T @ x)
    torch.testing.assert_close(found.factor, expected.factor)


def test_a_column_that_no_input_excites_is_rounded_by_itself() -> None:
    weight, x = a_weight(16, 128), correlated_inputs(400, 128, seed=3)
    x[:, [5, 70]] = 0
    grid = min_max(weight, Scheme(4, 32))
    levels = gptq_levels(weight, x.T @ x, grid)
    assert torch.equal(levels[:, [5, 70]], grid.levels(weight)[:, [5, 70]])
    others = torch.ones(128, dtype=torch.bool).index_fill(0, torch.tensor([5, 70]), False)
    kept = gptq_levels(weight[:, others], (x.T @ x)[others][:, others], Grid(grid.columns(others)[0], None, 16, 1))
    assert (levels[:, others] != kept).float().mean() < 0.01


def test_a_matrix_that_is_not_positive_is_damped_more() -> None:
    """As rounding leaves it: here one eigenvalue is clearly negative."""
    hessian = torch.eye(8)
    hessian[0, 1] = hessian[1, 0] = 1.05
    factor = inverse_factor(hessian)
    assert torch.isfinite(factor).all()
    damped = hessian + 0.1 * torch.eye(8)
    torch.testing.assert_close(factor.T @ factor, torch.linalg.inv(damped))


def test_moments_that_are_not_finite_are_refused() -> None:
    hessian = torch.eye(8)
    hessian[2, 2] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        inverse_factor(hessian)


def test_the_error_of_outputs_is_what_tokens_see() -> None:
    weight, x = a_weight(16, 64), correlated_inputs(100, 64, seed=4)
    rounded = weight + 0.1 * a_weight(16, 64, seed=9)
    expected = (x @ (weight - rounded).T).square().sum()
    assert abs(output_error(weight, rounded, x.T @ x) / expected - 1) < 1e-4
