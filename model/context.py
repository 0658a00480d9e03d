"""Attention of a packed batch whose tokens lie in several processes: context parallel.

Of 2c equal pieces of the batch process r of c has the r-th from the beginning and the r-th from the end: later tokens
see more keys, and so all have about as much to do. What fills up the last pieces is a document of its own, so that
nobody is without. Each computes its own tokens, wherever documents begin and end; only keys and values are gathered,
layer by layer, and their gradients are summed where they came from.

Source: https://arxiv.org/abs/2407.21783, section 3.3.2.

Legend: T tokens of the batch, filled up to 2c pieces; P tokens of a process, T / c; S keys that its queries see.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.flash import flash_attention
from kernels.attention.rotary_write import qk_norm_rope
from model.collectives import Group
from model.config import ModelConfig
from model.kv_format import NormRope


@dataclass(frozen=True)
class ContextPart:
    """What a process has of a batch, and which keys its queries see; complete when built."""

    group: Group
    """The c processes."""
    pieces: tuple[slice, slice]
    """Of the T tokens, those that are here."""
    missing: int
    """By how many the batch was filled up."""
    keys: Tensor
    """[S] int64: of the keys of all processes, one below the other [T], those of each document that has queries here,
    up to the last of these."""
    cu_seqlens_q: Tensor
    """[B+1] int32: where each document's queries begin here; a document in both pieces is two."""
    cu_seqlens_k: Tensor
    """[B+1] int32: where its keys begin among those S."""

    @classmethod
    def of(cls, group: Group, borders: Sequence[int]) -> "ContextPart":
        """`borders` [B+1]: where documents begin, and the number of tokens at the end."""
        count, index = 2 * group.count, group.index
        size = -(-borders[-1] // count)
        pieces = [slice(number * size, (number + 1) * size) for number in (index, count - 1 - index)]
        queries, lengths, keys = [0], [0], []
        for piece in pieces:
            for start, end in pairwise((*borders, count * size)):
                end = min(end, piece.stop)
                if max(start, piece.start) < end:
                    queries.append(end - max(start, piece.start))
                    lengths.append(end - start)
                    keys.append(_places(torch.arange(start, end), size, group.count))
        starts = (torch.tensor(one).cumsum(0).int() for one in (queries, lengths))
        return cls(group, (pieces[0], pieces[1]), count * size - borders[-1], torch.cat(keys), *starts)

    def take(self, rows: Tensor, fill: int) -> Tensor:
        """Those of a batch's rows [T] that are here, [P]."""
        padded = F.pad(rows, (0, self.missing), value=fill)
        return torch.cat([padded[piece] for piece in self.pieces])

    def to(self, device: torch.device | str) -> "ContextPart":
        names = ("keys", "cu_seqlens_q", "cu_seqlens_k")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def _places(tokens: Tensor, size: int, count: int) -> Tensor:
    """Where tokens [S] lie among those of all processes, one below the other."""
    piece, offset = tokens // size, tokens % size
    is_first = piece < count
    owner = torch.where(is_first, piece, 2 * count - 1 - piece)
    return owner * 2 * size + torch.where(is_first, 0, size) + offset


class ContextAttention:
    """Causal attention inside each document of a batch, of which this process has a part; see `AttentionOverBatch`."""

    def __init__(self, config: ModelConfig, part: ContextPart) -> None:
        self.windows, self.part = config.windows, part
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor:
        q, k = qk_norm_rope(q, k, rotary=norm_rope.rotary, norms=norm_rope.norms)
        part, both = self.part, torch.cat((k, v), dim=1)
        seen: Tensor = _Gathered.apply(both, part.group)[part.keys]
        keys, values = seen.chunk(2, dim=1)
        borders, window = (part.cu_seqlens_q, part.cu_seqlens_k), self.windows[layer]
        return flash_attention(q, keys, values, *borders, window=window, scale=self.scale, soft_cap=self.soft_cap)

    def routed(self, layer: int, selected: Tensor, index: Tensor) -> "ContextAttention":
        raise ValueError("layers that only some tokens enter need whole documents: context parallel takes no routers")


class _Gathered(torch.autograd.Function):
    """Of rows [P, …] in each process all [T, …]; a gradient of them is summed where each came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.gather(rows).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_parts(grads[0].contiguous()), None
