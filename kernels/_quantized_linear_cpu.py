"""`quantized_linear` on the CPU: torch's packed products for a few rows, else blocks of the weight one after another.

torch multiplies bf16 with INT8 and INT4 without expanding the weight, with fp32 sums, for a few rows faster than
anything else it has; its scales are bf16. For many rows, other dtypes and formats, a block of outputs is expanded to
the dtype of x and multiplied: there is never more than a block of the weight in that dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantization import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight

# torch's packed products take many times longer per row above this many rows, so they get no more at once; and with
# several calls they cost less than expanding the weight up to the second number.
_PACKED_ROWS_AT_ONCE, _MOST_PACKED_ROWS = 16, 64
_BLOCK_ELEMENTS = 1 << 20
_PACKED_GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A quantized matrix as `prepare_for_cpu` returns it."""

    weight: QuantizedWeight
    packed: Tensor | None = None
    """As torch's packed product wants it; None if there is no such product."""
    packed_scales: Tensor | None = None
    """bf16 [N], or [G, N, 2] with what 0 is worth."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape


def prepare_for_cpu(weight: QuantizedWeight) -> CpuWeight:
    n, k = weight.shape
    # torch checks neither, and reads beyond the end of its tensors.
    if isinstance(weight, Int8Weight) and not n % 16 and not k % 32:
        return CpuWeight(weight, weight.codes, weight.scales.bfloat16())
    if isinstance(weight, Int4Weight) and weight.group in _PACKED_GROUPS and not n % 64 and not k % weight.group:
        codes = weight.elements().to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        # torch computes (code − 8) · scale + shift.
        shifts = torch.zeros_like(weight.scales) if weight.zeros is None else (8.0 - weight.zeros) * weight.scales
        packed_scales = torch.stack((weight.scales.t(), shifts.t()), dim=-1).bfloat16().contiguous()
        return CpuWeight(weight, packed, packed_scales)
    return CpuWeight(weight)


def linear_on_cpu(x: Tensor, weight: CpuWeight, bias: Tensor | None) -> Tensor:
    if weight.packed is not None and x.dtype == torch.bfloat16 and 0 < len(x) <= _MOST_PACKED_ROWS:
        parts = [_packed_product(part, weight) for part in x.contiguous().split(_PACKED_ROWS_AT_ONCE)]
        product = parts[0] if len(parts) == 1 else torch.cat(parts)
        return product if bias is None else product.add_(bias)
    out = x.new_empty(len(x), weight.shape[0])
    for rows in _blocks(weight):
        part = None if bias is None else bias[rows].to(x.dtype)
        out[:, rows] = F.linear(x, _expanded(weight.weight, x.dtype, rows), part)
    return out


def _packed_product(x: Tensor, weight: CpuWeight) -> Tensor:
    if isinstance(weight.weight, Int4Weight):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight.packed, weight.weight.group, weight.packed_scales)
    return torch.ops.aten._weight_int8pack_mm(x, weight.packed, weight.packed_scales)


def grad_input_on_cpu(grad: Tensor, weight: CpuWeight) -> Tensor:
    """dy W, [T, K]: a block of outputs after another, summed in fp32 at least."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    out = torch.zeros(len(grad), weight.shape[1], dtype=wide)
    for rows in _blocks(weight):
        out += grad[:, rows] @ _expanded(weight.weight, grad.dtype, rows)
    return out.to(grad.dtype)


def _blocks(weight: CpuWeight) -> Iterator[slice]:
    """Blocks of outputs of about `_BLOCK_ELEMENTS` weights."""
    n, k = weight.shape
    size = max(1, _BLOCK_ELEMENTS // k)
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _expanded(weight: QuantizedWeight, dtype: torch.dtype, rows: slice) -> Tensor:
    """`weight.dequantize(dtype, rows)`; torch casts FP8 one element at a time, but fp16 many."""
    if not isinstance(weight, Fp8Weight):
        return weight.dequantize(dtype, rows)
    bits = weight.codes[rows].view(torch.uint8).to(torch.int16)
    # The bits of e4m3 placed into fp16 are the value / 256, below the smallest normal number too.
    values = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(torch.float16).float()
    return (values * 256 * weight.scales[rows, None]).to(dtype)
