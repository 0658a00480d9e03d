"""Depth pruning: find out on data which layers matter, and keep those.

    block influence      1 - E[cos(x_l, x_{l+1})] of the residual stream before and after layer l (Minitron,
                         arXiv 2407.14679; ShortGPT, arXiv 2403.03853): one forward pass for all layers
    perplexity increase  exp(nll without layer l) - exp(nll): half a forward pass a layer

Several processes, a `group`, may do the same, each with the batches dealt to it, of which it may have none: sums are
added up over all.

Legend: T tokens, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.losses.linear_cross_entropy import IGNORE_LABEL, linear_cross_entropy
from model.attention import PackedAttention
from model.collectives import ALONE, Group
from model.lazy import LazyModel
from model.tensor_parallel import LAYERS
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


def block_influence(model: Transformer, batches: Sequence[PackedBatch], group: Group = ALONE) -> list[float]:
    """How much each layer turns the residual stream: 0 leaves it as it is, 2 reverses it."""
    num_layers = model.config.num_layers
    cosines, tokens = torch.zeros(num_layers, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in batches:
        trace = _trace(model, batch)
        streams = [_stream(*parts).float() for parts in trace.inputs]
        for number in range(num_layers):
            similarity = torch.cosine_similarity(streams[number], streams[number + 1], dim=-1)
            cosines[number] += similarity.sum().double().cpu()
        tokens += len(batch.tokens)
    cosines, tokens = added_up(group, model.device, cosines, tokens)
    return (1 - cosines / tokens).tolist()


def added_up(group: Group, device: torch.device, *sums: Tensor) -> list[Tensor]:
    """What the processes of a group, each on its device, have found of their batches; on the CPU."""
    return [group.sum(one.to(device)).cpu() for one in sums]


@torch.no_grad()
def perplexity_increase(model: Transformer, batches: Sequence[PackedBatch], group: Group = ALONE) -> list[float]:
    """How much the perplexity rises when each layer alone is left out."""
    num_layers = model.config.num_layers
    totals, labels = torch.zeros(num_layers + 1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in batches:
        trace, wanted = _trace(model, batch), batch.labels.to(model.device)
        # Without layer n, its input goes straight to layer n + 1; the layers before it need not run again.
        for left_out in range(num_layers + 1):
            hidden = trace.finish(model, trace.inputs[left_out], left_out + 1)
            loss = linear_cross_entropy(hidden, model.head_weight, wanted, soft_cap=model.config.logit_soft_cap)
            totals[left_out] += loss.double().cpu()
        labels += int((wanted != IGNORE_LABEL).sum())
    totals, labels = added_up(group, model.device, totals, labels)
    perplexities = (totals / labels.clamp(min=1)).exp().tolist()
    return [perplexity - perplexities[-1] for perplexity in perplexities[:-1]]


def keep_layers(importance: Sequence[float], count: int) -> tuple[int, ...]:
    """Indices of the `count` most important layers in ascending order; of equally important ones the earlier stays."""
    if not 1 <= count <= len(importance):
        raise ValueError(f"cannot keep {count} of {len(importance)} layers")
    ranked = sorted(range(len(importance)), key=lambda layer: (-importance[layer], layer))
    return tuple(sorted(ranked[:count]))


def matching_layers(keep: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Of each layer kept the one of the whole model behind which the stream is as the next layer kept is used to."""
    return (*(layer - 1 for layer in keep[1:]), num_layers - 1)


def prune_depth(model: Transformer, keep: Sequence[int]) -> Transformer:
    """A new model of the layers `keep` (ascending indices), with copies of their weights and of all others."""
    return shortened(LazyModel.of(model), keep).made()


def shortened(model: LazyModel, keep: Sequence[int]) -> LazyModel:
    """A model of the layers `keep` (ascending indices). Raises ValueError for others."""
    keep = tuple(keep)
    num_layers = model.config.num_layers
    if not keep or any(not 0 <= layer < num_layers for layer in keep) or list(keep) != sorted(set(keep)):
        raise ValueError(f"layers to keep must be ascending indices from 0 to {num_layers - 1}, not {keep}")
    new_number = {old: new for new, old in enumerate(keep)}
    weights = {}
    for name, make in model.weights.items():
        prefix, layers, rest = name.partition(LAYERS)
        if layers:
            number, _, rest = rest.partition(".")
            if int(number) not in new_number:
                continue
            name = f"{prefix}{layers}{new_number[int(number)]}.{rest}"
        weights[name] = make
    return replace(model, config=model.config.keep_layers(keep), weights=weights)


@dataclass
class _Trace:
    """What went through the layers in one forward pass."""

    inputs: list[tuple[Tensor, Tensor | None]]
    """Delta and residual before each layer, and after the last."""
    context: dict[str, Any]
    """What every layer is given beside them."""

    def finish(self, model: Transformer, stream: tuple[Tensor, Tensor | None], first: int) -> Tensor:
        """Final hidden states when `stream` enters layer `first`, `[T, D]`; past the last layer, when it leaves it."""
        for layer in model.model.layers[first:]:
            stream = layer(*stream, **self.context)
        return model.model.norm.add(*stream)[0]


@torch.no_grad()
def _trace(model: Transformer, batch: PackedBatch) -> _Trace:
    trace = _Trace([], {})

    def observe(_: nn.Module, arguments: Any, context: dict[str, Any], outputs: tuple[Tensor, Tensor]) -> None:
        if not trace.inputs:
            trace.inputs.append((arguments[0], arguments[1]))
        trace.inputs.append(outputs)
        trace.context = context

    hooks = [layer.register_forward_hook(observe, with_kwargs=True) for layer in model.model.layers.children()]
    try:
        tokens, positions, cu_seqlens = (x.to(model.device) for x in (batch.tokens, batch.positions, batch.cu_seqlens))
        model(tokens, positions, PackedAttention(model.config, cu_seqlens))
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def _stream(delta: Tensor, residual: Tensor | None) -> Tensor:
    return delta if residual is None else delta + residual
