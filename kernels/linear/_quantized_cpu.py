"""`quantized_linear` on the CPU.

Few rows, and all rows in bf16 where weights are turned, go through `_skinny_cpu`, with AMX rows in bf16 with others
through `_tiles_cpu`; few rows, where that cannot be compiled, in bf16 through torch's packed products. Else a block of
outputs at a time becomes a matrix of the dtype of x: there is never more than a block of the weight in it.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kernels.linear._skinny_cpu import (
    BLOCK_ELEMENTS_IN_C,
    SkinnyWeight,
    chosen_rows,
    expanded_rows,
    linear_in_blocks,
    prepare_skinny,
    skinny_c_product,
    skinny_product,
    slices,
    takes_rows,
)
from kernels.linear._tiles_cpu import takes_tiles, tiled_product, with_tiles
from kernels.linear._turned_cpu import TurnedWeight
from kernels.linear.c_product import CProduct
from kernels.linear.quantization import (
    NF4_BLOCK,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    NF4Weight,
    QuantizedWeight,
    nf4_table,
)

# torch's packed products take many times longer per row above this many rows, so they get no more at once; and with
# several calls they cost less than expanding the weight up to the second number.
_PACKED_ROWS_AT_ONCE, _MOST_PACKED_ROWS = 16, 64
# Where torch expands a block, it is in memory more than once.
_BLOCK_ELEMENTS = 1 << 20
_PACKED_GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A quantized matrix as `prepare_for_cpu` returns it."""

    held: QuantizedWeight | TurnedWeight
    skinny: SkinnyWeight[QuantizedWeight | TurnedWeight] | None = None
    """As `_skinny_cpu` takes it; None if it does not."""
    packed: Tensor | None = None
    """As torch's packed product wants it; None if there is no such product, or no need."""
    packed_scales: Tensor | None = None
    """bf16 [N], or [G, N, 2] with what 0 is worth."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.held.shape


def prepare_for_cpu(weight: QuantizedWeight) -> CpuWeight:
    if isinstance(weight, NF4Weight) and weight.nested_absmax is not None:
        # Reading a doubly quantized absmax takes a quarter of the time of reading a block; in fp32 it costs 0.05 byte.
        weight = replace(weight, absmax=weight.block_scales(), nested_absmax=None, offset=None)
    taken = prepare_skinny(weight)
    return _packed_by_torch(weight) if taken is None else CpuWeight(taken.held, taken)


def shares_codes(prepared: object) -> bool:
    """Whether a prepared weight reads the codes that it was made of where they are."""
    return isinstance(prepared, CpuWeight) and turned_weight(prepared) is None


def turned_weight(prepared: object) -> TurnedWeight | None:
    """What a prepared weight holds, where that is turned."""
    held = prepared.held if isinstance(prepared, CpuWeight) else None
    return held if isinstance(held, TurnedWeight) else None


def _packed_by_torch(weight: QuantizedWeight) -> CpuWeight:
    n, k = weight.shape
    # torch checks neither, and reads beyond the end of its tensors.
    if isinstance(weight, Int8Weight) and weight.has_only_row_scales and not n % 16 and not k % 32:
        return CpuWeight(weight, packed=weight.codes, packed_scales=weight.scales[:, 0].bfloat16())
    if isinstance(weight, Int4Weight) and weight.group in _PACKED_GROUPS and not n % 64 and not k % weight.group:
        codes = weight.elements().to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        # torch computes (code − 8) · scale + shift.
        scales = weight.scales.float()
        shifts = torch.zeros_like(scales) if weight.zeros is None else (8.0 - weight.zeros) * scales
        shifts = shifts if weight.minima is None else 8 * scales + weight.minima
        packed_scales = torch.stack((scales.t(), shifts.t()), dim=-1).bfloat16().contiguous()
        return CpuWeight(weight, packed=packed, packed_scales=packed_scales)
    return CpuWeight(weight)


def linear_on_cpu(x: Tensor, weight: CpuWeight, bias: Tensor | None) -> Tensor:
    if weight.skinny is not None and takes_tiles(x, weight.skinny):
        return _with_bias(tiled_product(x, weight.skinny), bias)
    if weight.skinny is not None and takes_rows(x, weight.skinny):
        return _with_bias(skinny_product(x, weight.skinny), bias)
    if weight.packed is not None and x.dtype == torch.bfloat16 and len(x) <= _MOST_PACKED_ROWS:
        parts = [_packed_product(x[rows].contiguous(), weight) for rows in slices(len(x), _PACKED_ROWS_AT_ONCE)]
        return _with_bias(torch.cat(parts) if parts else x.new_empty(0, weight.shape[0]), bias)
    bias = None if bias is None else bias.to(x.dtype)
    return linear_in_blocks(
        x, weight.shape[0], bias, lambda rows: _expanded(weight, x.dtype, rows), _block_elements(weight)
    )


def linear_on_cpu_in_fp32(x: Tensor, weight: CpuWeight) -> Tensor:
    """The sums that `linear_on_cpu` rounds to the dtype of x, in fp32; rounded after all where torch multiplies."""
    skinny = weight.skinny
    if skinny is not None and takes_tiles(x, skinny):
        return tiled_product(x, skinny, torch.float32)
    if skinny is not None and takes_rows(x, skinny):
        return skinny_product(x, skinny, torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear_on_cpu(x if weight.packed is not None else x.to(wide), weight, None).to(wide)


def quantized_c_product(weight: object, dtype: torch.dtype) -> CProduct | None:
    """What `linear_on_cpu` calls for few rows in this dtype, without a bias; None where that is nothing in C."""
    if not isinstance(weight, CpuWeight) or weight.skinny is None:
        return None
    few = skinny_c_product(weight.skinny, dtype)
    return None if few is None else with_tiles(few, weight.skinny, dtype)


def rows_on_cpu(weight: CpuWeight, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the matrix, [T, K] of `dtype`, of numbers [T] int64; NaN, or IndexError, where it has no such row.

    ValueError for NF4, whose blocks run across rows.
    """
    held = weight.held
    if isinstance(held, NF4Weight):
        raise ValueError("blocks of NF4 run across rows: it holds no embeddings")
    if weight.skinny is not None and dtype in (torch.bfloat16, torch.float32):
        return chosen_rows(weight.skinny, dtype, numbers)
    return held.dequantize(dtype, numbers)


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product.add_(bias)


