"""Matrix product of tokens with a weight: y = x Wᵀ + b.

On the CPU a weight can be prepared once for many products: oneDNN then finds it in blocks that it multiplies without
copying. In bf16 that about halves the time of one to four rows (decode), saves a third at eight and a few percent at
hundreds; in fp32, where torch would not use oneDNN, it can save more.

Legend: T tokens, K input features, N output features.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Below this many elements torch's own fp32 product costs less than the call into oneDNN (measured up to 64 rows).
_SMALLEST_FP32_WEIGHT_TO_PACK = 512 * 512


@dataclass(slots=True)
class PreparedWeight:
    """A weight as `prepare_linear_weight` returns it; only `linear` looks inside."""

    weight: Tensor
    """[N, K], opaque to everyone but oneDNN where `packed`."""
    packed: bool

    @torch.no_grad()
    def write(self, rows: slice, values: Tensor) -> None:
        """Gives the outputs `rows` the weights `values`: in the same memory, unless oneDNN has them in its blocks."""
        if not self.packed:
            self.weight[rows].copy_(values)
            return
        whole = self.weight.to_dense()
        whole[rows].copy_(values)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(whole)


def prepare_linear_weight(weight: Tensor) -> PreparedWeight:
    """Return `weight` [N, K] in the form that `linear` multiplies with fastest: a copy, for inference only."""
    weight = weight.detach()
    if _packing_pays(weight):
        return PreparedWeight(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), packed=True)
    return PreparedWeight(weight, packed=False)


def _packing_pays(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and weight.numel() >= _SMALLEST_FP32_WEIGHT_TO_PACK


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` in its plainest form."""
    product = x @ weight.t()
    return product if bias is None else product + bias


def linear(x: Tensor, weight: Tensor | PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, [T, N], of x [T, K], weight [N, K] and bias [N] or None, all of one dtype.

    Differentiable, except with a prepared weight.
    """
    if isinstance(weight, PreparedWeight):
        if weight.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, weight.weight, bias, "none", [], "")
        weight = weight.weight
    return F.linear(x, weight, bias)
