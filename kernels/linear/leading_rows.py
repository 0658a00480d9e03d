"""Matrix product of the leading rows alone, where only the device knows how many they are: y[:n] = x[:n] Wᵀ + b.

A router lets an unknown part of a prompt into a layer. A library's product would take as many rows as there is room
for, or the host would have to wait for the number. Here tiles past it end as they begin, and launches do not depend on
it. Only for many rows: with few, reading the weight takes the time whatever their number.

Legend: T rows, n of them leading, K input features, N output features.
"""

import torch
from torch import Tensor

from kernels.common.ragged_tiles import dot
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, is_interpreted, runs_triton

# Rows, outputs and inputs of a tile, warps, stages: three stages of 32 KiB fit every GPU since Ampere. fp32 has no
# matrix units: it is there for tests, not for speed.
_TILES, _FP32_TILES = (128, 128, 64, 8, 3), (32, 64, 32, 4, 2)
_TILES_IN_A_GROUP = tl.constexpr(8)


def linear_of_leading_rows_reference(x: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """`linear_of_leading_rows` in its plainest form, without the rows past them."""
    product = x[:count] @ weight.t()
    return product if bias is None else product + bias


@triton.jit(do_not_specialize=["num_rows"])
def _leading_rows_kernel(
    p_x, p_weight, p_bias, p_count, p_out, num_rows, stride_x, stride_weight, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile of the result. Neighbours in time share rows of x and of the weight in the cache."""
    tiles_down, tiles_across = tl.cdiv(num_rows, ROWS), tl.cdiv(N, OUTPUTS)
    tile, in_group = tl.program_id(0), _TILES_IN_A_GROUP * tiles_across
    first_down = tile // in_group * _TILES_IN_A_GROUP
    height = tl.minimum(tiles_down - first_down, _TILES_IN_A_GROUP)
    first_row = (first_down + tile % in_group % height) * ROWS
    first_output = tile % in_group // height * OUTPUTS
    count = tl.minimum(tl.load(p_count), num_rows)
    if first_row < count:
        b_row, b_output = first_row + tl.arange(0, ROWS), first_output + tl.arange(0, OUTPUTS)
        m_rows, m_outputs, b_input = b_row < count, b_output < N, tl.arange(0, INPUTS)
        p_x_tile = p_x + b_row.to(tl.int64)[:, None] * stride_x + b_input[None, :]
        p_weight_tile = p_weight + b_output.to(tl.int64)[None, :] * stride_weight + b_input[:, None]
        b_sum = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for first in range(0, K, INPUTS):
            m_inputs = first + b_input < K
            b_x = tl.load(p_x_tile + first, mask=m_rows[:, None] & m_inputs[None, :], other=0.0)
            b_weight = tl.load(p_weight_tile + first, mask=m_inputs[:, None] & m_outputs[None, :], other=0.0)
            b_sum = dot(b_x, b_weight, b_sum, INTERPRETED)
        if p_bias is not None:
            b_sum += tl.load(p_bias + b_output, mask=m_outputs, other=0.0).to(tl.float32)[None, :]
        o_out = b_row.to(tl.int64)[:, None] * N + b_output[None, :]
        tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=m_rows[:, None] & m_outputs[None, :])


def linear_of_leading_rows(x: Tensor, weight: Tensor, bias: Tensor | None, count: Tensor) -> Tensor:
    """Return x Wᵀ + b, [T, N], of x [T, K], weight [N, K] and bias [N] or None; past row `count` it means nothing.

    count: int32 of no dimension, on the device of x. Sums are in fp32. All of one dtype; for inference only. Raises
    ValueError for rows or weights that are not contiguous.
    """
    if not runs_triton(x):
        return torch.nn.functional.linear(x, weight, bias)
    check_rows(x=x, weight=weight)
    (num_rows, k), n = x.shape, len(weight)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    rows, outputs, inputs, warps, stages = _FP32_TILES if x.dtype == torch.float32 else _TILES
    if out.numel():
        _leading_rows_kernel[(triton.cdiv(num_rows, rows) * triton.cdiv(n, outputs),)](
            x, weight, bias, count, out, num_rows, x.stride(0), weight.stride(0), N=n, K=k, ROWS=rows,
            OUTPUTS=outputs, INPUTS=inputs, INTERPRETED=is_interpreted(x), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out
