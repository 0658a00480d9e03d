"""A little text, and models converted on it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.gqa import LayerPlan, Method, group_kv_heads, head_moments, num_units, plan_layer
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.tiny import full_logits

TOKENS = torch.randint(512, (120,), generator=torch.Generator().manual_seed(5)).tolist()


@dataclass(frozen=True)
class Text:
    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    labels: Tensor


def texts(*lengths: int) -> list[Text]:
    tokens = torch.randint(512, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return [Text(tokens, positions, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), tokens)]


def plans_for(
    model: Transformer, kv_heads: int | Sequence[int], method: Method, text: Sequence[Text] | None = None
) -> list[LayerPlan]:
    wanted = [kv_heads] * model.config.num_layers if isinstance(kv_heads, int) else kv_heads
    units = [num_units(model.config, layer, heads) for layer, heads in enumerate(wanted)]
    found = head_moments(model, texts(100, 60) if text is None else text, units)
    pairs = zip(wanted, found, strict=True)
    return [plan_layer(method, heads, moments) for heads, moments in pairs if moments is not None]


def convert(model: Transformer, kv_heads: int | Sequence[int], method: Method) -> Transformer:
    return group_kv_heads(model, plans_for(model, kv_heads, method))


def difference(model: Transformer, other: Transformer) -> float:
    return relative_rms(full_logits(other, TOKENS), full_logits(model, TOKENS))
