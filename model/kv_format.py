"""In which numbers keys and values are cached: what a format allocates, takes, writes and attends over.

    plain        k and v as the model computes them
    8 bits       integers or floats, each head of a token with an fp32 scale for its key and one for its value: its own,
                 or for e4m3 those that a checkpoint brings for all tokens

`KV_FORMATS` lists them by their dtype, `choose_kv_format` knows them by the names that users write.

Legend: T tokens, P pages, Hq query heads, Hkv KV heads, d head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.paged import PagedPlan, paged_attention
from kernels.attention.rotary_write import HeadNorms, rotate_and_write
from kernels.attention.visible_slots import VisibleSlots
from kernels.attention.write_pages import check_page_dtypes
from model.config import ModelConfig


class NormRope(NamedTuple):
    """What queries and keys go through before they meet; None where a layer leaves a step out."""

    norms: HeadNorms | None
    """The normalisation of each head."""
    rotary: tuple[Tensor, Tensor] | None
    """Cosine and sine of each token's angles, by `kernels.attention.rotary.rotary_tables`."""


FixedScales = tuple[Tensor, Tensor]
"""Of the keys and the values of a layer's heads, fp32 `[Hkv]` each."""


class LayerPages(NamedTuple):
    """Keys and values of one layer, `[P, page_size, Hkv, d]`; in 8 bits with scales, fp32 `[P, page_size, Hkv]`."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    fixed: FixedScales | None = None
    """What those are for every token; None: each token has its own."""

    def parts(self) -> tuple[Tensor, ...]:
        """All that pages hold."""
        return tuple(part for part in (self.k, self.v, self.k_scales, self.v_scales) if part is not None)

    def write(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, norm_rope: NormRope) -> Tensor:
        """Normalises and rotates q and k, writes k and v `[T, Hkv, d]` to `slots [T]`; returns q `[T, Hq, d]`."""
        scales = None if self.k_scales is None or self.v_scales is None else (self.k_scales, self.v_scales)
        norms, rotary = norm_rope
        pages = self.k, self.v, slots
        return rotate_and_write(q, k, v, *pages, rotary=rotary, norms=norms, scales=scales, fixed=self.fixed)

    def attend(
        self,
        q: Tensor,
        block_tables: Tensor,
        cu_seqlens: Tensor,
        kv_lengths: Tensor,
        *,
        window: int | None,
        plan: PagedPlan,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Attention of q `[T, Hq, d]` over the pages, as `paged_attention` has it."""
        pages, scales = (self.k, self.v, block_tables, cu_seqlens, kv_lengths), (self.k_scales, self.v_scales)
        return paged_attention(
            q, *pages, window=window, scale=scale, soft_cap=soft_cap, plan=plan, k_scales=scales[0], v_scales=scales[1]
        )

    def as_single_slots(self) -> "LayerPages":
        """The same memory as pages of one slot."""
        parts = [part.flatten(0, 1)[:, None] for part in self.parts()]
        return LayerPages(*parts)._replace(fixed=self.fixed)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class KVPages:
    """The cache of a model."""

    layers: Sequence[LayerPages] | Mapping[int, LayerPages]
    visible: Mapping[int, VisibleSlots]
    """By layer, for those whose attention is routed: which slots have a key there."""
    page_size: int

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a page holds, each `[P, page_size, …]`."""
        layers = self.layers.values() if isinstance(self.layers, Mapping) else self.layers
        yield from (part for pages in layers for part in pages.parts())
        yield from (slots.counts[:-1].view(-1, self.page_size) for slots in self.visible.values())

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies pages in all layers; every source is read before any destination is written."""
        for pages in self.tensors():
            pages[destinations] = pages[sources]


@dataclass(frozen=True)
class KVFormat(ABC):
    """One format."""

    dtype: torch.dtype

    @abstractmethod
    def head_bytes(self, head_dim: int) -> int:
        """Of one head's key, or value, of one token."""

    @abstractmethod
    def new_layer(self, layer: int, shape: tuple[int, int, int, int], device: torch.device) -> LayerPages:
        """Pages of one layer, of the shape `[P, page_size, Hkv, d]`."""

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Bytes that one token holds in the cache, all layers together: of keys, values, and who has some."""
        counts = len(config.routed_attention) * torch.int32.itemsize
        return 2 * sum(config.kv_heads) * self.head_bytes(config.head_dim) + counts

    def allocate(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        device: torch.device,
        *,
        num_rows: int = 1,
        most_tokens: int | None = None,
    ) -> KVPages:
        """An empty cache. ValueError where the device cannot convert to this format.

        Where attention is routed, there are lists for `num_rows` sequences of at most `most_tokens`; None: of as many
        as the pages hold.
        """
        shapes = [(num_pages, page_size, heads, config.head_dim) for heads in config.kv_heads]
        layers = [self.new_layer(layer, shape, device) for layer, shape in enumerate(shapes)]
        sizes = num_pages * page_size, num_rows, most_tokens or num_pages * page_size
        visible = {layer: VisibleSlots.empty(*sizes, device) for layer in config.routed_attention}
        return KVPages(layers, visible, page_size)


class PlainKV(KVFormat):
    """Floats."""

    def head_bytes(self, head_dim: int) -> int:
        return head_dim * self.dtype.itemsize

    def new_layer(self, layer: int, shape: tuple[int, int, int, int], device: torch.device) -> LayerPages:
        k, v = (torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2))
        return LayerPages(k, v)


@dataclass(frozen=True)
class EightBitKV(KVFormat):
    """8 bits, and a scale for each head of each token."""

    fixed: Sequence[FixedScales] = ()
    """Those of each layer, if they are not the tokens' own."""

    def head_bytes(self, head_dim: int) -> int:
        return head_dim + torch.float32.itemsize

    def new_layer(self, layer: int, shape: tuple[int, int, int, int], device: torch.device) -> LayerPages:
        k, v = (torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2))
        k_scales, v_scales = (torch.zeros(shape[:3], device=device) for _ in range(2))
        check_page_dtypes(self.dtype, k, v, k_scales, v_scales)
        fixed = None
        if self.fixed:
            k_fixed, v_fixed = self.fixed[layer]
            fixed = k_fixed.to(device), v_fixed.to(device)
        return LayerPages(k, v, k_scales, v_scales, fixed)


_PLAIN, _EIGHT_BITS = (torch.float32, torch.bfloat16, torch.float16), {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
KV_FORMATS: dict[torch.dtype, KVFormat] = {dtype: PlainKV(dtype) for dtype in _PLAIN}
KV_FORMATS |= {dtype: EightBitKV(dtype) for dtype in _EIGHT_BITS.values()}


def choose_kv_format(name: str, dtype: torch.dtype, fixed: Sequence[FixedScales] = ()) -> KVFormat:
    """The format of that name; `auto` keeps keys and values as a model of `dtype` computes them. Raises ValueError.

    `fixed`: scales that a checkpoint brings for fp8.
    """
    if name != "auto" and name not in _EIGHT_BITS:
        raise ValueError(f"kv_cache_dtype must be auto, {' or '.join(_EIGHT_BITS)}, not {name!r}")
    if fixed and name == "fp8":
        return EightBitKV(_EIGHT_BITS[name], fixed)
    return KV_FORMATS[_EIGHT_BITS.get(name, dtype)]
