"""Matrix product of tokens with a quantized weight: y = x Wᵀ + b, W as `quantization` defines it.

    forward     y[t, n] = Σ_k x[t, k] · W[n, k] + b[n]
    backward    dx[t, k] = Σ_n dy[t, n] · W[n, k];   the codes get no gradient, and W in full precision is never kept

`prepare_quantized_weight` repacks a weight once, at load, into the form that the device reads fastest.

On CUDA, by the number of rows:
- 1: products and sums in fp32 without tensor cores; reading the weight is all that counts;
- up to `_MOST_FUSED_ROWS`: tiles of the weight become x's dtype in registers and go through the tensor cores;
- more: the weight becomes a matrix of x's dtype in a buffer that is free again after the product, by cuBLAS.
Where outputs are too few to fill the GPU, K is split; a second kernel adds the parts in order: the same bits each run.
Whichever kernel ends the sums also adds the bias and adapters and applies the gate of `quantized_swiglu`, in fp32.
The backward pass expands tiles as it goes up to `_MOST_TILED_GRADIENTS` rows; more multiply as the forward pass does.

Legend: T tokens, K input features, N output features.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.ragged_tiles import as_operand, dot
from kernels.common.triton_support import check_rows, is_interpreted, num_processors, runs_triton
from kernels.linear._quantized_cpu import CpuWeight, grad_input_on_cpu, linear_on_cpu, prepare_for_cpu
from kernels.linear._quantized_epilogue import NO_EPILOGUE, Epilogue, finish, output_columns
from kernels.linear._quantized_tiles import (
    TiledWeight,
    group_minima,
    group_scales,
    scaled_elements,
    scaled_tile,
    tables,
    tile_codes,
    tile_values,
    tile_weight,
)
from kernels.linear.lora import (
    LoraWeights,
    Slots,
    check_adapters,
    expand_operands,
    lora_add,
    lora_reference,
    wants_gradients,
)
from kernels.linear.quantization import QuantizedWeight, pack_int4, pack_nf4

PreparedQuantizedWeight = TiledWeight | CpuWeight

# Above this many rows expanding the weight first costs less than expanding its tiles for every 64 rows again:
# 2 · T · N · K operations then take longer than moving 4.5 bytes per weight (`python -m bench.kernels.decode --tune`).
_MOST_FUSED_ROWS = 128
# Of gradients: above as many, tiles that each decode the weight and read dy again cost more than writing it once.
_MOST_TILED_GRADIENTS = 256
_MOST_SPLITS = 16


class Tiles(NamedTuple):
    """How a kernel is launched: rows and outputs of a program, and what Triton compiles it for."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


# By bits a weight and the largest number of rows. 1 row: no tensor cores. Any GPU; `python -m bench.kernels.decode`.
_FORWARD_TILES = {
    4: {1: Tiles(1, 128, 4, 4), 16: Tiles(16, 128, 4, 4), 32: Tiles(32, 128, 4, 4), 64: Tiles(64, 128, 4, 3)},
    8: {1: Tiles(1, 128, 4, 4), 16: Tiles(16, 128, 4, 4), 32: Tiles(32, 128, 4, 3), 64: Tiles(64, 128, 4, 3)},
}
_BACKWARD_TILES = {16: Tiles(16, 64, 4, 3), 64: Tiles(64, 64, 4, 3), 128: Tiles(128, 64, 8, 3)}
_EXPAND_TILES = Tiles(0, 64, 4, 2)
_WIDE_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantized_linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
) -> Tensor:
    """`quantized_linear` in its plainest form."""
    product = x @ weight.dequantize(x.dtype).t()
    product = product if bias is None else product + bias
    return product if lora is None else lora_reference(product, x, lora, slots)


