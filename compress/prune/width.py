"""Width pruning: find out on data which heads, MLP neurons and channels matter, and keep those (arXiv 2407.14679).

One forward pass measures all of them by how large they are: |x| in fp32, its mean over a sequence, then the L2 norm
over sequences, of

    neurons     what down_proj reads
    heads       what o_proj reads; then the L2 norm over a head's dimensions
    channels    what both norms of a layer give; then the sum over both. A layer's own figures are kept, and added up
                for the layers that stay: the stream is one, so all of them keep the same channels

Heads are ranked within their group, and each group keeps equally many. Where every query head has a KV head of its own,
a layer's heads are ranked together, and their keys and values go with them.

A norm divides by the rms of all channels, a pruned one by that of the kept ones, which is r times as large: so its
weight is multiplied by r. That is another number for each token, so r² is the mean of rms_kept² / rms² over them.

Legend: T tokens, L layers, Hq query heads, d head dim, I MLP neurons, D channels of the residual stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from compress.prune.depth import PackedBatch, added_up
from compress.residual_stream import ResidualStream, passed_layers
from model.collectives import ALONE, Group
from model.config import ModelConfig
from model.lazy import LazyModel, MakeWeight
from model.transformer import Transformer

_NORMED, _ATTENDED, _MLP_NORMED, _GATED = READS = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
)


class WidthImportance(NamedTuple):
    """What one pass measures, fp64 on the CPU."""

    heads: Tensor
    """`[L, Hq]`."""
    neurons: Tensor
    """`[L, I]`."""
    channels: Tensor
    """`[L, D]`."""
    powers: Tensor
    """Of what the norms read, two in a layer, then the last: x² / mean(x²), its mean over tokens, `[2L + 1, D]`."""

    def of_layers(self, keep: Sequence[int]) -> "WidthImportance":
        """The same of a model of these layers."""
        rows, last = torch.tensor(keep), len(self.powers) - 1
        norms = torch.tensor([norm for layer in keep for norm in (2 * layer, 2 * layer + 1)] + [last])
        return WidthImportance(self.heads[rows], self.neurons[rows], self.channels[rows], self.powers[norms])


@dataclass(frozen=True)
class KeptWidth:
    """What stays, as ascending indices, and what its norms are multiplied by."""

    heads: Tensor
    """Query heads of each layer, `[L, kept]`."""
    neurons: Tensor
    """`[L, kept]`."""
    channels: Tensor
    """`[kept]`."""
    norm_scales: Tensor
    """`[2L + 1]`."""


@torch.no_grad()
def width_importance(model: Transformer, batches: Sequence[PackedBatch], group: Group = ALONE) -> WidthImportance:
    """Measures everything in one pass. ValueError for a model with routers: each layer would see other tokens.

    `group`: the processes that do the same, each with the batches dealt to it, of which it may have none.
    """
    config = model.config
    if config.mixture_of_depths is not None:
        raise ValueError("a model with routers cannot be made narrower")
    layers, width = config.num_layers, config.hidden_size
    heads = torch.zeros(layers, config.num_query_heads * config.head_dim, dtype=torch.float64)
    neurons = torch.zeros(layers, config.intermediate_size, dtype=torch.float64)
    normed = torch.zeros(layers, 2, width, dtype=torch.float64)
    powers, tokens = torch.zeros(2 * layers + 1, width, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in batches:
        stream, starts = ResidualStream(model, batch), batch.cu_seqlens.tolist()
        for number, layer in enumerate(passed_layers(model)):
            powers[2 * number] += _relative_squares(stream.value)
            read = stream.pass_on(layer, READS)
            powers[2 * number + 1] += _relative_squares(stream.before_mlp)
            heads[number] += _squared_means(read[_ATTENDED], starts)
            neurons[number] += _squared_means(read[_GATED], starts)
            normed[number] += torch.stack([_squared_means(read[name], starts) for name in (_NORMED, _MLP_NORMED)])
        powers[-1] += _relative_squares(stream.value)
        tokens += len(batch.tokens)
    heads, neurons, normed, powers, tokens = added_up(group, model.device, heads, neurons, normed, powers, tokens)
    sizes = heads.unflatten(1, (config.num_query_heads, config.head_dim)).sum(-1)
    return WidthImportance(sizes.sqrt(), neurons.sqrt(), normed.sqrt().sum(1), powers / tokens)


def _squared_means(x: Tensor, starts: Sequence[int]) -> Tensor:
    """The sum over sequences of (mean of |x|)², `[K]`, for `x [T, K]` of sequences that begin at `starts`."""
    means = [x[start:stop].float().abs().mean(0) for start, stop in pairwise(starts)]
    return torch.stack(means).double().square().sum(0).cpu()


def _relative_squares(stream: Tensor) -> Tensor:
    """The sum over tokens of x² / mean(x²), `[D]`, for `stream [T, D]`."""
    squares = stream.double().square()
    return (squares / squares.mean(-1, keepdim=True)).sum(0).cpu()


def keep_width(importance: WidthImportance, config: ModelConfig, narrow: ModelConfig) -> KeptWidth:
    """What `narrow` has room for of a model of the shape `config`, the most important; of equal ones the earlier."""
    heads = []
    for row, kv_heads in zip(importance.heads, config.kv_heads, strict=True):
        groups = row[None] if kv_heads == config.num_query_heads else row.unflatten(0, (kv_heads, -1))
        chosen = _largest(groups, narrow.num_query_heads // len(groups))
        heads.append((chosen + torch.arange(len(groups))[:, None] * groups.shape[1]).flatten())
    channels = _largest(importance.channels.sum(0), narrow.hidden_size)
    return KeptWidth(
        heads=torch.stack(heads),
        neurons=_largest(importance.neurons, narrow.intermediate_size),
        channels=channels,
        norm_scales=importance.powers[:, channels].mean(1).sqrt(),
    )


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each row are, ascending."""
    return values.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values


