"""What calibration text says of the inputs of linear layers.

Legend: T tokens, K input features.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from compress.quantize.gptq import Compensation, compensation
from compress.residual_stream import ResidualStream
from model.layers import DecoderLayer
from model.linear import Linear

CONSUMERS = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.qkv_proj": ("self_attn.qkv_proj",),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.gate_up_proj": ("mlp.gate_up_proj",),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""The distinct inputs of layers, by the first projection that reads each, in the order of computation."""


def consumers_in(layer: DecoderLayer) -> dict[str, tuple[str, ...]]:
    """Those of this layer."""
    there = {name for name, _ in layer.named_modules()}
    return {first: names for first, names in CONSUMERS.items() if first in there}


def projection(layer: DecoderLayer, name: str) -> Linear:
    """One that is not quantized yet; ValueError for another."""
    module = layer.get_submodule(name)
    if not isinstance(module, Linear):
        raise ValueError(f"{name} is quantized already")
    return module


class InputMoments:
    """Sums over the tokens that one input has had, fp32 on their device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tokens = 0
        self.hessian = torch.zeros(size, size, device=device)
        """Σ x xᵀ, [K, K]."""
        self.magnitudes = torch.zeros(size, device=device)
        """Σ |x|, [K]."""
        self.largest = torch.zeros(size, device=device)
        """max |x|, [K]."""

    @property
    def importance(self) -> Tensor:
        """Σ x², [K]."""
        return self.hessian.diagonal()

    @cached_property
    def compensation(self) -> Compensation:
        """Of all tokens: to be asked for once they are in. ValueError if they were not finite."""
        return compensation(self.hessian)

    def add(self, x: Tensor) -> None:
        """Tokens `[T, K]`, at least one."""
        wide = x.float()
        self.tokens += len(wide)
        self.largest = torch.maximum(self.largest, wide.abs().amax(0))
        self.hessian.addmm_(wide.T, wide)
        self.magnitudes += wide.abs().sum(0)


@torch.no_grad()
def input_moments(
    streams: Sequence[ResidualStream], layer: DecoderLayer, projections: Sequence[str]
) -> dict[str, InputMoments]:
    """Of some inputs of the streams' next layer, named as in `CONSUMERS`, in its order."""
    layers = {name: projection(layer, name) for name in projections}
    moments = {name: InputMoments(linear.in_features, linear.device) for name, linear in layers.items()}
    for stream in streams:
        for name, x in stream.inputs(layer, projections).items():
            if len(x):
                moments[name].add(x)
    return moments