@triton.jit
def _row_kernel(
    p_x, p_words, p_table, p_zeros, p_scales, p_minima, p_dynamic, p_nested, p_offset,
    p_bias, p_z, p_b, p_lora_scales, p_slots, p_out,
    num_inputs, num_outputs, num_columns, num_tiles, num_groups, tiles_each, num_adapters, rank,
    FORMAT: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr, Z_SPLITS: tl.constexpr, RANKS: tl.constexpr, GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y of one row x [K]; or, of several splits, this one's sums, fp32 [SPLITS, N]. GROUP 0: one scale a row."""
    block, split = tl.program_id(0), tl.program_id(1)
    o_n, m_n = output_columns(block, num_columns, OUTPUTS, GATED)
    o_in_tile = tl.arange(0, PER)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    b_sum = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for tile in tl.range(split * tiles_each, tl.minimum((split + 1) * tiles_each, num_tiles), num_stages=STAGES):
        o_k = tile * (PER * ROWS) + o_in_tile
        b_x = tl.load(p_x + o_k, mask=o_k < num_inputs, other=0.0, eviction_policy="evict_last").to(tl.float32)
        b_values = tile_values(
            p_words, p_table, p_zeros, tile, o_n, m_n, num_outputs, FORMAT, PER, ROWS, GROUP, tl.float32
        )
        if GROUP == 1:
            b_values = scaled_elements(b_values, p_scales, p_minima, tile, o_n, m_n, num_outputs, PER, ROWS)
        b_part = tl.sum(b_values * b_x[:, :, None], axis=0)
        if GROUP > 1:
            group = tile * (PER * ROWS) // GROUP
            b_part *= group_scales(p_scales, p_dynamic, p_nested, p_offset, group, num_groups, o_n, m_n, num_outputs)[
                None, :
            ]
            if p_minima is not None:
                b_part += tl.sum(b_x, axis=0)[:, None] * group_minima(p_minima, group, o_n, m_n, num_outputs)[None, :]
        b_sum += b_part
    b_y = tl.sum(b_sum, axis=0)
    if GROUP == 0:
        b_y *= tl.load(p_scales + o_n, mask=m_n, other=0.0)
    o_t = tl.arange(0, 1)
    finish(
        b_y[None, :], p_bias, p_z, p_b, p_lora_scales, p_slots, p_out + tl.cast(split, tl.int64) * num_columns, block,
        o_t, o_t < 1, o_n, m_n, 1, num_outputs, num_columns, num_adapters, rank, Z_SPLITS, RANKS, GATED, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    p_x, p_words, p_table, p_zeros, p_scales, p_minima, p_dynamic, p_nested, p_offset,
    p_bias, p_z, p_b, p_lora_scales, p_slots, p_out,
    num_rows, num_inputs, num_outputs, num_columns, num_tiles, num_groups, tiles_each, num_adapters, rank, stride_x,
    FORMAT: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr, Z_SPLITS: tl.constexpr, RANKS: tl.constexpr, GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y of x [T, K]; or, of several splits, this one's sums, fp32 [SPLITS, T, N]. GROUP 0: one scale a row."""
    TILE: tl.constexpr = PER * ROWS
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    block, split = tl.program_id(0), tl.program_id(2)
    o_n, m_n = output_columns(block, num_columns, OUTPUTS, GATED)
    o_t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < num_rows
    p_rows = p_x + o_t.to(tl.int64)[:, None] * stride_x
    b_sum = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
    for tile in tl.range(split * tiles_each, tl.minimum((split + 1) * tiles_each, num_tiles)):
        o_k = tile * TILE + tl.arange(0, TILE)[None, :]
        mask = m_t[:, None] & (o_k < num_inputs)
        b_x = tl.load(p_rows + o_k, mask=mask, other=0.0, eviction_policy="evict_last")
        if GROUP == 1:
            b_w = scaled_tile(
                p_words, p_table, p_zeros, p_scales, p_minima, p_dynamic, p_nested, p_offset, tile, o_n, m_n,
                num_groups, num_outputs, FORMAT, PER, ROWS, GROUP,
            )  # fmt: skip
            b_w = as_operand(b_w, DTYPE, INTERPRETED)
        else:
            b_values = tile_values(
                p_words, p_table, p_zeros, tile, o_n, m_n, num_outputs, FORMAT, PER, ROWS, GROUP, DTYPE
            )
            b_w = tl.reshape(b_values, [TILE, OUTPUTS])
        if GROUP > 1:
            b_part = dot(b_x, b_w, tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32), INTERPRETED)
            group = tile * TILE // GROUP
            b_scales = group_scales(p_scales, p_dynamic, p_nested, p_offset, group, num_groups, o_n, m_n, num_outputs)
            b_sum += b_part * b_scales[None, :]
            if p_minima is not None:
                b_minima = group_minima(p_minima, group, o_n, m_n, num_outputs)
                b_sum += tl.sum(b_x.to(tl.float32), axis=1)[:, None] * b_minima[None, :]
        else:
            b_sum = dot(b_x, b_w, b_sum, INTERPRETED)
    if GROUP == 0:
        b_sum *= tl.load(p_scales + o_n, mask=m_n, other=0.0)[None, :]
    finish(
        b_sum, p_bias, p_z, p_b, p_lora_scales, p_slots, p_out + tl.cast(split, tl.int64) * num_rows * num_columns,
        block, o_t, m_t, o_n, m_n, num_rows, num_outputs, num_columns, num_adapters, rank, Z_SPLITS, RANKS, GATED,
        INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits_kernel(
    p_parts, p_bias, p_z, p_b, p_lora_scales, p_slots, p_out,
    num_rows, num_outputs, num_columns, num_adapters, rank,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, Z_SPLITS: tl.constexpr, RANKS: tl.constexpr,
    GATED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """y of sums in parts, [SPLITS, T, N], added in their order."""
    block = tl.program_id(0)
    o_n, m_n = output_columns(block, num_columns, OUTPUTS, GATED)
    o_t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < num_rows
    o_parts = o_t.to(tl.int64)[:, None] * num_outputs + o_n[None, :]
    b_sum = tl.zeros([TOKENS, OUTPUTS], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        p_part = p_parts + tl.cast(split, tl.int64) * num_rows * num_outputs
        b_sum += tl.load(p_part + o_parts, mask=m_t[:, None] & m_n[None, :], other=0.0)
    finish(
        b_sum, p_bias, p_z, p_b, p_lora_scales, p_slots, p_out, block, o_t, m_t, o_n, m_n,
        num_rows, num_outputs, num_columns, num_adapters, rank, Z_SPLITS, RANKS, GATED, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _grad_input_kernel(
    p_grad, p_words, p_table, p_zeros, p_scales, p_minima, p_dynamic, p_nested, p_offset, p_out,
    num_rows, num_inputs, num_outputs, num_groups, stride_grad,
    FORMAT: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of dx [T, K]: TOKENS rows and the k of one tile of the weight, summed over all outputs."""
    TILE: tl.constexpr = PER * ROWS
    tile = tl.program_id(0)
    o_t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < num_rows
    p_rows = p_grad + o_t.to(tl.int64)[:, None] * stride_grad
    b_sum = tl.zeros([TOKENS, TILE], dtype=tl.float32)
    for start in tl.range(0, num_outputs, OUTPUTS):
        o_n = start + tl.arange(0, OUTPUTS)
        m_n = o_n < num_outputs
        b_grad = tl.load(p_rows + o_n[None, :], mask=m_t[:, None] & m_n[None, :], other=0.0)
        b_w = scaled_tile(
            p_words, p_table, p_zeros, p_scales, p_minima, p_dynamic, p_nested, p_offset, tile, o_n, m_n, num_groups,
            num_outputs, FORMAT, PER, ROWS, GROUP,
        )  # fmt: skip
        b_w = as_operand(b_w, p_grad.dtype.element_ty, INTERPRETED)
        b_sum = dot(b_grad, tl.trans(b_w), b_sum, INTERPRETED)
    o_k = tile * TILE + tl.arange(0, TILE)
    o_out = o_t.to(tl.int64)[:, None] * num_inputs + o_k[None, :]
    mask = m_t[:, None] & (o_k < num_inputs)[None, :]
    tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def _expand_kernel(
    p_words, p_table, p_zeros, p_scales, p_minima, p_dynamic, p_nested, p_offset, p_out,
    num_inputs, num_outputs, num_groups,
    FORMAT: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of the weight [N, K], expanded."""
    tile = tl.program_id(0)
    o_n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    m_n = o_n < num_outputs
    b_w = scaled_tile(
        p_words, p_table, p_zeros, p_scales, p_minima, p_dynamic, p_nested, p_offset, tile, o_n, m_n, num_groups,
        num_outputs, FORMAT, PER, ROWS, GROUP,
    )  # fmt: skip
    o_k = tile * (PER * ROWS) + tl.arange(0, PER * ROWS)
    mask = m_n[:, None] & (o_k < num_inputs)[None, :]
    o_out = o_n.to(tl.int64)[:, None] * num_inputs + o_k[None, :]
    tl.store(p_out + o_out, tl.trans(b_w).to(p_out.dtype.element_ty), mask=mask)


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
    return pack_int4(codes) if weight.format == "int4" else codes.contiguous().view(_WIDE_CODES[weight.format])


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
            grad_x = grad_input_on_cpu(grad, ctx.weight) if on_cpu else _grad_input(grad.contiguous(), ctx.weight)
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
) -> Tensor | None:
    """`quantized_linear` in one or two kernels; `gated`: silu(gate) · up of its halves [gate, up].

    None where that is not to be: on the CPU, for many rows, for gradients.
    """
    if isinstance(weight, CpuWeight):
        return None
    learned = (x, bias) if lora is None else (x, bias, lora.a, lora.b)
    if len(x) > _MOST_FUSED_ROWS or wants_gradients(*learned):
        return None
    rows, n = len(x), weight.shape[0]
    columns = n // 2 if gated else n
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles = _smallest(_FORWARD_TILES[weight.bits], rows)
    row_blocks = triton.cdiv(rows, tiles.rows)
    splits, tiles_each = _splits(triton.cdiv(n, tiles.outputs) * row_blocks, len(weight.words), x.device)
    operands, adapters, constants = expand_operands(x, lora, slots)
    epilogue = Epilogue((bias, *operands), adapters, constants | {"GATED": gated})
    if splits == 1:
        _launch_product(x, weight, epilogue, out, tiles, tiles_each)
        return out
    parts = torch.empty(splits, rows, n, dtype=torch.float32, device=x.device)
    _launch_product(x, weight, NO_EPILOGUE, parts, tiles, tiles_each)
    tokens, outputs = 1 if rows == 1 else 16, 64
    _add_splits_kernel[(_blocks(columns, outputs, gated=gated), triton.cdiv(rows, tokens))](
        parts, *epilogue.tensors, out, rows, n, columns, *epilogue.adapters, SPLITS=splits, TOKENS=tokens,
        OUTPUTS=outputs, **epilogue.constants, INTERPRETED=is_interpreted(x), num_warps=4,
    )  # fmt: skip
    return out


def _launch_product(
    x: Tensor, weight: TiledWeight, epilogue: Epilogue, out: Tensor, tiles: Tiles, tiles_each: int
) -> None:
    """Into `out`, [T, columns] of x's dtype, or [SPLITS, T, N] in fp32: each split sums `tiles_each` tiles of K."""
    rows, k = x.shape
    columns = out.shape[-1]
    blocks = _blocks(columns, tiles.outputs, gated=epilogue.constants["GATED"])
    splits = triton.cdiv(len(weight.words), tiles_each)
    # One row needs its sums in fp32 only: its table too.
    tensors = x, *_tensors(weight, torch.float32 if rows == 1 else x.dtype), *epilogue.tensors, out
    sizes = k, weight.shape[0], columns, len(weight.words), len(weight.scales)
    numbers = *sizes, tiles_each, *epilogue.adapters
    options = _constants(weight, tiles) | epilogue.constants | {"INTERPRETED": is_interpreted(x)}
    if rows == 1:
        _row_kernel[(blocks, splits)](*tensors, *numbers, STAGES=options["num_stages"], **options)
    else:
        grid = blocks, triton.cdiv(rows, tiles.rows), splits
        _rows_kernel[grid](*tensors, rows, *numbers, x.stride(0), TOKENS=tiles.rows, **options)


def _blocks(columns: int, outputs: int, *, gated: bool) -> int:
    """How many programs share the columns of a result."""
    return triton.cdiv(columns, outputs // 2 if gated else outputs)


def _grad_input(grad: Tensor, weight: TiledWeight) -> Tensor:
    (rows, n), k = grad.shape, weight.shape[1]
    if rows > _MOST_TILED_GRADIENTS:
        return grad @ expand(weight, grad.dtype)
    out = torch.empty(rows, k, dtype=grad.dtype, device=grad.device)
    if rows:
        tiles = _smallest(_BACKWARD_TILES, rows)
        _grad_input_kernel[(len(weight.words), triton.cdiv(rows, tiles.rows))](
            grad, *_tensors(weight, torch.float32), out, rows, k, n, len(weight.scales), grad.stride(0),
            **_constants(weight, tiles), TOKENS=tiles.rows, INTERPRETED=is_interpreted(grad),
        )  # fmt: skip
    return out


def expand(weight: TiledWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] as a matrix of `dtype`."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    _expand_kernel[(len(weight.words), triton.cdiv(n, _EXPAND_TILES.outputs))](
        *_tensors(weight, torch.float32), out, k, n, len(weight.scales), **_constants(weight, _EXPAND_TILES)
    )
    return out


def _tensors(weight: TiledWeight, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    table, dynamic = tables(weight, dtype)
    nested = dynamic, weight.nested_absmax, weight.offset
    return weight.words, table, weight.zeros, weight.scales, weight.minima, *nested


def _constants(weight: TiledWeight, tiles: Tiles) -> dict[str, Any]:
    return {
        "FORMAT": weight.format,
        "PER": 32 // weight.bits,
        "ROWS": weight.words.shape[1],
        "GROUP": weight.group,
        "OUTPUTS": tiles.outputs,
        "num_warps": tiles.num_warps,
        # Where every element brings its scale, fewer tiles fit into shared memory.
        "num_stages": min(2, tiles.num_stages) if weight.group == 1 else tiles.num_stages,
    }


def _smallest(table: dict[int, Tiles], rows: int) -> Tiles:
    """The tiles for the smallest number of rows that is enough, else the largest."""
    return table[next((most for most in table if most >= rows), max(table))]


def _splits(programs: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts K is split so that `programs` times as many fill the GPU twice, and their tiles."""
    wanted = min(_MOST_SPLITS, tiles, max(1, 2 * num_processors(device) // programs))
    tiles_each = triton.cdiv(tiles, wanted)
    return triton.cdiv(tiles, tiles_each), tiles_each
