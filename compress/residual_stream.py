"""A batch on its way through the layers of a model, one layer at a time: what calibration works on.

Legend: T tokens, D hidden size, Hq query heads, d head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from compress.prune.depth import PackedBatch
from model.attention import PackedAttention
from model.layers import DecoderLayer
from model.transformer import Transformer


class _EnoughRead(Exception):
    """Ends a run through a layer whose rest nobody needs."""


class ResidualStream:
    """What the layers so far have made of one batch, on the model's device."""

    @torch.no_grad()
    def __init__(self, model: Transformer, batch: PackedBatch) -> None:
        tokens, positions, cu_seqlens = (x.to(model.device) for x in (batch.tokens, batch.positions, batch.cu_seqlens))
        self._delta: Tensor = model.embed(tokens)
        self._residual: Tensor | None = None
        self._rotary, self._attention = model.rotary(positions), PackedAttention(model.config, cu_seqlens)

    @property
    def value(self) -> Tensor:
        """The stream before the next layer, `[T, D]` fp64."""
        return self._delta.double() if self._residual is None else self._delta.double() + self._residual.double()

    @torch.no_grad()
    def normed(self, layer: DecoderLayer) -> Tensor:
        """What the attention of this, the next layer reads, `[T, D]`."""
        return layer.before_attention(self._delta, self._residual)[0]

    @torch.no_grad()
    def attended(self, layer: DecoderLayer) -> Tensor:
        """What the output projection of this, the next layer reads, `[T, Hq · d]`."""
        read: list[Tensor] = []

        def observe(_: Any, arguments: tuple[Tensor]) -> None:
            read.append(arguments[0])

        hook = layer.self_attn.o_proj.register_forward_pre_hook(observe)
        try:
            layer.self_attn(self.normed(layer), self._rotary, self._attention)
        finally:
            hook.remove()
        return read[0]

    @torch.no_grad()
    def inputs(self, layer: DecoderLayer, projections: Sequence[str]) -> dict[str, Tensor]:
        """What projections of this, the next layer read, `[T, K]` each; the layer runs up to the last of them.

        With a router: only the tokens that pass, and nothing where none does. The names are given in their order.
        """
        with _reading(layer, projections, last=projections[-1]) as read, suppress(_EnoughRead):
            self._through(layer)
        return read

    @torch.no_grad()
    def pass_on(self, layer: DecoderLayer, projections: Sequence[str] = ()) -> dict[str, Tensor]:
        """Goes through the next layer, and returns what projections of it read on the way, as `inputs` does."""
        with _reading(layer, projections) as read:
            self._delta, self._residual = self._through(layer)
        return read

    def behind(self, layer: DecoderLayer) -> Tensor:
        """The stream behind this, the next layer, `[T, D]`; with gradients of the layer."""
        delta, residual = self._through(layer)
        return delta if residual is None else delta + residual

    def _through(self, layer: DecoderLayer) -> tuple[Tensor, Tensor | None]:
        return layer(self._delta, self._residual, rotary=self._rotary, attention=self._attention)

    @property
    def before_mlp(self) -> Tensor:
        """The stream between attention and MLP of the last layer, `[T, D]`; ValueError behind a layer with a router."""
        if self._residual is None:
            raise ValueError("a layer with a router has no one place between its attention and its MLP")
        return self._residual


@contextmanager
def _reading(
    layer: DecoderLayer, projections: Sequence[str], *, last: str | None = None
) -> Iterator[dict[str, Tensor]]:
    """Fills what it yields with what projections read; the run ends behind the `last` of them with _EnoughRead."""
    read: dict[str, Tensor] = {}

    def observe(name: str, _: Any, arguments: tuple[Tensor]) -> None:
        read[name] = arguments[0]
        if name == last:
            raise _EnoughRead

    hooks = [layer.get_submodule(n).register_forward_pre_hook(partial(observe, n)) for n in projections]
    try:
        yield read
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(model: Transformer) -> list[DecoderLayer]:
    """The layers in order, under their own type."""
    return [layer for layer in model.model.layers.children() if isinstance(layer, DecoderLayer)]


def passed_layers(model: Transformer, *, backwards: bool = False) -> Iterator[DecoderLayer]:
    """The same one by one: of `LazyModel.passing`, each has its weights until the next one is asked for."""
    layers = model.model.layers
    return cast("Iterator[DecoderLayer]", reversed(layers) if backwards else iter(layers))
