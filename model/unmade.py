"""Layers of a model that get their weights one after the other, when somebody comes to them.

Those of one to be trained in shards get them when they are sharded: until then their tensors have shapes and no memory,
but for what is trained beside them: adapters. Those of model/lazy.py's `passing` get them whenever text passes.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

Do = Callable[[nn.Module, str], None]
"""What is done with a part of a model and the name that it has in it; empty, where that is the model itself."""


class LaterLayers(nn.ModuleList):
    """Such layers; what is to be done with their weights waits until a layer has them."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(layers.children())
        self._then: list[tuple[Do, str]] = []

    def then(self, do: Do, prefix: str) -> None:
        """Has this done with each layer once it has its weights; `prefix`: what the layers are called."""
        self._then.append((do, prefix))

    def arrived(self, layer: nn.Module, number: int) -> nn.Module:
        """Does what waited for the weights of one, which it has now; returns it."""
        for do, prefix in self._then:
            do(layer, f"{prefix}.{number}")
        return layer


class UnmadeLayers(LaterLayers):
    """Those of a model to be trained in shards; `fill` gives one its weights."""

    def __init__(self, layers: nn.ModuleList, load: Callable[[int], None]) -> None:
        super().__init__(layers)
        self._load = load

    def fill(self, number: int) -> nn.Module:
        self._load(number)
        return self.arrived(self[number], number)


def filled_in_turn(model: Any) -> Callable[[int], nn.Module]:
    """What gives a layer of a model its weights, by its number, if it lacks them.

    The model has plain layers from here on.
    """
    layers = model.model.layers
    if not isinstance(layers, UnmadeLayers):
        return lambda number: layers[number]
    model.model.layers = nn.ModuleList(layers.children())
    return layers.fill


def when_made(module: nn.Module, do: Do, prefix: str = "") -> None:
    """Does something with a model: at once as far as it has weights, with layers that lack them once they have."""
    if isinstance(module, LaterLayers):
        module.then(do, prefix)
        return
    if not any(isinstance(part, LaterLayers) for part in module.modules()):
        do(module, prefix)
        return
    for name, child in module.named_children():
        when_made(child, do, f"{prefix}.{name}".lstrip("."))
