"""A paged cache without an engine: sequences with their pages, and steps on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention._kv_quantization import dequantize_rows, quantize_rows_reference
from kernels.attention.rotary_write import qk_norm_rope
from model.attention import PackedAttention, PagedAttention, PagedBatch
from model.config import ModelConfig
from model.kv_format import KV_FORMATS, NormRope
from model.transformer import Transformer

PAGE_SIZE = 16


class PagedCache:
    """Pages in random order, filled with NaN, so that reading a slot that was never written shows."""

    def __init__(
        self, model: Transformer, lengths: Sequence[int], *, num_pages: int = 20, dtype: torch.dtype | None = None
    ) -> None:
        """Room for one sequence of each length, on the device of the model; `dtype`: int8 or fp8, else the model's."""
        self.model, self.device = model, model.device
        self.pages = KV_FORMATS[dtype or model.dtype].allocate(
            model.config, num_pages, PAGE_SIZE, self.device, num_rows=len(lengths)
        )
        for pages in self.pages.layers:
            for part in pages:
                if part is not None and part.dtype in (torch.float32, torch.bfloat16):
                    part.fill_(torch.nan)  # int8 has no NaN, but a scale of NaN does as well
        for counts, _ in self.pages.visible.values():
            counts.copy_(torch.arange(len(counts), device=self.device) % 5 - 2)
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
            listing=self._tensor([[row for row, _, _ in chunks], [done for _, done, _ in chunks]]).int(),
        )
        attention = PagedAttention(self.model.config, batch, self.pages)
        with torch.no_grad():
            return self.model.logits(self.model(tokens, positions, attention))

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, device=self.device)


class RoundedAttention(PackedAttention):
    """What attention over pages of 8 bits computes, without pages: keys and values rounded to 8 bits."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__(config, torch.tensor([0, *lengths], device=device).cumsum(0).int())
        self.dtype = dtype

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor:
        q, k = qk_norm_rope(q, k, rotary=norm_rope.rotary, norms=norm_rope.norms)
        k, v = (dequantize_rows(*quantize_rows_reference(x, self.dtype), x.dtype) for x in (k, v))
        return super().__call__(layer, q, k, v, NormRope(norms=None, rotary=None))
