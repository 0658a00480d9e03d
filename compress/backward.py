"""A way back through a model, a layer at a time: what its own surprise tells of each layer.

The surprise is −log p(y) of tokens y that the model draws itself. Squares of its gradients, in the mean over draws, are
the Fisher information: what a small change costs, in nats of divergence.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from compress.prune.depth import PackedBatch
from compress.residual_stream import passed_layers
from model.attention import PackedAttention
from model.collectives import Group
from model.layers import DecoderLayer
from model.transformer import Transformer

PassBack = Callable[[PackedAttention], None]
"""Through one layer: forward once more, with this attention, and backward."""


def layers_backwards(
    model: Transformer,
    batch: PackedBatch,
    attention: PackedAttention,
    surprise: Callable[[Tensor], Tensor],
    precision: AbstractContextManager[object] | None = None,
) -> Iterator[tuple[DecoderLayer, PassBack]]:
    """The layers of a frozen model, last one first, each with what is to be called before the next is asked for.

    `surprise` is asked once, of hidden states `[T, D]` behind the final norm, for a scalar. Products are computed
    within `precision`. Kept are what layers read; a layer of a passing model is in memory while it is at work.
    """
    precision = precision or nullcontext()
    rotary = model.rotary(batch.positions.to(model.device))
    delta: Tensor = model.embed(batch.tokens.to(model.device)).detach().requires_grad_()
    streams: list[tuple[Tensor, Tensor | None]] = [(delta, None)]
    with torch.enable_grad(), precision:
        for layer in passed_layers(model):
            delta, residual = layer(*streams[-1], rotary=rotary, attention=attention)
            streams.append(_leaves(delta, residual))
        surprise(model.model.norm.add(*streams[-1])[0]).backward()

    def pass_back(layer: DecoderLayer, attention: PackedAttention) -> None:
        leaves = streams.pop()
        with torch.enable_grad(), precision:
            made = layer(*streams[-1], rotary=rotary, attention=attention)
        pairs = [(x, leaf) for x, leaf in zip(made, leaves, strict=True) if leaf is not None and x.requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [leaf.grad for _, leaf in pairs])

    for layer in passed_layers(model, backwards=True):
        yield layer, partial(pass_back, layer)


def draws(model: Transformer, turn: int, group: Group, seed: int) -> torch.Generator:
    """For the batch that a process of the group, each of which has every n-th one, has in this turn.

    What is drawn of a batch does not depend on whose it is.
    """
    return torch.Generator(model.device).manual_seed(seed + turn * group.count + group.index)


def _leaves(delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A stream whose gradients end here."""
    return delta.detach().requires_grad_(), None if residual is None else residual.detach().requires_grad_()
