"""Context parallel: processes that have a part of a packed batch each compute its attention and its gradients."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model.attention import AttentionOverBatch, PackedAttention
from model.collectives import Group
from model.config import ModelConfig
from model.context import ContextAttention, ContextPart
from model.kv_format import NormRope
from tests.ranks import in_ranks
from tests.tiny import tiny_config

CONFIGS = {"all keys": tiny_config(), "windows and a soft cap": tiny_config("gemma2")}
BORDERS = {
    "one long document": [0, 53],
    "across the parts": [0, 7, 9, 41, 64],
    "fewer tokens than parts": [0, 1, 3],
    "a token": [0, 1],
}


@dataclass(frozen=True)
class Drawn:
    """Queries, keys and values of a batch, and what its output is multiplied with."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @classmethod
    def of(cls, config: ModelConfig, tokens: int) -> "Drawn":
        generator = torch.Generator().manual_seed(tokens)
        heads = (config.num_query_heads, config.num_kv_heads, config.num_kv_heads, config.num_query_heads)
        return cls(*(torch.randn(tokens, one, config.head_dim, generator=generator) for one in heads))

    def attended(self, attention: AttentionOverBatch) -> list[Tensor]:
        """Outputs of two layers, added, and the gradients of q, k and v."""
        learnt = [one.clone().requires_grad_() for one in (self.q, self.k, self.v)]
        still = NormRope(None, None)
        out = attention(0, *learnt, still) + 2 * attention(1, *learnt, still)
        return [out.detach(), *torch.autograd.grad(out, learnt, self.grad)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("count", [2, 3])
def test_parts_are_the_whole(count: int, borders: list[int], name: str) -> None:
    config, tokens = CONFIGS[name], borders[-1]
    drawn = Drawn.of(config, tokens)
    whole = drawn.attended(PackedAttention(config, torch.tensor(borders, dtype=torch.int32)))

    def of_rank(group: Group) -> list[Tensor]:
        part = ContextPart.of(group, borders)
        rows = part.take(torch.arange(tokens), tokens)
        own = (torch.cat((one, one.new_full((1, *one.shape[1:]), 7.0)))[rows] for one in vars(drawn).values())
        found = Drawn(*own).attended(ContextAttention(config, part))
        return [rows, *found]

    parts = [torch.cat(of_all) for of_all in zip(*in_ranks(count, of_rank), strict=True)]
    order = parts[0].argsort(stable=True)
    assert parts[0][order][:tokens].tolist() == [*range(tokens)] and len(order) % (2 * count) == 0
    for expected, found in zip(whole, parts[1:], strict=True):
        torch.testing.assert_close(found[order][:tokens], expected, rtol=1e-5, atol=1e-5)