def _packed_product(x: Tensor, weight: CpuWeight) -> Tensor:
    if isinstance(weight.held, Int4Weight):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight.packed, weight.held.group, weight.packed_scales)
    return torch.ops.aten._weight_int8pack_mm(x, weight.packed, weight.packed_scales)


def grad_input_on_cpu(grad: Tensor, weight: CpuWeight) -> Tensor:
    """dy W, [T, K]: a block of outputs after another, summed in fp32 at least.

    Since forward the weight's memory may have been freed and filled anew elsewhere.
    """
    if weight.skinny is not None:
        weight = replace(weight, skinny=weight.skinny.found_again())
    wide = torch.promote_types(grad.dtype, torch.float32)
    n, k = weight.shape
    out = torch.zeros(len(grad), k, dtype=wide)
    for rows in slices(n, max(1, _block_elements(weight) // k)):
        out += grad[:, rows] @ _expanded(weight, grad.dtype, rows)
    return out.to(grad.dtype)


def _block_elements(weight: CpuWeight) -> int:
    return _BLOCK_ELEMENTS if weight.skinny is None else BLOCK_ELEMENTS_IN_C


def _expanded(weight: CpuWeight, dtype: torch.dtype, rows: slice) -> Tensor:
    """`weight.held.dequantize(dtype, rows)`, faster."""
    held = weight.held
    if weight.skinny is not None and dtype in (torch.bfloat16, torch.float32):
        return expanded_rows(weight.skinny, dtype, rows)
    if isinstance(held, NF4Weight) and not held.shape[1] % NF4_BLOCK:
        return _expanded_nf4(held, dtype, rows)
    if isinstance(held, Fp8Weight):
        return _expanded_fp8(held, dtype, rows)
    return held.dequantize(dtype, rows)


def _expanded_fp8(weight: Fp8Weight, dtype: torch.dtype, rows: slice) -> Tensor:
    """Through fp16, which torch casts many at a time."""
    bits = weight.codes[rows].view(torch.uint8).to(torch.int16)
    # The bits of e4m3 placed into fp16 are the value / 256, below the smallest normal number too.
    values = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(torch.float16).float()
    return (values * 256 * weight.scales[rows, None]).to(dtype)


def _expanded_nf4(weight: NF4Weight, dtype: torch.dtype, rows: slice) -> Tensor:
    """By four codes at a time."""
    k = weight.shape[1]
    codes = weight.codes.view(-1, k // 2)[rows].view(torch.int16).flatten()
    values = torch.take(_nf4_quads(), codes.long()).view(torch.float32).view(-1, NF4_BLOCK)
    values *= weight.block_scales(rows.start * k // NF4_BLOCK, rows.stop * k // NF4_BLOCK)[:, None]
    return values.view(-1, k).to(dtype)


@cache
def _nf4_quads() -> Tensor:
    """What each 16 bits of codes stand for: four fp32 in one complex128, looked up at once. A negative index wraps."""
    bits = torch.arange(1 << 16)
    first, second = bits & 255, bits >> 8  # the lower byte comes first
    codes = torch.stack((first >> 4, first & 15, second >> 4, second & 15), dim=-1)
    return nf4_table(torch.device("cpu"))[codes].view(torch.complex128).flatten()
