"""Dense weights in their serving form."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear.c_product import CProduct
from kernels.linear.dense import PreparedWeight, dense_c_product, linear, prepare_linear_weight
from kernels.linear.lora import LoraWeights, lora_add
from model.formats.base import ServingForm


class Dense(ServingForm[Tensor]):
    """Matrices [N, K] of floats."""

    def stack(self, weights: Sequence[Tensor]) -> Tensor:
        return torch.cat([weight.detach() for weight in weights])

    def prepare(self, weight: Tensor) -> PreparedWeight:
        return prepare_linear_weight(weight)

    def product(
        self,
        x: Tensor,
        prepared: PreparedWeight,
        bias: Tensor | None = None,
        lora: LoraWeights | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        y = linear(x, prepared, bias)
        return y if lora is None else lora_add(y, x, lora, slots)

    def c_product(self, prepared: PreparedWeight, dtype: torch.dtype) -> CProduct | None:
        return dense_c_product(prepared, dtype)

    def expanded(self, prepared: PreparedWeight, dtype: torch.dtype) -> Tensor | None:
        return prepared.held if isinstance(prepared.held, Tensor) and not prepared.packed else None


DENSE = Dense()
