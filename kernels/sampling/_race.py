"""How a row of the vocabulary is shared by several programs, and how they run a race over it.

Each program keeps the best value of its part in a block of lanes (`advance`), then all lay down their best and the one
that arrives last picks the winner (`finish`). Which one that is does not matter: of equal values the lowest index wins.

The number of programs follows the batch, so kernels take it at run time: it makes no variant of a kernel. LANES, room
for the results of a row, follows from the vocabulary alone.
"""

import torch
from torch import Tensor

from kernels.common.arrival import arrives_last
from kernels.common.triton import tl, triton
from kernels.common.triton_support import num_processors

BLOCK = 2048
WARPS = 8
_NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def start(BLOCK: tl.constexpr):
    """Best values and their indices before the first block."""
    return tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], _NOBODY, tl.int32)


@triton.jit
def advance(b_best, b_index, b_value, columns):
    """Take over what is better; a NaN never is."""
    b_better = b_value > b_best
    return tl.where(b_better, b_value, b_best), tl.where(b_better, columns, b_index)


@triton.jit
def _winner(b_best, b_index):
    best = tl.max(b_best, axis=0)
    m_winner = (b_best == best) & (b_best > float("-inf"))
    return best, tl.min(tl.where(m_winner, b_index, _NOBODY), axis=0)


@triton.jit
def finish(p_values, p_indices, p_arrived, row, b_best, b_index, LANES: tl.constexpr):
    """Returns (whether this program arrived last, the winner of the row then, −1 if there is none).

    The grid is (N, splits); p_values and p_indices are [N, splits]; p_arrived [N] holds zeros; LANES is a power of two
    ≥ splits.
    """
    split, splits = tl.program_id(1), tl.num_programs(1)
    best, index = _winner(b_best, b_index)
    tl.store(p_values + row * splits + split, best)
    tl.store(p_indices + row * splits + split, index)
    is_last = arrives_last(p_arrived, row, splits)
    index = tl.full([], _NOBODY, tl.int32)
    if is_last:
        o_split = tl.arange(0, LANES)
        m_split = o_split < splits
        # From the cache that all processors share: this one's own may hold what was there before.
        b_values = tl.load(p_values + row * splits + o_split, m_split, other=float("-inf"), cache_modifier=".cg")
        b_indices = tl.load(p_indices + row * splits + o_split, m_split, other=_NOBODY, cache_modifier=".cg")
        _, index = _winner(b_values, b_indices)
    return is_last, tl.where(index == _NOBODY, -1, index).to(tl.int64)


def block_size(vocabulary: int) -> int:
    return max(16, min(BLOCK, triton.next_power_of_2(vocabulary)))


def num_blocks(vocabulary: int) -> int:
    return triton.cdiv(vocabulary, block_size(vocabulary))


def num_lanes(vocabulary: int) -> int:
    """Return a power of two that no number of programs of a row exceeds."""
    return triton.next_power_of_2(num_blocks(vocabulary))


def num_splits(num_rows: int, vocabulary: int, device: torch.device) -> int:
    """Return how many programs share a row: enough to keep every processor busy, each with a block or more."""
    wanted = triton.cdiv(4 * num_processors(device), num_rows)
    return max(1, min(wanted, num_blocks(vocabulary)))


def partial_results(num_rows: int, splits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the programs lay down their best."""
    values = torch.empty(num_rows, splits, dtype=torch.float32, device=device)
    return values, torch.empty_like(values, dtype=torch.int32)
