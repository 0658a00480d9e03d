"""The parts of a transformer layer.

T tokens, D hidden size, Hq query heads, Hkv KV heads, d head dim.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from kernels.attention.rotary import halves_apart
from kernels.attention.rotary_write import HeadNorms
from kernels.rms_norm import rms_norm
from model.attention import AttentionOverBatch
from model.config import ModelConfig
from model.fused import FusedLinear
from model.fused_adapters import AdapterChoices
from model.kv_format import NormRope
from model.linear import Linear
from model.mlp import make_mlp

Rotary = tuple[Tensor, ...]
"""Cosine and sine of each token's angles, `[T, 1, d]` each; where layers with a window have others, then those."""


class RMSNorm(nn.Module):
    """`x / rms(x) * (offset + weight) * scale` over the last dimension, computed in fp32.

    The norms of heads hold their weights here and are applied by `kernels/attention/rotary_write.py`.
    """

    def __init__(self, config: ModelConfig, size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.offset, self.scale, self.eps = config.kind.norm_offset, scale, config.rms_norm_eps
        self.weight = nn.Parameter(torch.full((size,), 1 - self.offset))

    @property
    def factors(self) -> Tensor:
        """What the normalised features are multiplied by, `[D]`."""
        weight = self.weight if self.offset == 0 else self.weight + self.offset
        return weight if self.scale == 1 else weight * self.scale

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the norm of `x + residual`, and that sum."""
        if residual is None:
            return rms_norm(x, self.factors, self.eps), x
        return rms_norm(x, self.factors, self.eps, residual)


class SelfAttention(nn.Module):
    """Projections around an attention that knows where keys and values live.

    Each projection is a Linear, or a QuantizedLinear in its place. Some families join q, k and v to `qkv_proj`.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.rotates = config.rope_layers[layer]
        self.is_local = config.local_rope_theta is not None and config.windows[layer] is not None
        query, kv = config.num_query_heads * config.head_dim, config.kv_heads[layer] * config.head_dim
        self.rotary_dims = config.rotary_dims
        sizes = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        self.sizes = tuple(sizes.values())
        if config.kind.joins_projections:
            sizes = {"qkv_proj": sum(self.sizes)}
        self.parts = tuple(sizes)
        """The names of what makes queries, keys and values."""
        for name, size in sizes.items():
            self.add_module(name, Linear(config.hidden_size, size, bias=config.qkv_bias))
        self.o_proj = Linear(query, config.hidden_size, bias=config.output_bias)
        self.norms_whole = config.qk_norm and config.kind.norms_whole_projections
        normed = (query, kv) if self.norms_whole else (config.head_dim, config.head_dim)
        self.q_norm = RMSNorm(config, normed[0]) if config.qk_norm else None
        self.k_norm = RMSNorm(config, normed[1]) if config.qk_norm else None
        self.qkv: FusedLinear | None = None
        self.output: FusedLinear | None = None

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        attention: AttentionOverBatch,
        slots: Tensor | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        """`x [T, D] -> [T, D]`; `rotary` as in `Rotary`.

        `slots` and `count` as in `FusedLinear`.
        """
        rows = x.shape[0], -1, self.head_dim
        q, k, v = [part.view(rows) for part in self._project(x, slots, count)]
        if self.rotary_dims < self.head_dim:
            q, k = halves_apart(q, self.rotary_dims), halves_apart(k, self.rotary_dims)
        cos, sin = rotary[2:] if self.is_local else rotary[:2]
        norm_rope = NormRope(self._norms(), (cos, sin) if self.rotates else None)
        mixed = attention(self.layer, q, k, v, norm_rope).reshape(x.shape[0], -1)
        output = self.output  # looked up once: a module finds its parts slowly
        return self.o_proj(mixed) if output is None else output.outputs(mixed, slots, count)[0]

    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None or self.norms_whole:
            return None
        return HeadNorms(self.q_norm.factors, self.k_norm.factors, self.q_norm.eps)

    def _project(self, x: Tensor, slots: Tensor | None, count: Tensor | None) -> tuple[Tensor, ...]:
        if (qkv := self.qkv) is not None:
            made = qkv.outputs(x, slots, count)
        else:
            made = tuple([getattr(self, name)(x) for name in self.parts])
        q, k, v = made if len(made) > 1 else made[0].split_with_sizes(self.sizes, -1)
        if self.norms_whole and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.add(q, None)[0], self.k_norm.add(k, None)[0]
        return q, k, v

    def fuse(self, choices: AdapterChoices, dtype: torch.dtype) -> None:
        self.qkv = FusedLinear({name: getattr(self, name) for name in self.parts}, choices, dtype)
        self.output = FusedLinear({"o_proj": self.o_proj}, choices, dtype)
        for name in (*self.parts, "o_proj"):
            delattr(self, name)


class Routing(Protocol):
    """Who passes a layer with a router; model/routed.py has the rules."""

    def __call__(self, layer: int, scores: Tensor) -> Tensor:
        """`scores [T]` fp32 -> who is selected, `[T]` bool. Called anew when a layer is recomputed in backward."""
        ...


class DecoderLayer(nn.Module):
    """Attention and MLP, with norms where the family has them.

    Its input is what the last block added and the residual stream before it.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.names, self.multiplier = config.kind.norms, config.residual_multiplier
        self._add_norms(config, self.names.before_attention)
        self.self_attn = SelfAttention(config, layer)
        self._add_norms(config, self.names.behind_attention, self.names.before_mlp)
        self.mlp = make_mlp(config, layer)
        self._add_norms(config, self.names.behind_mlp)

    def _add_norms(self, config: ModelConfig, *names: str | None) -> None:
        for name in filter(None, names):
            self.add_module(name, RMSNorm(config, config.hidden_size))

    def norm(self, name: str | None) -> RMSNorm | None:
        """One of `names`."""
        return None if name is None else getattr(self, name)

    def before_attention(self, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What attention reads of the stream `delta + residual`, and that sum, `[T, D]` each."""
        return _enter(self.norm(self.names.before_attention), delta, residual)

    def before_mlp(self, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same of the MLP."""
        return _enter(self.norm(self.names.before_mlp), delta, residual)

    def attend(
        self,
        x: Tensor,
        rotary: Rotary,
        attention: AttentionOverBatch,
        slots: Tensor | None,
        count: Tensor | None = None,
    ) -> Tensor:
        """What attention adds to the stream; as `SelfAttention.forward`."""
        return self._leave(self.names.behind_attention, self.self_attn(x, rotary, attention, slots, count))

    def feed(self, x: Tensor, slots: Tensor | None, count: Tensor | None = None) -> Tensor:
        """What the MLP adds to the stream; as `MLP.forward`."""
        return self._leave(self.names.behind_mlp, self.mlp(x, slots, count))

    def _leave(self, name: str | None, added: Tensor) -> Tensor:
        if (norm := self.norm(name)) is not None:
            added = norm.add(added, None)[0]
        return added if self.multiplier == 1 else added * self.multiplier

    def forward(
        self,
        delta: Tensor,
        residual: Tensor | None,
        *,
        rotary: Rotary,
        attention: AttentionOverBatch,
        routing: Routing | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`delta [T, D]`, `residual [T, D]` or None (zero); the stream is their sum. Returns both anew.

        `routing` concerns layers with a router; None is the rule by which the model is served. `slots` as in
        `FusedLinear`.
        """
        x, residual = self.before_attention(delta, residual)
        delta = self.attend(x, rotary, attention, slots)
        x, residual = self.before_mlp(delta, residual)
        return self.feed(x, slots), residual


def _enter(norm: RMSNorm | None, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    if norm is not None:
        return norm.add(delta, residual)
    stream = delta if residual is None else delta + residual
    return stream, stream
