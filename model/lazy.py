"""Models whose weights are made one at a time, when somebody asks: read from files, or converted from another's.

What converts a model converts such a one, so that it need not lie anywhere whole, neither before nor after: it can be
made in shards, or a layer at a time while text passes through.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.files.checkpoint import dense_sources, load_config
from model.tensor_parallel import LAYERS
from model.transformer import Transformer

MakeWeight = Callable[[], Tensor]


@dataclass(frozen=True)
class LazyModel:
    """A dense model by what makes its weights, each anew."""

    config: ModelConfig
    weights: Mapping[str, MakeWeight]
    """By the names of its parameters; of one dtype, on one device."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: Transformer) -> "LazyModel":
        """That of a model in memory: its weights are copied."""
        copies = {name: partial(_copied, parameter) for name, parameter in model.named_parameters()}
        return cls(model.config, copies, model.dtype, model.device)

    @classmethod
    def of_folder(
        cls, folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> "LazyModel":
        """That of a folder. Raises as `load_model` does: for names at once, for a tensor when it is made."""
        config, device = load_config(folder), torch.device(device)
        weights = {name: partial(_read, read, dtype, device) for name, read in dense_sources(folder).items()}
        return cls(config, weights, dtype, device)

    def with_weights(self, weights: Mapping[str, Tensor]) -> "LazyModel":
        """The same with these instead of its own."""
        casts = {name: partial(weight.to, self.device, self.dtype, copy=True) for name, weight in weights.items()}
        return replace(self, weights={**self.weights, **casts})

    def made(self) -> Transformer:
        """All of it, to be trained or asked."""
        with torch.device("meta"):
            model = Transformer(self.config)
        model.load_state_dict({name: make() for name, make in self.weights.items()}, assign=True)
        return model.requires_grad_(True).eval()

    def opened(self) -> tuple[Transformer, Callable[[int], None]]:
        """A model whose decoder layers hold no memory yet, and what makes one by its number."""
        with torch.device("meta"):
            model = Transformer(self.config)

        def load(names: list[str]) -> None:
            model.load_state_dict({name: self.weights[name]() for name in names}, strict=False, assign=True)

        load([name for name in self.weights if not name.startswith(LAYERS)])
        of_layers = [
            [name for name in self.weights if name.startswith(f"{LAYERS}{number}.")]
            for number in range(self.config.num_layers)
        ]
        return model.eval(), lambda number: load(of_layers[number])

    def passing(self) -> Transformer:
        """A model to pass text through without gradients, of which a layer is in memory while it is at work."""
        model, load_layer = self.opened()
        model.model.layers = PassingLayers(model.model.layers, load_layer)
        return model


class PassingLayers(nn.ModuleList):
    """Layers that have their weights while whoever iterates over them is there; `children()` asks for none."""

    def __init__(self, layers: nn.ModuleList, load_layer: Callable[[int], None]) -> None:
        super().__init__(layers.children())
        self._load_layer = load_layer

    def __iter__(self) -> Iterator[nn.Module]:
        return self._passed(range(len(self)))

    def __reversed__(self) -> Iterator[nn.Module]:
        return self._passed(range(len(self))[::-1])

    def _passed(self, numbers: range) -> Iterator[nn.Module]:
        for number in numbers:
            layer = self.get_submodule(str(number))
            self._load_layer(number)
            try:
                yield layer
            finally:
                layer.to_empty(device="meta")

    def __getitem__(self, wanted: Any) -> Any:
        return self._passed(range(len(self))[wanted]) if isinstance(wanted, slice) else super().__getitem__(wanted)


def _copied(parameter: Tensor) -> Tensor:
    return parameter.detach().clone()


def _read(read: MakeWeight, dtype: torch.dtype, device: torch.device) -> Tensor:
    return read().to(device, dtype)
