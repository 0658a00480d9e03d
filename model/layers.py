"""The parts of a transformer layer.

T tokens, D hidden size, I intermediate size, Hq query heads, Hkv KV heads, d head dim.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.linear import PreparedWeight, linear, prepare_linear_weight
from kernels.quantized_linear import PreparedQuantizedWeight, quantized_linear
from kernels.rms_norm import rms_norm
from kernels.rotary_write import HeadNorms
from kernels.swiglu import swiglu
from model.attention import AttentionOverBatch, Turn
from model.config import ModelConfig
from model.lora import EmbeddingLora, Lora
from model.quantized import NF4Linear


class Linear(nn.Linear):
    """`x [T, in] -> [T, out]`, plus an adapter if it carries one."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.lora: Lora | None = None

    @property
    def device(self) -> torch.device:
        return self.weight.device

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


AnyLinear = Linear | NF4Linear


class Embedding(nn.Embedding):
    """`tokens [T] int64 -> [T, D]`, plus an adapter if it carries one."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.lora: EmbeddingLora | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        y = F.embedding(tokens, self.weight)
        return y if self.lora is None else self.lora(tokens, y)


class FusedLinear(nn.Module):
    """Several linear layers that read the same input, on weights prepared for inference.

    Dense layers become one matmul. NF4 layers keep a weight each: their doubly quantized scales do not stack. Adapters
    stay unmerged: all read the input at once, and each adds to its own layer's output.
    """

    def __init__(self, parts: Sequence[AnyLinear]) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in parts]
        self.products = _dense_product(parts) or [(_prepared(part), _detached(part.bias)) for part in parts]
        self.adapters = FrozenAdapters(parts) if any(part.lora is not None for part in parts) else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(
            linear(x, weight, bias) if isinstance(weight, PreparedWeight) else quantized_linear(x, weight, bias)
            for weight, bias in self.products
        )
        parts = outputs[0].split(self.sizes, dim=-1) if len(outputs) == 1 else outputs
        return parts if self.adapters is None else self.adapters(x, parts)


class FrozenAdapters(nn.Module):
    """The unmerged adapters of layers that read the same input, for inference."""

    def __init__(self, parts: Sequence[AnyLinear]) -> None:
        super().__init__()
        self.ranks = [0 if part.lora is None else len(part.lora.a) for part in parts]
        self.a = torch.cat([part.lora.a.detach() for part in parts if part.lora is not None])
        self.b: list[Tensor | None] = []
        """Scaled, and by m/n of DoRA too."""
        self.factors: list[tuple[Tensor, Tensor | None] | None] = []
        """m/n of DoRA, and the bias, which it leaves alone."""
        for part in parts:
            lora = part.lora
            factor = None if lora is None or lora.magnitude is None else lora.dora_factor(part).detach()
            b = None if lora is None else lora.b.detach() * lora.scale
            self.b.append(b if b is None or factor is None else b * factor[:, None])
            self.factors.append(None if factor is None else (factor, _detached(part.bias)))

    def forward(self, x: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        shrunk = F.linear(x, self.a.to(x.dtype)).split(self.ranks, dim=-1)
        return tuple(self._add(number, part, shrunk[number]) for number, part in enumerate(parts))

    def _add(self, number: int, y: Tensor, shrunk: Tensor) -> Tensor:
        b, dora = self.b[number], self.factors[number]
        if b is None:
            return y
        if dora is not None:
            factor, bias = dora
            y = y * factor.to(y.dtype) if bias is None else (y - bias) * factor.to(y.dtype) + bias
        return y + F.linear(shrunk, b.to(y.dtype))


def _dense_product(parts: Sequence[AnyLinear]) -> list[tuple[PreparedWeight | PreparedQuantizedWeight, Tensor | None]]:
    """All parts as one product; none unless all are dense."""
    dense = [part for part in parts if isinstance(part, Linear)]
    if len(dense) < len(parts):
        return []
    weights, biases = [part.weight.detach() for part in dense], [_detached(part.bias) for part in dense]
    whole = [bias for bias in biases if bias is not None]
    return [
        (
            prepare_linear_weight(torch.cat(weights) if len(dense) > 1 else weights[0]),
            torch.cat(whole) if whole else None,
        )
    ]


def _prepared(part: AnyLinear) -> PreparedWeight | PreparedQuantizedWeight:
    return part.prepared_weight if isinstance(part, NF4Linear) else prepare_linear_weight(part.weight)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, computed in fp32.

    The norms of heads hold their weights here and are applied by `kernels/rotary_write.py`.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the norm of `x + residual`, and that sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return rms_norm(x, self.weight, self.eps, residual)


class SelfAttention(nn.Module):
    """Projections around an attention that knows where keys and values live.

    Each projection is a Linear, or an NF4Linear in its place.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.rotates = config.rope_layers[layer]
        query, kv = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.o_proj = Linear(query, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.qkv: FusedLinear | None = None
        self.output: FusedLinear | None = None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: AttentionOverBatch) -> Tensor:
        """`x [T, D] -> [T, D]`; `rotary` is the cosine and sine of each token's angles, `[T, 1, d]` each."""
        q, k, v = (part.view(x.shape[0], -1, self.head_dim) for part in self._project(x))
        turn = Turn(self._norms(), rotary if self.rotates else None)
        mixed = attention(self.layer, q, k, v, turn).reshape(x.shape[0], -1)
        return self.o_proj(mixed) if self.output is None else self.output(mixed)[0]

    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.qkv is not None:
            return self.qkv(x)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def fuse(self) -> None:
        self.qkv = FusedLinear([self.q_proj, self.k_proj, self.v_proj])
        self.output = FusedLinear([self.o_proj])
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, each a Linear, or an NF4Linear in its place."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.gate_up: FusedLinear | None = None
        self.down: FusedLinear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up is not None and self.down is not None:
            gate, up = self.gate_up(x)
            return self.down(swiglu(gate, up))[0]
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    def fuse(self) -> None:
        self.gate_up = FusedLinear([self.gate_proj, self.up_proj])
        self.down = FusedLinear([self.down_proj])
        del self.gate_proj, self.up_proj, self.down_proj


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. Its input is what the last block added and the residual stream before it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        delta: Tensor,
        residual: Tensor | None,
        *,
        rotary: tuple[Tensor, Tensor],
        attention: AttentionOverBatch,
    ) -> tuple[Tensor, Tensor]:
        """`delta [T, D]`, `residual [T, D]` or None in the first layer; the stream is their sum. Returns both anew."""
        normed, residual = self.input_layernorm.add(delta, residual)
        delta = self.self_attn(normed, rotary, attention)
        normed, residual = self.post_attention_layernorm.add(delta, residual)
        return self.mlp(normed), residual
