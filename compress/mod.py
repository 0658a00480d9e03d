"""Mixture of depths for a pretrained model: which layers get routers, where the routers start, and their thresholds.

    add_routers          a model that computes what its parent does until somebody is left out
    calibrate            thresholds under which the served rule selects the capacity on a text
    measure_selections   who is selected where under the served rule, and what that costs

Source of the method: arXiv 2404.02258. Legend: T tokens, D hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.prune.depth import PackedBatch, keep_layers
from model.attention import PackedAttention
from model.collectives import ALONE, Group
from model.config import MixtureOfDepths
from model.files.checkpoint import tensor_shapes
from model.layers import Routing
from model.lazy import LazyModel
from model.routed import routed_layers
from model.transformer import Transformer


class RoutingError(ValueError):
    """A model that cannot be routed as asked; the sentence says why."""


def every_nth(num_layers: int, step: int) -> tuple[int, ...]:
    """Every `step`-th layer, counted so that the first layers stay dense: 1, 3, 5, … for 2."""
    return tuple(range(step - 1, num_layers, step))


def least_important(importance: Sequence[float], count: int) -> tuple[int, ...]:
    """The `count` layers that matter least."""
    kept = keep_layers(importance, len(importance) - count)
    return tuple(layer for layer in range(len(importance)) if layer not in kept)


def add_routers(model: Transformer, mixture: MixtureOfDepths) -> Transformer:
    """A new model with routers of zeros: every gate is 1, and whoever is selected is computed as before.

    Raises RoutingError for a model that has routers, ConfigError for layers that it does not have.
    """
    return routed(LazyModel.of(model), mixture).made()


def routed(model: LazyModel, mixture: MixtureOfDepths) -> LazyModel:
    """The same of a model that is not made yet."""
    if model.config.mixture_of_depths is not None:
        raise RoutingError("the model already has routers; start from its dense parent")
    config = replace(model.config, mixture_of_depths=mixture)
    zeros = {name: torch.zeros(shape) for name, shape in tensor_shapes(config).items() if name not in model.weights}
    return replace(model, config=config).with_weights(zeros)


def set_thresholds(model: Transformer, thresholds: Sequence[float]) -> None:
    """Changes the served rule of a routed model, in its layers and in its configuration."""
    mixture = model.config.mixture_of_depths
    if mixture is None:
        raise RoutingError("the model has no routers")
    model.config = replace(model.config, mixture_of_depths=replace(mixture, thresholds=tuple(thresholds)))
    for layer, threshold in zip(routed_layers(model), thresholds, strict=True):
        layer.threshold = threshold


class _Quantiles:
    """Selects the best-scored part of all processes' tokens at each layer, and keeps where that cuts."""

    def __init__(self, capacity: float, group: Group) -> None:
        self.capacity, self.group = capacity, group
        self.thresholds: dict[int, float] = {}

    def __call__(self, layer: int, scores: Tensor) -> Tensor:
        self.thresholds[layer] = torch.quantile(self._everyones(scores).double(), 1 - self.capacity).item()
        return scores > self.thresholds[layer]

    def _everyones(self, scores: Tensor) -> Tensor:
        """`[T]` of this process's tokens -> those of all."""
        lengths = self.group.gather(torch.tensor([[len(scores)]], device=scores.device)).flatten().tolist()
        padded = F.pad(scores, (0, max(lengths) - len(scores)))
        parts = self.group.gather(padded[:, None])[..., 0]
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


@torch.no_grad()
def calibrate(model: Transformer, batches: Sequence[PackedBatch], group: Group = ALONE) -> None:
    """Sets the thresholds under which each routed layer selects its capacity of the tokens in `batches`.

    One forward pass over all of them at once: a layer's scores are those that the layers before it leave.
    group: the processes that do the same, each with the batches dealt to it, of which it may have none.
    """
    mixture = model.config.mixture_of_depths
    if mixture is None:
        raise RoutingError("the model has no routers")
    rule = _Quantiles(mixture.capacity, group)
    if batches:
        _forward(model, _joined(batches), rule)
    else:
        for layer in mixture.layers:
            rule(layer, torch.empty(0, device=model.device))
    set_thresholds(model, [rule.thresholds[layer] for layer in mixture.layers])


@dataclass(frozen=True)
class _Joined:
    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor


def _joined(batches: Sequence[PackedBatch]) -> _Joined:
    lengths = torch.cat([batch.cu_seqlens.diff() for batch in batches])
    return _Joined(
        torch.cat([batch.tokens for batch in batches]),
        torch.cat([batch.positions for batch in batches]),
        torch.cat([lengths.new_zeros(1), lengths]).cumsum(0).int(),
    )


def _forward(model: Transformer, batch: _Joined | PackedBatch, routing: Routing | None) -> Tensor:
    tokens, positions, cu_seqlens = (x.to(model.device) for x in (batch.tokens, batch.positions, batch.cu_seqlens))
    return model(tokens, positions, PackedAttention(model.config, cu_seqlens), routing)


class _ServedRule:
    """The thresholds, and a record of what they select."""

    def __init__(self, mixture: MixtureOfDepths) -> None:
        self.thresholds = dict(zip(mixture.layers, mixture.thresholds, strict=True))
        self.selected: dict[int, Tensor] = {}

    def __call__(self, layer: int, scores: Tensor) -> Tensor:
        self.selected[layer] = scores > self.thresholds[layer]
        return self.selected[layer]


@torch.no_grad()
def measure_selections(model: Transformer, batches: Sequence[PackedBatch]) -> Tensor:
    """Who is selected under the served rule: bool `[routed layers, tokens of all batches]`."""
    mixture = model.config.mixture_of_depths
    if mixture is None:
        raise RoutingError("the model has no routers")
    found = []
    for batch in batches:
        rule = _ServedRule(mixture)
        _forward(model, batch, rule)
        found.append(torch.stack([rule.selected[layer] for layer in mixture.layers]).cpu())
    return torch.cat(found, dim=1)


class RandomRouting:
    """A rule that knows nothing: each token is selected with the capacity as its chance. The baseline of routing."""

    def __init__(self, capacities: Mapping[int, float], seed: int = 0) -> None:
        """`capacities`: by layer."""
        self.capacities = capacities
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, layer: int, scores: Tensor) -> Tensor:
        drawn = torch.rand(len(scores), generator=self._generator)
        return drawn.to(scores.device) < self.capacities[layer]
