"""Learned rounding (AutoRound): which way each weight goes, and how wide each grid is, so that a layer's output stays.

    ŵ = s · (clamp(round(w / s + V) + z, 0, 2^bits − 1) − z),   V in [−½, ½]
    s = (α · highest + β · lowest) / (2^bits − 1),   z = round(β · lowest / s)      of a group, by the range it had
    s = α · s,   z as it was                                                        if symmetric

V starts at 0, α and β at 1: at the grid and the levels of plain rounding. All weights of a decoder layer are learned at
once, towards what the dense layer makes of the dense model's text, from what the quantized layers before make of it.
Steps go by the sign of the gradient, for which rounding counts as the identity, and shrink to zero, so that in all none
can move V by more than ½. Each takes one text. The start is kept where it costs less on all of them.

Source: https://arxiv.org/abs/2309.05516.

Legend: T tokens, D hidden size, N output features, K input features, G groups of a row, g elements of a group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.quantize.inputs import consumers_in
from compress.residual_stream import ResidualStream
from kernels.linear.quantization import IntegerWeight
from model.formats.base import IntegerFormat
from model.layers import DecoderLayer
from model.quantized import quantized_layers, set_quantized

_NARROWEST = 0.5
"""Of its range at the start, what a grid still covers."""


def learn_rounding(
    layer: DecoderLayer,
    dense: Mapping[str, Tensor],
    streams: Sequence[ResidualStream],
    targets: Sequence[Tensor],
    *,
    iterations: int,
    scale_dtype: torch.dtype,
) -> None:
    """Gives the quantized projections of a layer, by name, the levels and scales that it learns from there on.

    dense: their weights [N, K] before rounding. targets [T, D]: what is to come out of the layer for each stream,
    which stand before it. Layers whose levels are not integers stay.
    """
    start = {name: one for name, one in quantized_layers(layer).items() if isinstance(one.format, IntegerFormat)}
    if not start or not iterations:
        return
    before = _error(layer, streams, targets)
    learning = {name: LearnedLinear(one, dense[name], scale_dtype) for name, one in start.items()}
    for name, one in learning.items():
        layer.set_submodule(name, one)
    _descend(layer, list(learning.values()), streams, targets, iterations)
    for name, one in learning.items():
        set_quantized(layer, name, one.exported(), one.format)
    if _error(layer, streams, targets) >= before:
        for name, first in start.items():
            layer.set_submodule(name, first)


@torch.no_grad()
def output_errors(
    layer: DecoderLayer, dense: Mapping[str, Tensor], streams: Sequence[ResidualStream]
) -> dict[str, float]:
    """Of quantized projections by name: squared error of their outputs over their square, before rounding `dense`."""
    rounded = quantized_layers(layer)
    differences = {name: rounded[name].weight.dequantize() - weight for name, weight in dense.items()}
    errors, squares = dict.fromkeys(dense, 0.0), dict.fromkeys(dense, 0.0)
    inputs = consumers_in(layer)
    for stream in streams:
        for first, x in stream.inputs(layer, list(inputs)).items():
            for name in set(inputs[first]) & dense.keys():
                errors[name] += float((x.float() @ differences[name].T).square().sum())
                squares[name] += float((x.float() @ dense[name].float().T).square().sum())
    return {name: error / squares[name] if squares[name] else 0.0 for name, error in errors.items()}


def _descend(
    layer: DecoderLayer,
    learning: "Sequence[LearnedLinear]",
    streams: Sequence[ResidualStream],
    targets: Sequence[Tensor],
    iterations: int,
) -> None:
    order = torch.Generator().manual_seed(0)
    learned = [parameter for linear in learning for parameter in linear.learned]
    for step in range(iterations):
        if step % len(streams) == 0:
            drawn = torch.randperm(len(streams), generator=order).tolist()
        number = drawn[step % len(streams)]
        with torch.enable_grad():
            error = (streams[number].behind(layer) - targets[number]).square().mean()
            gradients = torch.autograd.grad(error, learned)
        rate = (1 - step / iterations) / iterations
        for parameter, gradient in zip(learned, gradients, strict=True):
            parameter.data.sub_(gradient.sign(), alpha=rate)
        for linear in learning:
            linear.clamp()


def _error(layer: DecoderLayer, streams: Sequence[ResidualStream], targets: Sequence[Tensor]) -> float:
    with torch.no_grad():
        pairs = zip(streams, targets, strict=True)
        return sum(float((stream.behind(layer) - target).double().square().sum()) for stream, target in pairs)


class LearnedLinear(nn.Module):
    """`x [T, K] -> [T, N]` with the weight that V, α and β give."""

    def __init__(self, start: Any, dense: Tensor, scale_dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.bias, self.scale_dtype = start.format, start.bias, scale_dtype
        _, scales, zeros = start.format.unpack(start.weight)
        self.start_scales = scales
        self.zeros = torch.full_like(scales, 2 ** (start.format.bits - 1)) if zeros is None else zeros.float()
        self.weight = dense.float().view(*scales.shape, -1)
        self.offsets = nn.Parameter(torch.zeros_like(self.weight))
        ranges = [torch.ones_like(scales) for _ in range(1 if start.format.symmetric else 2)]
        self.ranges = nn.ParameterList(ranges)

    @property
    def learned(self) -> list[nn.Parameter]:
        return [self.offsets, *self.ranges]

    @torch.no_grad()
    def clamp(self) -> None:
        self.offsets.clamp_(-0.5, 0.5)
        for part in self.ranges:
            part.clamp_(min=_NARROWEST)

    def forward(self, x: Tensor) -> Tensor:
        levels, scales, zeros = self._rounded()
        values = ((levels - zeros[..., None]) * scales[..., None]).flatten(1)
        return F.linear(x, values.to(x.dtype), self.bias)

    @torch.no_grad()
    def exported(self) -> IntegerWeight:
        """The weight that the forward pass multiplies with."""
        levels, scales, zeros = self._rounded()
        stored = None if self.format.symmetric else zeros.to(torch.uint8)
        return self.format.pack(levels.flatten(1).to(torch.uint8), scales, stored)

    def _rounded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Levels [N, G, g], scales and zeros [N, G], fp32."""
        scales, zeros = self._grid()
        steps = self.weight / scales[..., None] + self.offsets
        rounded = _StraightThrough.apply(steps, steps.detach().round())
        return (rounded + zeros[..., None]).clamp(0, self._highest), scales, zeros

    def _grid(self) -> tuple[Tensor, Tensor]:
        if self.format.symmetric:
            return self._stored(self.start_scales * self.ranges[0]), self.zeros
        lowest = self.zeros * self.start_scales * self.ranges[1]
        highest = (self._highest - self.zeros) * self.start_scales * self.ranges[0]
        scales = self._stored((lowest + highest) / self._highest)
        return scales, (lowest / scales).detach().round().clamp(0, self._highest)

    def _stored(self, scales: Tensor) -> Tensor:
        """As files will hold them."""
        return _StraightThrough.apply(scales, scales.detach().to(self.scale_dtype).float())

    @property
    def _highest(self) -> int:
        return 2**self.format.bits - 1


class _StraightThrough(torch.autograd.Function):
    """`rounded`, whose gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
