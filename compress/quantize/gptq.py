"""GPTQ: round a weight column by column, each time moving the columns to come so that they make up for the error.

    H = Σ x xᵀ of the inputs,  H += damping · mean(diag H) · I,  U = the upper Cholesky factor of H⁻¹
    column i:   e = (w_i − ŵ_i) / U_ii,   w_j −= e · U_ij  for every later column j

Columns go in blocks; what a block owes to the later ones is added up and subtracted at once. The grid is fixed
beforehand, so that columns can go in any order and neighbours still share a scale: with `act_order` those that the
inputs excite most go first, while there are still others to make up for them. The outputs err by Σ e² in all, so a grid
is best searched with 1 / U_ii² as the importance of column i: what its rounding costs after all that is made up for.

H is known from T tokens alone, and what makes up for errors on them need not on others: the fewer, the more is damped,
by 2 K / T of the median of diag H, which a few huge features do not lift as they do the mean. So what layers of SmolLM2
put out errs on other text a tenth less after 4k tokens (a third less where K is 1,536), and 2 to 15 % less after 12k.

Sources: GPTQ https://arxiv.org/abs/2210.17323.

Legend: N output features, K input features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.quantize.grid import Grid, nearest

DAMPING = 0.01
_MOST_DAMPING = 1.0
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Compensation:
    """The order of columns, and how the later ones make up for each."""

    order: Tensor
    """int64 [K]."""
    factor: Tensor
    """U, fp32 [K, K], of columns in this order."""

    @property
    def importance(self) -> Tensor:
        """1 / U_ii² of each column, [K], for `grid.searched`."""
        return self.factor.diagonal().square().reciprocal()[self.order.argsort()]

    def divide(self, rows: Tensor) -> Tensor:
        """`rows` [N, K] times H⁻¹."""
        return (rows[:, self.order] @ self.factor.T @ self.factor)[:, self.order.argsort()]


@torch.no_grad()
def compensation(hessian: Tensor, *, act_order: bool = True, tokens: int | None = None) -> Compensation:
    """Of `hessian` fp32 [K, K], Σ x xᵀ at any scale, over so many tokens; ValueError if it is not finite.

    None are so many that it is as good as known.
    """
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(len(diagonal))
    order = order.to(hessian.device)
    unknown = 0.0 if tokens is None else 2 * len(hessian) / tokens * float(diagonal.median())
    return Compensation(order, inverse_factor(hessian[order][:, order], unknown))


@torch.no_grad()
def gptq_levels(weight: Tensor, grid: Grid, compensation: Compensation) -> Tensor:
    """Levels u8 [N, K] of `weight` [N, K] on `grid`. A column that no input excites is rounded by itself."""
    order, factor = compensation.order, compensation.factor
    # Transposed, so that a column of the weight is a piece of memory.
    scales, zeros = (part.T.contiguous() for part in grid.columns(order))
    rest = weight.float()[:, order].T.contiguous()
    levels = torch.empty_like(rest)
    for start in range(0, len(rest), _BLOCK):
        block = slice(start, start + _BLOCK)
        errors = _round_block(
            rest[block], levels[block], scales[block], zeros[block], factor[block, block], grid.highest
        )
        rest[start + _BLOCK :].addmm_(factor[block, start + _BLOCK :].T, errors, alpha=-1)
    return levels[order.argsort()].T.to(torch.uint8).contiguous()


def _round_block(rest: Tensor, levels: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, highest: int) -> Tensor:
    """Fills `levels`; the errors of columns over their U_ii. All but `factor` are [block, N]; `rest` is used up."""
    errors = torch.empty_like(rest)
    for i, column in enumerate(rest):
        levels[i] = nearest(column, scales[i], zeros[i], highest)
        errors[i] = (column - (levels[i] - zeros[i]) * scales[i]) / factor[i, i]
        rest[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return errors


def inverse_factor(hessian: Tensor, least: float = 0.0) -> Tensor:
    """U, upper triangular with UᵀU = H⁻¹, of the damped H; damped more where rounding leaves H not positive.

    `least` is added to the diagonal in any case.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    if not torch.isfinite(mean):
        raise ValueError("the second moments of the inputs are not finite")
    damped = hessian + torch.diag((diagonal == 0).float())
    damping = DAMPING
    while damping <= _MOST_DAMPING:
        added = (damping * mean).clamp(min=least)
        damped.diagonal().copy_(torch.where(diagonal == 0, 1.0, diagonal) + added)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return factor
        damping *= 10
    raise ValueError("the second moments of the inputs have no Cholesky factor")


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """tr(Δ H Δᵀ), Δ = W − Ŵ: the squared error of the outputs over all tokens of H."""
    difference = weight.float() - rounded.float()
    return float(((difference @ hessian) * difference).sum())
