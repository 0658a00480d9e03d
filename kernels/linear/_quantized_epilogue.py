"""How a quantized product ends: bias, adapters and the gate of SwiGLU, added to fp32 sums before they are stored.

Legend: T tokens, N output features; a gated result has N / 2 columns.
"""

from kernels.common.triton import tl, triton
from kernels.linear.lora import adapters_of_rows, lora_tile


@triton.jit
def output_columns(block, num_columns, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """A program's outputs and which exist. GATED: as many of gate as of up, for the same columns of the result."""
    o_n = tl.arange(0, OUTPUTS)
    if GATED:
        HALF: tl.constexpr = OUTPUTS // 2
        o_column = block * HALF + o_n % HALF
        o_n = o_column + o_n // HALF * num_columns
    else:
        o_column = block * OUTPUTS + o_n
        o_n = o_column
    return o_n, o_column < num_columns


@triton.jit
def finish(
    b_sum, p_bias, p_z, p_b, p_lora_scales, p_slots, p_out, block, o_t, m_t, o_n, m_n,
    num_rows, num_outputs, num_columns, num_adapters, rank,
    Z_SPLITS: tl.constexpr, RANKS: tl.constexpr, GATED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add bias and adapters to the sums of rows o_t and outputs o_n, gate them, store them in [T, num_columns]."""
    TOKENS: tl.constexpr = b_sum.shape[0]
    OUTPUTS: tl.constexpr = b_sum.shape[1]
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if p_z is not None:
        b_slots = adapters_of_rows(p_slots, o_t, m_t, num_adapters)
        b_sum += lora_tile(
            p_z, p_b, p_lora_scales, b_slots, o_t, o_n, m_n, num_rows, num_outputs, num_adapters, rank, Z_SPLITS,
            RANKS, INTERPRETED,
        )  # fmt: skip
    if GATED:
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_sum, [TOKENS, 2, OUTPUTS // 2]), (0, 2, 1)))
        b_sum = b_gate * tl.sigmoid(b_gate) * b_up
        o_n, m_n = output_columns(block, num_columns, OUTPUTS // 2, False)
    o_out = o_t.to(tl.int64)[:, None] * num_columns + o_n[None, :]
    tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=m_t[:, None] & m_n[None, :])
