"""Depth pruning: find out on data which layers matter, and keep those.

    block influence      1 - E[cos(x_l, x_{l+1})] of the residual stream before and after layer l (Minitron,
                         arXiv 2407.14679; ShortGPT, arXiv 2403.03853): one forward pass for all layers
    perplexity increase  exp(nll without layer l) - exp(nll): one forward pass a layer

Legend: T tokens, D hidden size.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.linear_cross_entropy import linear_cross_entropy
from model.attention import PackedAttention
from model.transformer import Transformer


class PackedBatch(Protocol):
    """What is needed of a flat ragged batch: tokens, positions and labels `[T]` int64, cu_seqlens `[B+1]` int32."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def cu_seqlens(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...


def block_influence(model: Transformer, batches: Sequence[PackedBatch]) -> list[float]:
    """How much each layer turns the residual stream: 0 leaves it as it is, 2 reverses it."""
    layers = model.model.layers
    cosines = torch.zeros(len(layers), dtype=torch.float64)
    tokens = 0

    def observe(number: int) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, Tensor | None], outputs: tuple[Tensor, Tensor]) -> None:
            before = inputs[0] if inputs[1] is None else inputs[0] + inputs[1]
            after = outputs[0] + outputs[1]
            cosines[number] += torch.cosine_similarity(before.float(), after.float(), dim=-1).sum().double().cpu()

        return hook

    hooks = [layer.register_forward_hook(observe(number)) for number, layer in enumerate(layers)]
    try:
        for batch in batches:
            _hidden(model, batch)
            tokens += len(batch.tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return [1 - cosine / tokens for cosine in cosines.tolist()]


def perplexity_increase(model: Transformer, batches: Sequence[PackedBatch]) -> list[float]:
    """How much the perplexity rises when each layer alone is left out."""
    everything = range(model.config.num_layers)
    base = _nll(model, batches)
    increases = []
    for left_out in everything:
        without = _share(model, tuple(layer for layer in everything if layer != left_out))
        increases.append(math.exp(_nll(without, batches)) - math.exp(base))
    return increases


def keep_layers(importance: Sequence[float], count: int) -> tuple[int, ...]:
    """Indices of the `count` most important layers in ascending order; of equally important ones the earlier stays."""
    if not 1 <= count <= len(importance):
        raise ValueError(f"cannot keep {count} of {len(importance)} layers")
    ranked = sorted(range(len(importance)), key=lambda layer: (-importance[layer], layer))
    return tuple(sorted(ranked[:count]))


def prune_depth(model: Transformer, keep: Sequence[int]) -> Transformer:
    """A new model of the layers `keep` (ascending indices), with copies of their weights and of all others."""
    pruned = _share(model, tuple(keep))
    for parameter in pruned.parameters():
        parameter.data = parameter.detach().clone()
    return pruned.requires_grad_(True)


def _share(model: Transformer, keep: tuple[int, ...]) -> Transformer:
    """The same with the model's own tensors instead of copies."""
    num_layers = model.config.num_layers
    if not keep or any(not 0 <= layer < num_layers for layer in keep) or list(keep) != sorted(set(keep)):
        raise ValueError(f"layers to keep must be ascending indices from 0 to {num_layers - 1}, not {keep}")
    with torch.device("meta"):
        pruned = Transformer(model.config.keep_layers(keep))
    new_number = {old: new for new, old in enumerate(keep)}
    weights = {}
    for name, parameter in model.named_parameters():
        prefix, layers, rest = name.partition("model.layers.")
        if layers:
            number, _, rest = rest.partition(".")
            if int(number) not in new_number:
                continue
            name = f"{prefix}{layers}{new_number[int(number)]}.{rest}"
        weights[name] = parameter.detach()
    pruned.load_state_dict(weights, assign=True)
    return pruned.eval()


@torch.no_grad()
def _hidden(model: Transformer, batch: PackedBatch) -> Tensor:
    tokens, positions, cu_seqlens = (x.to(model.device) for x in (batch.tokens, batch.positions, batch.cu_seqlens))
    return model(tokens, positions, PackedAttention(model.config, cu_seqlens))


@torch.no_grad()
def _nll(model: Transformer, batches: Sequence[PackedBatch]) -> float:
    """Mean over all labels, nats."""
    total, labels = 0.0, 0
    for batch in batches:
        wanted = batch.labels.to(model.device)
        total += linear_cross_entropy(_hidden(model, batch), model.head_weight, wanted).item()
        labels += int((wanted != -100).sum())
    return total / max(labels, 1)
