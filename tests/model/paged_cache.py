"""A paged cache without an engine: sequences with their pages, and steps on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention._kv_quantization import dequantize_rows, quantize_rows_reference
from kernels.attention.rotary_write import qk_norm_rope
from model.attention import PackedAttention, PagedAttention, PagedBatch, Turn
from model.config import ModelConfig
from model.transformer import Transformer

PAGE_SIZE = 16


class PagedCache:
    """Pages in random order, filled with NaN, so that reading a slot that was never written shows."""

    def __init__(
        self, model: Transformer, lengths: Sequence[int], *, num_pages: int = 20, dtype: torch.dtype | None = None
    ) -> None:
        """Room for one sequence of each length, on the device of the model; `dtype`: int8 or fp8, else the model's."""
        config = model.config
        shape = (num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.model, self.device = model, model.device
        self.scales: dict[str, list[Tensor]] = {}
        if dtype is not None:  # int8 has no NaN, but a scale of NaN does as well
            self.scales = {name: self._pool(shape[:3]) for name in ("k_scales", "v_scales")}
        self.k_pages, self.v_pages = (
            [pages if dtype is None else pages.new_zeros(shape).to(dtype) for pages in self._pool(shape)]
            for _ in range(2)
        )
        mixture, slots = config.mixture_of_depths, num_pages * PAGE_SIZE + 1
        self.present = {
            layer: torch.arange(slots, device=self.device) % 3 == 0 for layer in (mixture.layers if mixture else ())
        }
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables = [[order.pop() for _ in range(-(-length // PAGE_SIZE))] for length in lengths]

    def logits(self, chunks: list[tuple[int, int, list[int]]]) -> Tensor:
        """One engine step; each chunk is (sequence, how many of its tokens are cached, its next tokens)."""
        tokens = self._tensor([token for _, _, new in chunks for token in new])
        positions = self._tensor([position for _, done, new in chunks for position in range(done, done + len(new))])
        slots = [
            self.tables[sequence][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            for sequence, done, new in chunks
            for position in range(done, done + len(new))
        ]
        width = max(len(self.tables[sequence]) for sequence, _, _ in chunks)
        tables = [self.tables[sequence] + [0] * (width - len(self.tables[sequence])) for sequence, _, _ in chunks]
        batch = PagedBatch.plan(
            self.model.config,
            self._tensor(slots),
            block_tables=self._tensor(tables).int(),
            cu_seqlens=self._tensor([0, *(len(new) for _, _, new in chunks)]).cumsum(0).int(),
            kv_lengths=self._tensor([done + len(new) for _, done, new in chunks]).int(),
            page_size=PAGE_SIZE,
        )
        attention = PagedAttention(
            self.model.config, batch, self.k_pages, self.v_pages, present=self.present, **self.scales
        )
        with torch.no_grad():
            return self.model.logits(self.model(tokens, positions, attention))

    def _pool(self, shape: tuple[int, ...]) -> list[Tensor]:
        return [torch.full(shape, torch.nan, device=self.device) for _ in range(self.model.config.num_layers)]

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, device=self.device)


class RoundedAttention(PackedAttention):
    """What attention over pages of 8 bits computes, without pages: keys and values rounded to 8 bits."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__(config, torch.tensor([0, *lengths], device=device).cumsum(0).int())
        self.dtype = dtype

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn) -> Tensor:
        q, k = qk_norm_rope(q, k, rotary=turn.rotary, norms=turn.norms)
        k, v = (dequantize_rows(*quantize_rows_reference(x, self.dtype), x.dtype) for x in (k, v))
        return super().__call__(layer, q, k, v, Turn(norms=None, rotary=None))
