"""Matrix product of tokens with a quantized weight: y = x Wᵀ + b, W as `quantization` defines it.

    forward     y[t, n] = Σ_k x[t, k] · W[n, k] + b[n]
    backward    dx[t, k] = Σ_n dy[t, n] · W[n, k];   the codes get no gradient, and W in full precision is never kept

`prepare_quantized_weight` repacks a weight once, at load, into the form that the device reads fastest.

On CUDA, by the number of rows:
- up to `MOST_FUSED_ROWS`: tiles of the weight become x's dtype in registers (of bf16 by bit operations) and go from
  there through the tensor cores, outputs as rows: y[n, t] = Σ_k W[n, k] · x[t, k]; one row is 1/16 of their work, which
  still takes less time than reading the weight;
- more: the weight becomes a matrix of x's dtype in a buffer that is free again after the product, by cuBLAS.
Where outputs are too few to fill the GPU, K is split; the split that ends last adds all, in order: the same bits each
run. It also adds the bias and adapters and applies the gate of `quantized_swiglu`, in fp32.
The backward pass expands tiles as it goes up to `_MOST_TILED_GRADIENTS` rows; more multiply as the forward pass does.

Legend: T tokens, K input features, N output features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.arrival import arrives_last
from kernels.common.ragged_tiles import as_operand, dot
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, is_interpreted, num_processors, runs_triton
from kernels.linear._quantized_cpu import (
    CpuWeight,
    grad_input_on_cpu,
    linear_on_cpu,
    linear_on_cpu_in_fp32,
    prepare_for_cpu,
)
from kernels.linear._quantized_epilogue import finish, output_columns
from kernels.linear._quantized_tiles import (
    MOST_SPLIT_BLOCKS,
    TiledWeight,
    codebook,
    load_table,
    of_group,
    scaled_tile,
    tile_codes,
    tile_values,
    tile_weight,
)
from kernels.linear.dense import linear_in_fp32
from kernels.linear.lora import (
    AdapterOperands,
    LoraWeights,
    Slots,
    check_adapters,
    expand_operands,
    lora_add,
    lora_reference,
    wants_gradients,
)
from kernels.linear.quantization import QuantizedWeight, pack_int4, pack_int6, pack_nf4

PreparedQuantizedWeight = TiledWeight | CpuWeight

# Above this many rows expanding the weight first costs less than expanding its tiles for every 64 rows again:
# 2 · T · N · K operations then take longer than moving 4.5 bytes per weight (`python -m bench.kernels.decode --tune`).
MOST_FUSED_ROWS = 128
# Of gradients: above as many, tiles that each decode the weight and read dy again cost more than writing it once.
_MOST_TILED_GRADIENTS = 256
_MOST_SPLITS = 16
_WORDS_AT_ONCE = 16


class Tiles(NamedTuple):
    """How a kernel is launched: rows and outputs of a program, and what Triton compiles it for."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


# By format and the largest number of rows. Any GPU; `python -m bench.kernels.decode --tune`.
_FOUR_BITS = {16: Tiles(16, 128, 4, 4), 32: Tiles(32, 128, 4, 4), 64: Tiles(64, 128, 8, 3)}
_MORE_BITS = {16: Tiles(16, 128, 4, 4), 32: Tiles(32, 128, 4, 3), 64: Tiles(64, 128, 8, 3)}
_FORWARD_TILES = {"int4": _FOUR_BITS, "nf4": _FOUR_BITS | {64: Tiles(64, 64, 4, 4)}}
_FORWARD_TILES |= {"int6": _MORE_BITS, "int8": _MORE_BITS, "fp8": _MORE_BITS}
_BACKWARD_TILES = {16: Tiles(16, 64, 4, 3), 64: Tiles(64, 64, 4, 3), 128: Tiles(128, 64, 8, 3)}
# fp32 goes through no tensor cores, and takes twice the memory. Of six bits 64 outputs spill on an RTX 4090.
_FP32_TILES = {16: Tiles(16, 64, 4, 2), 32: Tiles(32, 64, 8, 2), 64: Tiles(64, 64, 8, 2)}
_FP32_FORWARD_TILES = {"int4": _FP32_TILES, "nf4": _FP32_TILES, "int8": _FP32_TILES, "fp8": _FP32_TILES}
_FP32_FORWARD_TILES["int6"] = _FP32_TILES | {16: Tiles(16, 32, 4, 2)}
_FP32_BACKWARD_TILES = {16: Tiles(16, 32, 4, 2), 32: Tiles(32, 32, 8, 2)}
_EXPAND_TILES = Tiles(0, 64, 4, 2)
_PACKED_CODES = {"int4": pack_int4, "int6": pack_int6}
_WIDE_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantized_linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
) -> Tensor:
    """`quantized_linear` in its plainest form."""
    product = x @ weight.dequantize(x.dtype).t()
    product = product if bias is None else product + bias
    return product if lora is None else lora_reference(product, x, lora, slots)