def prune_width(model: Transformer, kept: KeptWidth, narrow: ModelConfig) -> Transformer:
    """A new model of the shape `narrow`, with copies of the kept weights, and norms rescaled."""
    return narrowed(LazyModel.of(model), kept, narrow).made()


def narrowed(model: LazyModel, kept: KeptWidth, narrow: ModelConfig) -> LazyModel:
    """A model of the shape `narrow`, with the kept weights, and norms rescaled."""
    weights = {name: partial(_narrowed, name, make, kept, model.config) for name, make in model.weights.items()}
    return replace(model, config=narrow, weights=weights)


def _narrowed(name: str, make: MakeWeight, kept: KeptWidth, config: ModelConfig) -> Tensor:
    """What stays of a parameter of a model of the shape `config`."""
    weight = make()
    for axis, index in enumerate(_kept_places(name, kept, config)):
        weight = weight if index is None else weight.index_select(axis, index.to(weight.device))
    if (number := _norm_number(name)) is not None:
        weight = (weight.double() * kept.norm_scales[number].item()).to(weight.dtype)
    return weight


def _kept_places(name: str, kept: KeptWidth, config: ModelConfig) -> tuple[Tensor | None, ...]:
    """What stays of each axis of a parameter; None stands for all of it."""
    *path, module, kind = name.split(".")
    if module in ("q_norm", "k_norm"):
        return (None,)
    if module in ("embed_tokens", "lm_head"):
        return None, kept.channels
    if "layers" not in path or module.endswith("layernorm"):
        return (kept.channels,)
    layer = int(path[path.index("layers") + 1])
    heads = kept.heads[layer][:, None] * config.head_dim + torch.arange(config.head_dim)
    kv_heads = heads.flatten() if config.kv_heads[layer] == config.num_query_heads else None
    rows, columns = {
        "q_proj": (heads.flatten(), kept.channels),
        "k_proj": (kv_heads, kept.channels),
        "v_proj": (kv_heads, kept.channels),
        "o_proj": (kept.channels, heads.flatten()),
        "gate_proj": (kept.neurons[layer], kept.channels),
        "up_proj": (kept.neurons[layer], kept.channels),
        "down_proj": (kept.channels, kept.neurons[layer]),
    }[module]
    return (rows,) if kind == "bias" else (rows, columns)


def _norm_number(name: str) -> int | None:
    """Which of `KeptWidth.norm_scales` belongs to a parameter; None for what is no norm of the stream."""
    *path, module, _ = name.split(".")
    if path == ["model"] and module == "norm":
        return -1
    if module.endswith("layernorm"):
        return 2 * int(path[-1]) + (module == "post_attention_layernorm")
    return None
