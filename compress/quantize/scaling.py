"""Scaling of features before rounding: what leaves a layer's outputs as they are, and the errors of rounding not.

A linear layer reads x = f(z) whose last step is a product feature by feature: a norm with its weights, or a linear
layer's outputs. Divided there by s and multiplied into the columns of what reads them, W x = (W · s)(x / s).

    into the norm before           q, k, v together; gate, up together
    into the rows of up_proj       for down_proj: silu(gate) · (up / s)
    into the rows of v_proj        for o_proj: one s for all query heads that share a KV head

Legend: N output features, K input features, Hq query heads, Hkv KV heads, d head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.quantize.inputs import projection
from model.layers import DecoderLayer, RMSNorm
from model.linear import Linear

BEHIND_NORMS = ("self_attn.q_proj", "mlp.gate_proj")
"""The inputs of a layer, named as in `inputs.consumers_in`, that a norm makes."""


def shared_by_heads(features: Tensor, layer: DecoderLayer) -> Tensor:
    """Of the inputs of o_proj [Hq · d]: the mean over the query heads of each KV head, [Hq · d] again."""
    return _by_kv_head(features, layer).mean(1, keepdim=True).expand(-1, _queries_per_head(layer), -1).flatten()


@torch.no_grad()
def fold(layer: DecoderLayer, name: str, scales: Tensor, consumers: Sequence[Linear]) -> None:
    """Divides an input of the layer, named as in `inputs.consumers_in`, by `scales` [K] fp32, and scales who reads it.

    Those of o_proj must be alike for all query heads of a KV head (`shared_by_heads`).
    """
    if name == "self_attn.q_proj":
        _divide(_found(layer.norm(layer.names.before_attention)), scales)
    elif name == "mlp.gate_proj":
        _divide(_found(layer.norm(layer.names.before_mlp)), scales)
    elif name == "mlp.down_proj":
        _divide(projection(layer, "mlp.up_proj"), scales)
    else:
        _divide(layer.self_attn.v_proj, _by_kv_head(scales, layer)[:, 0].flatten())
    for consumer in consumers:
        consumer.weight.copy_(consumer.weight.float() * scales)


def _found(norm: RMSNorm | None) -> RMSNorm:
    if norm is None:
        raise ValueError("the layer has no norm that scales could be divided by")
    return norm


def _divide(producer: RMSNorm | nn.Linear, scales: Tensor) -> None:
    """Each output by its scale."""
    offset = producer.offset if isinstance(producer, RMSNorm) else 0
    for parameter in producer.parameters():
        parameter.copy_((parameter.float() + offset) / scales.view(-1, *[1] * (parameter.ndim - 1)) - offset)


def _by_kv_head(features: Tensor, layer: DecoderLayer) -> Tensor:
    """[Hq · d] -> [Hkv, Hq/Hkv, d]; query heads of one KV head stand together."""
    return features.view(-1, _queries_per_head(layer), layer.self_attn.head_dim)


def _queries_per_head(layer: DecoderLayer) -> int:
    return layer.self_attn.q_proj.out_features // layer.self_attn.k_proj.out_features