@triton.jit
def added_product(b_w, b_x, b_sum, INTERPRETED: tl.constexpr):
    """b_sum + W xᵀ, where W is in registers. The product ends here, for the next tile's numbers go there.

    As a sum of the matrix units', on Hopper Triton leaves products under way that still read those registers (seen:
    INT8 gave other bits in every run on an H200). As a plain addition it would become one.
    """
    return tl.fma(dot(b_w, tl.trans(b_x), tl.zeros_like(b_sum), INTERPRETED), 1.0, b_sum)


@triton.jit
def tile_product(
    b_sum, p_rows, p_words, table, p_zeros, p_scales, p_minima,
    tile, o_n, m_n, m_t, end, num_outputs,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TILE: tl.constexpr,
    WHOLE: tl.constexpr, IN_PAIRS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """b_sum [N, T] and the products of one tile of K with rows at p_rows, up to the input `end`."""
    DTYPE: tl.constexpr = p_rows.dtype.element_ty
    o_k = tile * TILE + tl.arange(0, TILE)[None, :]
    mask = m_t[:, None]
    if not WHOLE:
        mask &= o_k < end
        tile = tl.minimum(tile, (end - 1) // TILE)
    b_x = tl.load(p_rows + o_k, mask=mask, other=0.0, eviction_policy="evict_last")
    if GROUP == 1:
        b_w = scaled_tile(
            p_words, table, p_zeros, p_scales, p_minima, tile, o_n, m_n, num_outputs, FORMAT, WORDS, GROUP, ZERO
        )
        return added_product(as_operand(b_w, DTYPE, INTERPRETED), b_x, b_sum, INTERPRETED)
    b_w = tile_values(p_words, table, p_zeros, tile, o_n, m_n, num_outputs, FORMAT, WORDS, GROUP, ZERO, DTYPE, IN_PAIRS)
    if GROUP == 0:
        return added_product(b_w, b_x, b_sum, INTERPRETED)
    group = tile * TILE // GROUP
    b_scales = of_group(p_scales, group, o_n, m_n, num_outputs)
    b_sum += dot(b_w, tl.trans(b_x), tl.zeros_like(b_sum), INTERPRETED) * b_scales[:, None]
    if p_minima is not None:
        b_minima = of_group(p_minima, group, o_n, m_n, num_outputs)
        b_sum += b_minima[:, None] * tl.sum(b_x.to(tl.float32), axis=1)[None, :]
    return b_sum


@triton.jit
def _stores_last(p_parts, b_sum, p_arrived, split, splits):
    """Store this split's sums; returns whether it came last, so that all parts are there."""
    o_part = tl.arange(0, b_sum.shape[0])[:, None] * b_sum.shape[1] + tl.arange(0, b_sum.shape[1])[None, :]
    SIZE: tl.constexpr = b_sum.shape[0] * b_sum.shape[1]
    tl.store(p_parts + tl.cast(split, tl.int64) * SIZE + o_part, b_sum)
    return arrives_last(p_arrived, 0, splits)


@triton.jit
def _added_parts(p_parts, o_t, splits, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr):
    """All parts' sums of some rows [N, T], added in their order; AT_ONCE of them, four or one, are on their way."""
    SIZE: tl.constexpr = OUTPUTS * TOKENS
    o_part = tl.arange(0, OUTPUTS)[:, None] * TOKENS + o_t[None, :]
    b_sum = tl.zeros([OUTPUTS, o_t.shape[0]], dtype=tl.float32)
    for part in tl.range(0, splits, AT_ONCE, num_stages=1):
        p_part = p_parts + tl.cast(part, tl.int64) * SIZE + o_part
        b_0 = tl.load(p_part, cache_modifier=".cg")
        if AT_ONCE == 4:
            b_1 = tl.load(p_part + SIZE, mask=part + 1 < splits, other=0.0, cache_modifier=".cg")
            b_2 = tl.load(p_part + 2 * SIZE, mask=part + 2 < splits, other=0.0, cache_modifier=".cg")
            b_3 = tl.load(p_part + 3 * SIZE, mask=part + 3 < splits, other=0.0, cache_modifier=".cg")
            b_sum = b_sum + b_0 + b_1 + b_2 + b_3
        else:
            b_sum += b_0
    return b_sum


@triton.jit(do_not_specialize=["num_rows", "tiles_each"])
def _product_kernel(
    p_x, p_words, p_table, p_zeros, p_scales, p_minima,
    p_bias, p_z, p_b, p_lora_scales, p_slots, p_parts, p_arrived, p_out,
    num_rows, num_inputs, num_outputs, num_columns, tiles_each, num_adapters, rank, stride_x,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TILE: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
    IN_PAIRS: tl.constexpr, Z_SPLITS: tl.constexpr, RANKS: tl.constexpr, GATED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y [T, N] of x [T, K]. GROUP 0: one scale a row. WHOLE: no tile reaches beyond its split.

    p_parts: where there are several splits, the sums of each, fp32 [row blocks, blocks, SPLITS, OUTPUTS, TOKENS].
    """
    block, row_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_n, m_n = output_columns(block, num_columns, OUTPUTS, GATED)
    # What is not there is read as the last output, and not stored: no mask in the loop.
    o_read, m_read = tl.minimum(o_n, num_outputs - 1), tl.full([OUTPUTS], True, tl.int1)
    o_t = row_block * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < num_rows
    p_rows = p_x + o_t.to(tl.int64)[:, None] * stride_x
    b_sum = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
    table = load_table(p_table, FORMAT, WORDS)
    end = tl.minimum((split + 1) * tiles_each * TILE, num_inputs)
    for first in tl.range(split * tiles_each, tl.cdiv(end, TILE), DEPTH, num_stages=STAGES):
        for tile in tl.static_range(DEPTH):
            b_sum = tile_product(
                b_sum, p_rows, p_words, table, p_zeros, p_scales, p_minima, first + tile,
                o_read, m_read, m_t, end, num_outputs, FORMAT, WORDS, GROUP, ZERO, TILE, WHOLE, IN_PAIRS,
                INTERPRETED,
            )  # fmt: skip
    if GROUP == 0:
        b_sum *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None]
    if p_parts is None:
        finish(
            tl.trans(b_sum), p_bias, p_z, p_b, p_lora_scales, p_slots, p_out, block, o_t, m_t, o_n, m_n,
            num_rows, num_outputs, num_columns, num_adapters, rank, Z_SPLITS, RANKS, GATED, INTERPRETED,
        )  # fmt: skip
    else:
        place = row_block * tl.num_programs(0) + block
        splits = tl.num_programs(2)
        p_parts += tl.cast(place * splits, tl.int64) * (OUTPUTS * TOKENS)
        if _stores_last(p_parts, b_sum, p_arrived + place, split, splits):
            # 32 rows after 32, so that registers are left for a second program. Of fp32 four parts at once spill.
            AT_ONCE: tl.constexpr = 1 if p_x.dtype.element_ty == tl.float32 else 4
            ROWS: tl.constexpr = TOKENS if TOKENS < 32 or AT_ONCE == 1 else 32
            for row in tl.static_range(0, TOKENS, ROWS):
                o_some = row + tl.arange(0, ROWS)
                b_some = _added_parts(p_parts, o_some, splits, OUTPUTS, TOKENS, AT_ONCE)
                o_some += row_block * TOKENS
                finish(
                    tl.trans(b_some), p_bias, p_z, p_b, p_lora_scales, p_slots, p_out, block, o_some, o_some < num_rows,
                    o_n, m_n, num_rows, num_outputs, num_columns, num_adapters, rank, Z_SPLITS, RANKS, GATED,
                    INTERPRETED,
                )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _grad_input_kernel(
    p_grad, p_words, p_table, p_zeros, p_scales, p_minima, p_out,
    num_rows, num_inputs, num_outputs, stride_grad,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TILE: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of dx [T, K]: TOKENS rows and the k of one tile of the weight, summed over all outputs."""
    tile = tl.program_id(0)
    o_t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < num_rows
    p_rows = p_grad + o_t.to(tl.int64)[:, None] * stride_grad
    b_sum = tl.zeros([TOKENS, TILE], dtype=tl.float32)
    table = load_table(p_table, FORMAT, WORDS)
    for start in tl.range(0, num_outputs, OUTPUTS):
        o_n = start + tl.arange(0, OUTPUTS)
        m_n = o_n < num_outputs
        b_grad = tl.load(p_rows + o_n[None, :], mask=m_t[:, None] & m_n[None, :], other=0.0)
        b_w = scaled_tile(
            p_words, table, p_zeros, p_scales, p_minima, tile, o_n, m_n, num_outputs, FORMAT, WORDS, GROUP, ZERO
        )
        b_sum = dot(b_grad, as_operand(b_w, p_grad.dtype.element_ty, INTERPRETED), b_sum, INTERPRETED)
    o_k = tile * TILE + tl.arange(0, TILE)
    o_out = o_t.to(tl.int64)[:, None] * num_inputs + o_k[None, :]
    mask = m_t[:, None] & (o_k < num_inputs)[None, :]
    tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def _expand_kernel(
    p_words, p_table, p_zeros, p_scales, p_minima, p_out,
    num_inputs, num_outputs,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TILE: tl.constexpr,
    OUTPUTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of the weight [N, K], expanded."""
    tile = tl.program_id(0)
    o_n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    m_n = o_n < num_outputs
    table = load_table(p_table, FORMAT, WORDS)
    b_w = scaled_tile(
        p_words, table, p_zeros, p_scales, p_minima, tile, o_n, m_n, num_outputs, FORMAT, WORDS, GROUP, ZERO
    )
    o_k = tile * TILE + tl.arange(0, TILE)
    mask = m_n[:, None] & (o_k < num_inputs)[None, :]
    o_out = o_n.to(tl.int64)[:, None] * num_inputs + o_k[None, :]
    tl.store(p_out + o_out, b_w.to(p_out.dtype.element_ty), mask=mask)


def prepare_quantized_weight(weight: QuantizedWeight) -> PreparedQuantizedWeight:
    """Repack a weight for the device on which it lies."""
    return tile_weight(weight) if runs_triton(weight.codes) else prepare_for_cpu(weight)


def stored_codes(weight: PreparedQuantizedWeight) -> Tensor:
    """The codes as the weight that was prepared held them, so that nobody need keep them twice."""
    if isinstance(weight, CpuWeight):
        return weight.held.codes
    codes = tile_codes(weight)
    if weight.format == "nf4":
        return pack_nf4(codes.flatten())
    if weight.format in _PACKED_CODES:
        return _PACKED_CODES[weight.format](codes)
    return codes.contiguous().view(_WIDE_CODES[weight.format])


def quantized_linear(
    x: Tensor,
    weight: PreparedQuantizedWeight,
    bias: Tensor | None = None,
    lora: LoraWeights | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Return x Wᵀ + b, [T, N], of x [T, K], a prepared weight [N, K] and bias [N] or None; plus what adapters add.

    The result has the dtype of x: fp32, bf16 or fp16. Rows of x need not be neighbours. `lora` and `slots` as in
    `lora_add`. Differentiable in x and bias, and in a and b of one adapter without slots.
    """
    check_operands(x, weight, bias, lora, slots)
    fused = fused_product(x, weight, bias, lora, slots)
    if fused is not None:
        return fused
    # Going through autograd for nothing takes as long as a small product.
    y: Tensor = (_QuantizedLinear.apply if wants_gradients(x, bias) else _product)(x, weight, bias)
    return y if lora is None else lora_add(y, x, lora, slots)


def quantized_linear_in_fp32(x: Tensor, weight: PreparedQuantizedWeight) -> Tensor:
    """Return x Wᵀ in fp32, [T, N], of x [T, K] and a prepared weight [N, K]: as `linear_in_fp32`."""
    if wants_gradients(x):
        return quantized_linear(x, weight).float()
    check_operands(x, weight, None, None, None)
    if isinstance(weight, CpuWeight):
        return linear_on_cpu_in_fp32(x, weight)
    fused = fused_product(x, weight, out_dtype=torch.float32)
    return linear_in_fp32(x, expand(weight, x.dtype)) if fused is None else fused


def _product(x: Tensor, weight: PreparedQuantizedWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, CpuWeight):
        return linear_on_cpu(x, weight, bias)
    fused = fused_product(x, weight, bias)
    if fused is not None:
        return fused
    product = x @ expand(weight, x.dtype).t()
    return product if bias is None else product.add_(bias)


def check_operands(
    x: Tensor, weight: PreparedQuantizedWeight, bias: Tensor | None, lora: LoraWeights | None, slots: Tensor | None
) -> None:
    """Raise ValueError unless all fit one another."""
    n, k = weight.shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x must be [T, {k}] for a weight [{n}, {k}], not {list(x.shape)}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}], not {list(bias.shape)}")
    if lora is not None:
        check_adapters(x, lora, slots, n)
    elif slots is not None:
        raise ValueError("slots name adapters, and there are none: give lora too")
    if isinstance(weight, TiledWeight):
        check_rows(x=x)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PreparedQuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.bias_dtype = weight, None if bias is None else bias.dtype
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (grad,) = grads
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            on_cpu = isinstance(ctx.weight, CpuWeight)
            grad_x = grad_input_on_cpu(grad, ctx.weight) if on_cpu else grad_input(grad.contiguous(), ctx.weight)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, None, grad_bias


def fused_product(
    x: Tensor,
    weight: PreparedQuantizedWeight,
    bias: Tensor | None = None,
    lora: LoraWeights | None = None,
    slots: Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """`quantized_linear` in one kernel, two with adapters; `gated`: silu(gate) · up of its halves [gate, up].

    None where that is not to be: on the CPU, for many rows, for gradients.
    """
    if isinstance(weight, CpuWeight):
        return None
    learned = (x, bias) if lora is None else (x, bias, lora.a, lora.b)
    if len(x) > MOST_FUSED_ROWS or wants_gradients(*learned):
        return None
    n = weight.shape[0]
    out = torch.empty(len(x), n // 2 if gated else n, dtype=out_dtype or x.dtype, device=x.device)
    if len(x):
        _launch_product(x, weight, bias, expand_operands(x, lora, slots), out, gated=gated)
    return out


def _launch_product(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, adapters: AdapterOperands, out: Tensor, *, gated: bool
) -> None:
    (rows, columns), (n, k) = out.shape, weight.shape
    by_format = _FP32_FORWARD_TILES if x.dtype == torch.float32 else _FORWARD_TILES
    tiles = _smallest(by_format[weight.format], rows)
    grid = triton.cdiv(columns, tiles.outputs // 2 if gated else tiles.outputs), triton.cdiv(rows, tiles.rows)
    # As many tiles at once as make 16 words an output; where every element brings its scale, one.
    depth = 1 if weight.group == 1 else max(1, _WORDS_AT_ONCE // weight.words.shape[2])
    splits, steps = _splits(grid[0] * grid[1], triton.cdiv(len(weight.words), depth), x.device)
    parts = None
    if splits > 1:
        parts = torch.empty(*grid, splits, tiles.outputs, tiles.rows, dtype=torch.float32, device=x.device)
    in_pairs = decodes_in_pairs(weight, x)
    operands, counts, adapter_constants = adapters
    constants = constants_of(weight, tiles, x) | adapter_constants
    _product_kernel[(*grid, splits)](
        x, *tensors_of(weight, x.dtype, in_pairs=in_pairs), bias, *operands, parts, weight.arrived, out,
        rows, k, n, columns, steps * depth, *counts, x.stride(0), **constants,
        TOKENS=tiles.rows, DEPTH=depth, STAGES=constants["num_stages"], WHOLE=k % (depth * weight.tile) == 0,
        IN_PAIRS=in_pairs, GATED=gated,
    )  # fmt: skip


def grad_input(grad: Tensor, weight: TiledWeight) -> Tensor:
    """dx [T, K] of dy [T, N], both contiguous."""
    (rows, n), k = grad.shape, weight.shape[1]
    if rows > _MOST_TILED_GRADIENTS:
        return grad @ expand(weight, grad.dtype)
    out = torch.empty(rows, k, dtype=grad.dtype, device=grad.device)
    if rows:
        tiles = _smallest(_FP32_BACKWARD_TILES if grad.dtype == torch.float32 else _BACKWARD_TILES, rows)
        _grad_input_kernel[(len(weight.words), triton.cdiv(rows, tiles.rows))](
            grad, *tensors_of(weight, torch.float32), out, rows, k, n, grad.stride(0),
            **constants_of(weight, tiles, grad), TOKENS=tiles.rows,
        )  # fmt: skip
    return out


def expand(weight: TiledWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] as a matrix of `dtype`."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    _expand_kernel[(len(weight.words), triton.cdiv(n, _EXPAND_TILES.outputs))](
        *tensors_of(weight, torch.float32), out, k, n, **constants_of(weight, _EXPAND_TILES, out)
    )
    return out


def decodes_in_pairs(weight: TiledWeight, x: Tensor) -> bool:
    """Whether a kernel makes bf16 of two codes at once, by bit operations in PTX, of which the interpreter has none."""
    # Where every element has its scale it is fp32 that is scaled.
    return x.dtype == torch.bfloat16 and weight.group != 1 and weight.format != "int6" and not is_interpreted(x)


def tensors_of(weight: TiledWeight, dtype: torch.dtype, *, in_pairs: bool = False) -> tuple[Tensor | None, ...]:
    table = codebook(weight, None if in_pairs else dtype)
    return weight.words, table, weight.zeros, weight.scales, weight.minima


def constants_of(weight: TiledWeight, tiles: Tiles, x: Tensor) -> dict[str, Any]:
    return {
        "FORMAT": weight.format,
        "WORDS": weight.words.shape[-1],
        "GROUP": weight.group,
        "ZERO": weight.zero,
        "TILE": weight.tile,
        "OUTPUTS": tiles.outputs,
        "INTERPRETED": is_interpreted(x),
        "num_warps": tiles.num_warps,
        # Where every element brings its scale, fewer tiles fit into shared memory.
        "num_stages": min(2, tiles.num_stages) if weight.group == 1 else tiles.num_stages,
    }


def _smallest(table: dict[int, Tiles], rows: int) -> Tiles:
    """The tiles for the smallest number of rows that is enough, else the largest."""
    return table[next((most for most in table if most >= rows), max(table))]


def _splits(programs: int, steps: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts K is split so that `programs` times as many fill the GPU twice, and their steps."""
    most = _MOST_SPLITS if programs <= MOST_SPLIT_BLOCKS else 1
    wanted = min(most, steps, max(1, 2 * num_processors(device) // programs))
    steps_each = triton.cdiv(steps, wanted)
    return triton.cdiv(steps, steps_each), steps_each
