"""Scales for a cache of keys and values in e4m3, one for all tokens: what the largest of a text needs.

    scale = max|x| / 448        of a layer's keys, normalised and rotated, and of its values, over all heads and tokens

448 is the largest e4m3. What comes larger later is cut off there. All heads share a scale, which every reader of such
files knows: floats lose nothing where it is too large.

Legend: T tokens, Hq query heads, Hkv KV heads, d head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.prune.depth import PackedBatch
from kernels.attention.rotary_write import qk_norm_rope
from model.attention import PackedAttention
from model.config import ModelConfig
from model.kv_format import FixedScales, NormRope
from model.transformer import Transformer

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@torch.no_grad()
def calibrated_cache_scales(model: Transformer, batches: Sequence[PackedBatch]) -> list[FixedScales]:
    """Of each layer of the model, fp32 [Hkv] each on the CPU; a layer that no token enters gets ones."""
    largest: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in batches:
        tokens, positions, cu_seqlens = (x.to(model.device) for x in (batch.tokens, batch.positions, batch.cu_seqlens))
        model(tokens, positions, _Watched(model.config, cu_seqlens, largest))
    return [
        tuple(_scales(x, heads) for x in largest.get(layer, (torch.zeros(()),) * 2))  # type: ignore[misc]
        for layer, heads in enumerate(model.config.kv_heads)
    ]


def _scales(largest: Tensor, heads: int) -> Tensor:
    scale = largest.float().cpu() / _LARGEST
    return torch.where(scale > 0, scale, 1.0).expand(heads).contiguous()


class _Watched(PackedAttention):
    """Attention that keeps the largest key and value of each layer."""

    def __init__(self, config: ModelConfig, cu_seqlens: Tensor, largest: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__(config, cu_seqlens)
        self.largest = largest

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor:
        q, k = qk_norm_rope(q, k, rotary=norm_rope.rotary, norms=norm_rope.norms)
        if len(k):
            found, before = (k.abs().amax(), v.abs().amax()), self.largest.get(layer)
            self.largest[layer] = found if before is None else tuple(map(torch.maximum, before, found))  # type: ignore[assignment]
        return super().__call__(layer, q, k, v, NormRope(norms=None, rotary=None))
