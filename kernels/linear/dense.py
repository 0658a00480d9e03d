"""Matrix product of tokens with a weight: y = x Wᵀ + b.

On the CPU a weight can be prepared once for many products:

- In bf16 C reads it in panels, where the processor has AVX-512 BF16 (`_pairs_cpu.py`); elsewhere oneDNN
  finds it in blocks that it multiplies without copying, which about halves the time of one to four rows (decode), saves
  a third at eight and a few percent at hundreds.
- In fp32, if every number is one of bf16 too, as in checkpoints in bf16, bf16 is what stays in memory, and C reads half
  the bytes: half the time of one to five rows, and with AVX-512 of up to 32, with the numbers of fp32. Other weights go
  to oneDNN.

Legend: T tokens, K input features, N output features.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear._pairs_cpu import PairedWeight, multiplies_pairs, paired_c_product, paired_product, prepare_pairs
from kernels.linear._skinny_cpu import (
    BLOCK_ELEMENTS_IN_C,
    SkinnyWeight,
    expanded_rows,
    linear_in_blocks,
    prepare_skinny_numbers,
    skinny_c_product,
    skinny_product,
    takes_rows,
)
from kernels.linear.c_product import CProduct
from kernels.linear.lora import wants_gradients

# Below this many elements torch's own fp32 product costs less than another call (measured up to 64 rows).
_SMALLEST_FP32_WEIGHT_TO_PREPARE = 512 * 512


@dataclass(slots=True)
class PreparedWeight:
    """A weight as `prepare_linear_weight` returns it; only `linear` looks inside."""

    held: Tensor | SkinnyWeight[Tensor] | PairedWeight
    """[N, K]: in bf16 for products of fp32 rows, in panels for those of bf16, or a tensor, opaque to everyone but
    oneDNN where `packed`."""
    packed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.held.shape if isinstance(self.held, SkinnyWeight) else self.held.shape

    @torch.no_grad()
    def write(self, rows: slice, values: Tensor) -> None:
        """Gives the outputs `rows` the weights `values`: in the same memory, unless it is in a form of its own."""
        whole = self._whole()
        whole[rows].copy_(values)
        if whole is not self.held:
            again = prepare_linear_weight(whole)
            self.held, self.packed = again.held, again.packed

    def _whole(self) -> Tensor:
        if isinstance(self.held, SkinnyWeight):
            return self.held.held.float()
        if isinstance(self.held, PairedWeight):
            return self.held.dense()
        return self.held.to_dense() if self.packed else self.held


def prepare_head_weight(weight: Tensor) -> PreparedWeight:
    """As `prepare_linear_weight`, for `linear_in_fp32`."""
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not multiplies_pairs():
        numbers = prepare_skinny_numbers(weight.detach())
        if numbers is not None:
            return PreparedWeight(numbers)
    return prepare_linear_weight(weight)


def prepare_linear_weight(weight: Tensor) -> PreparedWeight:
    """Return `weight` [N, K] in the form that `linear` multiplies with fastest: a copy, for inference only."""
    weight = weight.detach()
    if not _preparing_pays(weight):
        return PreparedWeight(weight)
    if weight.dtype == torch.float32 and _is_in_bf16(weight):
        halves = prepare_skinny_numbers(weight.bfloat16())
        if halves is not None:
            return PreparedWeight(halves)
    pairs = prepare_pairs(weight)
    if pairs is not None:
        return PreparedWeight(pairs)
    return PreparedWeight(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), packed=True)


def _preparing_pays(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and weight.numel() >= _SMALLEST_FP32_WEIGHT_TO_PREPARE


def _is_in_bf16(weight: Tensor) -> bool:
    """Whether every number of an fp32 weight is one of bf16: its lower 16 bits are zero."""
    return not (weight.contiguous().view(torch.int32) & 0xFFFF).any()


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` in its plainest form."""
    product = x @ weight.t()
    return product if bias is None else product + bias


def linear(x: Tensor, weight: Tensor | PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, [T, N], of x [T, K], weight [N, K] and bias [N] or None, all of one dtype.

    Differentiable, except with a prepared weight.
    """
    if not isinstance(weight, PreparedWeight):
        return F.linear(x, weight, bias)
    if isinstance(weight.held, SkinnyWeight):
        return _linear_of_bf16(x, weight.held, bias)
    if isinstance(weight.held, PairedWeight):
        return paired_product(x, weight.held, bias)
    if weight.packed:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight.held, bias, "none", [], "")
    return F.linear(x, weight.held, bias)


def linear_in_fp32(x: Tensor, weight: Tensor | PreparedWeight) -> Tensor:
    """Return x Wᵀ in fp32, [T, N], of x [T, K] and weight [N, K]: the sums, which `linear` rounds to their dtype.

    They are rounded after all where gradients are wanted, and where torch multiplies on the CPU. Of fp64 they stay so.
    """
    if x.dtype in (torch.float32, torch.float64):
        return linear(x, weight)
    held = weight.held if isinstance(weight, PreparedWeight) else weight
    if isinstance(held, PairedWeight):
        return paired_product(x, held, None, torch.float32)
    if isinstance(held, SkinnyWeight):
        return _linear_of_bf16(x.float(), held, None)
    if x.is_cuda and not wants_gradients(x, held):
        return torch.mm(x, held.t(), out_dtype=torch.float32)
    return linear(x, weight).float()


def dense_c_product(weight: PreparedWeight, dtype: torch.dtype) -> CProduct | None:
    """What `linear` calls for few rows in this dtype, without a bias; None where that is nothing in C."""
    if isinstance(weight.held, SkinnyWeight):
        return skinny_c_product(weight.held, dtype)
    return paired_c_product(weight.held) if isinstance(weight.held, PairedWeight) and dtype == torch.bfloat16 else None


def _linear_of_bf16(x: Tensor, weight: SkinnyWeight[Tensor], bias: Tensor | None) -> Tensor:
    if takes_rows(x, weight):
        product = skinny_product(x, weight)
        return product if bias is None else product.add_(bias)
    return linear_in_blocks(
        x, weight.at.n, bias, lambda rows: expanded_rows(weight, x.dtype, rows), BLOCK_ELEMENTS_IN_C
    )
