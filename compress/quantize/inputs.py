"""What calibration text says of the inputs of linear layers.

Legend: T tokens, K input features.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from compress.quantize.gptq import Compensation, compensation
from compress.residual_stream import ResidualStream
from model.collectives import ALONE, Group
from model.layers import DecoderLayer
from model.linear import Linear

_READERS = {
    "q_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv_proj": ("qkv_proj",),
    "o_proj": ("o_proj",),
    "gate_proj": ("gate_proj", "up_proj"),
    "gate_up_proj": ("gate_up_proj",),
    "down_proj": ("down_proj",),
}
"""Projections that read one input, by the first of them."""


def reads_first(name: str) -> bool:
    """Whether an input of a layer goes by the name of this projection."""
    return name.rpartition(".")[2] in _READERS


def consumers_of(first: str) -> tuple[str, ...]:
    """The projections that read what `first` reads, by names that begin alike."""
    parent, dot, leaf = first.rpartition(".")
    return tuple(f"{parent}{dot}{reader}" for reader in _READERS[leaf])


def consumers_in(layer: DecoderLayer) -> dict[str, tuple[str, ...]]:
    """The distinct inputs of a layer, by the first projection that reads each, in the order of computation."""
    return {name: consumers_of(name) for name, _ in layer.named_modules() if reads_first(name)}


def independent_inputs(layer: DecoderLayer) -> list[list[str]]:
    """The same in groups, of which none depends on itself or on later ones: those of experts are read at once."""
    groups: dict[str, list[str]] = {}
    for name in consumers_in(layer):
        groups.setdefault(name.rpartition(".")[2], []).append(name)
    return list(groups.values())


def is_of_expert(name: str) -> bool:
    """Whether only some tokens pass this projection of a layer: those that its expert was chosen for."""
    return ".experts." in name


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
        return compensation(self.hessian, tokens=self.tokens)

    @classmethod
    def of_none(cls, size: int, device: torch.device) -> Self:
        """Where no token is known: as if features were equally large and independent. GPTQ then plainly rounds."""
        moments = cls(size, device)
        moments.tokens = 1
        moments.hessian.fill_diagonal_(1)
        moments.magnitudes.fill_(1)
        moments.largest.fill_(1)
        return moments

    def add(self, x: Tensor) -> None:
        """Tokens `[T, K]`, at least one."""
        wide = x.float()
        self.tokens += len(wide)
        self.largest = torch.maximum(self.largest, wide.abs().amax(0))
        self.hessian.addmm_(wide.T, wide)
        self.magnitudes += wide.abs().sum(0)

    def add_up(self, group: Group) -> None:
        """Over all processes of a group, which have had other tokens: the same in each of them from here on."""
        if group.count == 1:
            return
        self.tokens = int(group.sum(torch.tensor(self.tokens, device=self.hessian.device)))
        self.hessian, self.magnitudes = group.sum(self.hessian), group.sum(self.magnitudes)
        self.largest = group.largest(self.largest)


@torch.no_grad()
def input_moments(
    streams: Sequence[ResidualStream], layer: DecoderLayer, projections: Sequence[str], group: Group = ALONE
) -> dict[str, InputMoments]:
    """Of some inputs of the streams' next layer, named as in `consumers_in`, in its order.

    `group`: the processes that have other streams of the text; all of them call this.
    """
    layers = {name: projection(layer, name) for name in projections}
    moments = {name: InputMoments(linear.in_features, linear.device) for name, linear in layers.items()}
    for stream in streams:
        for name, x in stream.inputs(layer, projections).items():
            if len(x):
                moments[name].add(x)
    for one in moments.values():
        one.add_up(group)
    return moments
