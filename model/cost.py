"""Bytes and operations by arithmetic on shapes: the plan, the report and the engine ask here. Nothing is measured.

    operations    of a forward pass and of training, for each token
    serving       weights, keys and values, what a step of an engine needs besides

What a step of training holds is in model/training_memory.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.formats.base import WeightFormat
from model.kv_format import KV_FORMATS
from model.lora import Lora
from model.quantized import quantized_layers
from model.transformer import Transformer

FULL = 4
"""Bytes of a number in fp32."""

# --- operations ------------------------------------------------------------------------------------------------------


def flops_per_token(config: ModelConfig, context: int, capacities: Sequence[float] = ()) -> float:
    """Floating-point operations of a forward pass without embeddings and output head, mean over a text of `context`.

    Products and their sums count as two. `capacities`: the part of the tokens that each routed layer selects; a layer's
    scores then shrink on both sides.
    """
    query, kv = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = 2 * config.hidden_size * (2 * query + 2 * kv)
    scores = 2 * 2 * query * context / 2
    mlps = [2 * 3 * config.hidden_size * neurons for neurons in config.mlp_neurons]
    total = config.num_layers * (projections + scores) + sum(mlps)
    if (experts := config.experts) is not None:
        total += 2 * config.hidden_size * experts.num_experts * len(experts.layers)
    if (mixture := config.mixture_of_depths) is None:
        return total
    for layer, capacity in zip(mixture.layers, capacities, strict=False):
        if mixture.route != "mlp":
            total -= projections * (1 - capacity) + scores * (1 - capacity**2)
        if mixture.route != "attention":
            total -= mlps[layer] * (1 - capacity)
        total += 2 * config.hidden_size
    return total


def training_flops_per_token(config: ModelConfig, context: int) -> float:
    """Of forward and backward, which is two forwards' work, with the output head, at the capacity of its routers."""
    mixture = config.mixture_of_depths
    capacities = [mixture.capacity] * len(mixture.layers) if mixture else []
    return 3 * (flops_per_token(config, context, capacities) + 2 * config.hidden_size * config.vocab_size)


# --- serving ---------------------------------------------------------------------------------------------------------


def num_weights(model: nn.Module) -> int:
    """Parameters, quantized ones among them."""
    return sum(map(Tensor.numel, model.parameters())) + quantized_size(model)[0]


def weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Of all weights as files hold them: dense ones in `dtype`, those of adapters in fp32."""
    dense = sum(map(Tensor.numel, model.parameters()))
    adapters = sum(p.numel() for m in model.modules() if isinstance(m, Lora) for p in m.parameters())
    return dtype.itemsize * (dense - adapters) + FULL * adapters + quantized_size(model)[1]


def planned_weight_bytes(config: ModelConfig, formats: Mapping[str, WeightFormat[Any]], dtype: torch.dtype) -> int:
    """Of all weights of a model whose layers, by name, are quantized; the others are in `dtype`."""
    with torch.device("meta"):
        parameters = dict(Transformer(config).named_parameters())
    quantized = {f"{name}.weight": format for name, format in formats.items()}
    dense = sum(weight.numel() for name, weight in parameters.items() if name not in quantized)
    return dense * dtype.itemsize + sum(one.num_bytes(parameters[name].shape) for name, one in quantized.items())


def quantized_size(model: nn.Module) -> tuple[int, int]:
    """How many weights are quantized, and the bytes of their codes and scales."""
    layers = quantized_layers(model).values()
    return sum(math.prod(one.shape) for one in layers), sum(one.weight_bytes for one in layers)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token holds in a cache of this dtype, all layers together."""
    return KV_FORMATS[dtype].bytes_per_token(config)


def visible_list_bytes(config: ModelConfig, *, rows: int, tokens: int) -> int:
    """Of the lists of slots that have a key, in layers whose attention is routed: for `rows` sequences of `tokens`."""
    return len(config.routed_attention) * rows * tokens * torch.int32.itemsize


def cached_sequences(config: ModelConfig, dtype: torch.dtype, *, cache_bytes: float, tokens: int) -> int:
    """Sequences of so many tokens whose keys and values fit."""
    return int(cache_bytes // (tokens * kv_bytes_per_token(config, dtype)))


def step_bytes(config: ModelConfig, dtype: torch.dtype, *, tokens: int, rows: int) -> int:
    """The largest temporaries of an engine's step over `tokens`, with `rows` distributions over the vocabulary."""
    widths = 4 * config.hidden_size + 3 * max(config.mlp_neurons)
    if (experts := config.experts) is not None:  # rows of each token's experts, as they go in and come out
        widths += 2 * experts.experts_per_token * config.hidden_size
    return tokens * widths * dtype.itemsize + rows * config.vocab_size * torch.float32.itemsize
