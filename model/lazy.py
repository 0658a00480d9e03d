"""Models whose weights are made one at a time, when somebody asks: read from files, drawn, or converted from another's.

What converts a model converts such a one, so that it need not lie anywhere whole, neither before nor after: it can be
made in shards, or a layer at a time while text passes through.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.files.adapter import base_folder, check_base, load_adapter
from model.files.checkpoint import dense_sources, is_quantized, load_config, open_layerwise, tensor_shapes
from model.lora import without_lora
from model.mesh import choose_device
from model.quantized import quantized_layers
from model.tensor_parallel import LAYERS, WHOLE, Layout
from model.transformer import Transformer, fresh_weight
from model.unmade import LaterLayers, UnmadeLayers, filled_in_turn

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
        cls, folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> "LazyModel":
        """That of a folder, by default on the CPU. Raises as `load_model` does: for names at once, for a tensor when it
        is made."""
        config, device = load_config(folder), device or choose_device("cpu")
        weights = {name: partial(_read, read, dtype, device) for name, read in dense_sources(folder).items()}
        return cls(config, weights, dtype, device)

    @classmethod
    def fresh(cls, config: ModelConfig, seed: int) -> "LazyModel":
        """That of a model that nobody has trained, as `Transformer.initialize` makes it; fp32 on the CPU."""
        draws, shapes = _Draws(config, seed), tensor_shapes(config)
        weights = {name: partial(draws.weight, number) for number, name in enumerate(shapes)}
        return cls(config, weights, torch.float32, torch.device("cpu"))

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

    def unmade(self) -> Transformer:
        """A model to be trained in shards (model/unmade.py)."""
        return unmade(*self.opened()).requires_grad_(True)

    def passing(self) -> Transformer:
        """A model to pass text through without gradients, of which a layer is in memory while it is at work."""
        return passing(*self.opened())


def open_published(
    folder: Path, dtype: torch.dtype, device: torch.device | str, layout: Layout = WHOLE
) -> tuple[Transformer, Callable[[int], object]]:
    """As `open_layerwise`, of a folder that may carry an adapter, all of which is in memory."""
    if (base := base_folder(folder)) == folder:
        return open_layerwise(folder, dtype=dtype, device=device, layout=layout)
    check_base(folder, base)
    model = unmade_of_folder(base, dtype, device, layout)
    load_adapter(model, folder, layout)
    return model.eval(), filled_in_turn(model.requires_grad_(False))


def unmade_of_folder(
    folder: Path, dtype: torch.dtype, device: torch.device | str, layout: Layout = WHOLE
) -> Transformer:
    """That of a folder without an adapter, to be sharded; a layer is in memory at a time.

    Quantized layers are read here too: the numbers in files tell how they are stored.
    """
    model, load_layer = open_layerwise(folder, dtype=dtype, device=device, layout=layout)
    return unmade(model, load_layer, reads_shapes=is_quantized(folder))


def unmade(model: Transformer, load_layer: Callable[[int], None], *, reads_shapes: bool = False) -> Transformer:
    """One whose layers hold no memory yet, to be trained in shards (model/unmade.py).

    `reads_shapes`: layers are loaded once before, one after the other, and tell what they consist of.
    """
    for number, layer in enumerate(model.model.layers):
        if reads_shapes:
            load_layer(number)
        _empty(layer, model)
    model.model.layers = UnmadeLayers(model.model.layers, load_layer)
    return model


def _empty(layer: nn.Module, model: Transformer) -> None:
    """Leaves shapes, of tensors of one element."""

    def hollow(parameter: Tensor) -> Tensor:
        dtype = model.dtype if parameter.is_floating_point() else parameter.dtype
        return torch.zeros((), dtype=dtype, device=model.device).expand(parameter.shape)

    layer.load_state_dict({name: hollow(parameter) for name, parameter in layer.named_parameters()}, assign=True)
    for quantized in quantized_layers(layer).values():
        quantized.empty()


def passing(model: Transformer, load_layer: Callable[[int], object]) -> Transformer:
    """One whose layers hold no memory yet, likewise; `fuse` has each layer fused whenever it comes."""

    @contextmanager
    def made(layer: nn.Module, number: int) -> Iterator[nn.Module]:
        load_layer(number)
        form = copy.deepcopy(layer, weights_of(layer))
        try:
            yield form
        finally:
            form._modules.clear()  # whoever was at work with it may hold it until the next one has come
            with without_lora(layer):
                layer.to_empty(device="meta")

    model.model.layers = PassingLayers(model.model.layers, made)
    return model


def passing_copy(model: Transformer, cast: Callable[[nn.Module], nn.Module]) -> Transformer:
    """The same of a model in memory, with whatever its layers carry: `cast` makes of a copy what is at work.

    What is not in layers is copied at once.
    """
    form = copy.deepcopy(model, weights_of(model))
    for owner, name in ((form.model, "embed_tokens"), (form.model, "norm"), (form, "lm_head")):
        if (module := getattr(owner, name)) is not None:
            setattr(owner, name, cast(copy.deepcopy(module)))
    form.model.layers = PassingLayers(form.model.layers, lambda layer, number: nullcontext(cast(copy.deepcopy(layer))))
    return form


def weights_of(module: nn.Module) -> dict[int, Any]:
    """For `deepcopy`: what a copy shares."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    for layer in quantized_layers(module).values():
        shared |= {id(held): held for held in (layer._weight, layer._prepared)}
    return shared


class PassingLayers(LaterLayers):
    """Layers that are there while whoever iterates over them is at work with them; `children()` asks for none."""

    def __init__(
        self, layers: nn.ModuleList, at_work: Callable[[nn.Module, int], AbstractContextManager[nn.Module]]
    ) -> None:
        super().__init__(layers)
        self._at_work = at_work

    def __iter__(self) -> Iterator[nn.Module]:
        return self._passed(range(len(self)))

    def __reversed__(self) -> Iterator[nn.Module]:
        return self._passed(range(len(self))[::-1])

    def _passed(self, numbers: range) -> Iterator[nn.Module]:
        for number in numbers:
            with self._at_work(self.get_submodule(str(number)), number) as layer:
                yield self.arrived(layer, number)

    def __getitem__(self, wanted: Any) -> Any:
        return self._passed(range(len(self))[wanted]) if isinstance(wanted, slice) else super().__getitem__(wanted)


class _Draws:
    """Weights that are drawn one after the other, of which one is asked for."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config, self._shapes = config, [*tensor_shapes(config).items()]
        self._generator = torch.Generator().manual_seed(seed)
        self._states = [self._generator.get_state()]
        """Before each weight, as far as has been drawn."""

    def weight(self, number: int) -> Tensor:
        while len(self._states) <= number:
            self._draw(len(self._states) - 1)
        return self._draw(number)

    def _draw(self, number: int) -> Tensor:
        self._generator.set_state(self._states[number])
        drawn = fresh_weight(self._config, *self._shapes[number], self._generator)
        if number + 1 == len(self._states):
            self._states.append(self._generator.get_state())
        return drawn


def _copied(parameter: Tensor) -> Tensor:
    return parameter.detach().clone()


def _read(read: MakeWeight, dtype: torch.dtype, device: torch.device) -> Tensor:
    return read().to(device, dtype)
