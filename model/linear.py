"""Linear layers and embeddings, each with a place for an adapter.

T tokens, D hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.linear.dense import PreparedWeight, linear
from model.formats.dense import DENSE
from model.lora import EmbeddingLora, Lora
from model.quantized import QuantizedEmbedding, QuantizedLinear


class Linear(nn.Linear):
    """`x [T, in] -> [T, out]`, plus an adapter if it carries one."""

    format = DENSE

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.lora: Lora | None = None

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def prepared_weight(self) -> PreparedWeight:
        """The weight for inference."""
        return self.format.prepare(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)
        return y if self.lora is None else self.lora(x, y, self)

    @torch.no_grad()
    def times(self, x: Tensor) -> Tensor:
        """See `model.lora.AdaptedLinear`."""
        return linear(x, self.weight.float())

    @torch.no_grad()
    def row_squares(self) -> Tensor:
        """See `model.lora.AdaptedLinear`."""
        return self.weight.float().square().sum(1)


AnyLinear = Linear | QuantizedLinear


class Embedding(nn.Embedding):
    """`tokens [T] int64 -> [T, D]`, plus an adapter if it carries one."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.lora: EmbeddingLora | None = None

    def reset_parameters(self) -> None:
        # Where there are shapes alone, PyTorch would import a second or two of Python to draw no numbers.
        if not self.weight.is_meta:
            super().reset_parameters()

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def forward(self, tokens: Tensor) -> Tensor:
        y = F.embedding(tokens, self.weight)
        return y if self.lora is None else self.lora(tokens, y)


AnyEmbedding = Embedding | QuantizedEmbedding
