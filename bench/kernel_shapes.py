"""The inputs of the kernel benchmarks: random tensors of a shape, what the work costs, and its result in fp64.

Costs count what the mathematics needs: FLOPs of the visible scores only, each input read once, each output written
once. References are the ones beside the kernels, called in pieces that fit in memory.

Legend: T tokens, B sequences, Hq query heads, Hkv key/value heads, d head dim, P pages, D hidden size, I intermediate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kernels.attention._kv_quantization import dequantize_rows, quantize_rows_reference
from kernels.attention.flash import flash_attention_reference
from kernels.attention.paged import paged_attention_reference
from kernels.attention.rotary import apply_rotary_reference, rope_frequencies, rotary_tables
from kernels.rms_norm import rms_norm_reference
from kernels.swiglu import swiglu_reference

BF16 = torch.bfloat16
PAGE = 16
EPS = 1e-5
_BAND = 512
"""Queries of a document that the reference attends at once."""


@dataclass(frozen=True)
class AttentionShape:
    """`batch` documents of `length` tokens each, causal."""

    batch: int
    length: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        group = self.query_heads // self.kv_heads
        return f"d{self.head_dim} {_short(self.length)} x{self.batch} {'MHA' if group == 1 else f'GQA{group}'}"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def forward_flops(self) -> float:
        """Two products over the lower triangle, counted as in the FlashAttention papers: half of the square."""
        return 4 * self.batch * self.length**2 / 2 * self.query_heads * self.head_dim

    def backward_flops(self) -> float:
        return 2.5 * self.forward_flops()

    def forward_bytes(self) -> float:
        """q, k, v and the output."""
        return 2 * self.tokens * self.head_dim * (2 * self.query_heads + 2 * self.kv_heads)

    def backward_bytes(self) -> float:
        """q, k, v, the output and its gradient are read, three gradients written."""
        return 2 * self.tokens * self.head_dim * (4 * self.query_heads + 4 * self.kv_heads)


@dataclass
class AttentionInputs:
    """q [T, Hq, d], k and v [T, Hkv, d], grad [T, Hq, d]: the gradient of the output where one is wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor | None
    cu_seqlens: Tensor
    batch: int

    @classmethod
    def random(cls, shape: AttentionShape, device: torch.device, *, gradients: bool) -> "AttentionInputs":
        q, grad = (_normal(shape.tokens, shape.query_heads, shape.head_dim, device=device) for _ in range(2))
        k, v = (_normal(shape.tokens, shape.kv_heads, shape.head_dim, device=device) for _ in range(2))
        cu_seqlens = torch.arange(0, shape.tokens + 1, shape.length, dtype=torch.int32, device=device)
        return cls(q, k, v, grad if gradients else None, cu_seqlens, shape.batch)

    def dense(self, x: Tensor) -> Tensor:
        """View x [T, H, d] as [B, T/B, H, d]."""
        return x.view(self.batch, -1, *x.shape[1:])


def attention_reference(inputs: AttentionInputs, *, output: bool = True) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v where one of the output is given, in fp64."""
    leaves = [x.double().requires_grad_(inputs.grad is not None) for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = leaves
    out = torch.empty_like(q, requires_grad=False)
    for queries, keys in _bands(inputs.cu_seqlens.tolist()):
        ends = [torch.tensor([0, rows.stop - rows.start]) for rows in (queries, keys)]
        band = flash_attention_reference(q[queries], k[keys], v[keys], *ends)
        out[queries] = band.detach()
        if inputs.grad is not None:
            band.backward(inputs.grad[queries].double())
    gradients = () if inputs.grad is None else tuple(x.grad for x in leaves if x.grad is not None)
    return (out, *gradients) if output else gradients


def _bands(bounds: list[int]) -> Iterator[tuple[slice, slice]]:
    """Some queries of a document and the keys up to the last of them: the end of a shorter document."""
    for start, stop in pairwise(bounds):
        for first in range(start, stop, _BAND):
            last = min(first + _BAND, stop)
            yield slice(first, last), slice(start, last)


@dataclass(frozen=True)
class PagedShape:
    """`batch` sequences of `rows` new tokens each, with `context` keys including theirs, or fewer if `ragged`.

    Keys and values are in bf16, or in 8 bits with an fp32 scale for each token and head.
    """

    batch: int
    rows: int
    context: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ragged: bool = False
    page_dtype: torch.dtype = BF16

    @property
    def name(self) -> str:
        group = self.query_heads // self.kv_heads
        more = "" if self.rows == 1 else f" q{self.rows}"
        more += " ragged" if self.ragged else ""
        more += "" if self.page_dtype == BF16 else " " + str(self.page_dtype).removeprefix("torch.").split("_")[0]
        return f"GQA{group} {_short(self.context)} x{self.batch}{more}"

    def lengths(self) -> list[int]:
        """Keys of each sequence: evenly from an eighth of the context to all of it if ragged."""
        if not self.ragged:
            return [self.context] * self.batch
        return [self.context * (self.batch + 7 * index) // (8 * self.batch) for index in range(1, self.batch + 1)]

    def flops(self) -> float:
        visible = sum(self.rows * (length - (self.rows - 1) / 2) for length in self.lengths())
        return 4 * visible * self.query_heads * self.head_dim

    def num_bytes(self) -> float:
        """Keys, values and the block table; queries and output."""
        per_head = 2 * self.head_dim if self.page_dtype == BF16 else self.head_dim + 4
        keys_and_values = 2 * sum(self.lengths()) * self.kv_heads * per_head
        tables = 4 * sum(math.ceil(length / PAGE) for length in self.lengths())
        return keys_and_values + tables + 4 * self.batch * self.rows * self.query_heads * self.head_dim


@dataclass
class PagedInputs:
    """q [B·rows, Hq, d], k_pages and v_pages [P, page, Hkv, d] in random order, block_tables [B, max_pages].

    Pages in 8 bits have scales, [P, page, Hkv].
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lengths: Tensor
    lengths: list[int]
    rows: int
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @classmethod
    def random(cls, shape: PagedShape, device: torch.device) -> "PagedInputs":
        pages = [math.ceil(length / PAGE) for length in shape.lengths()]
        order = torch.randperm(sum(pages), device=device).to(torch.int32)
        tables = torch.zeros(shape.batch, max(pages), dtype=torch.int32, device=device)
        for row, owned in enumerate(order.split(pages)):
            tables[row, : len(owned)] = owned
        pool = (sum(pages), PAGE, shape.kv_heads, shape.head_dim)
        (k_pages, k_scales), (v_pages, v_scales) = (_pages(pool, shape.page_dtype, device) for _ in range(2))
        return cls(
            q=_normal(shape.batch * shape.rows, shape.query_heads, shape.head_dim, device=device),
            k_pages=k_pages,
            v_pages=v_pages,
            block_tables=tables,
            cu_seqlens=torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.rows,
            kv_lengths=torch.tensor(shape.lengths(), dtype=torch.int32, device=device),
            lengths=shape.lengths(),
            rows=shape.rows,
            k_scales=k_scales,
            v_scales=v_scales,
        )

    def last_rows(self) -> "PagedInputs":
        """The same keys, with only the last query of each sequence: plain decode."""
        ends = torch.arange(len(self.lengths) + 1, dtype=torch.int32, device=self.q.device)
        q = self.q.unflatten(0, (-1, self.rows))[:, -1].contiguous()
        return replace(self, q=q, cu_seqlens=ends, rows=1)

    def in_16_bits(self) -> "PagedInputs":
        """The same keys and values as bf16 pages."""
        k_pages = dequantize_rows(self.k_pages, self.k_scales, BF16)
        v_pages = dequantize_rows(self.v_pages, self.v_scales, BF16)
        return replace(self, k_pages=k_pages, v_pages=v_pages, k_scales=None, v_scales=None)

    def dense(self, pages: Tensor) -> Tensor:
        """Copy the pages in order, [B, context, Hkv, d]; for sequences of one length."""
        return pages[self.block_tables.long()].flatten(1, 2)[:, : self.lengths[0]]


def paged_reference(inputs: PagedInputs) -> tuple[Tensor]:
    """One sequence after the other, in fp64."""
    outputs = []
    for row, length in enumerate(inputs.lengths):
        pages = inputs.block_tables[row, : math.ceil(length / PAGE)].long()
        outputs.append(
            paged_attention_reference(
                inputs.q[row * inputs.rows : (row + 1) * inputs.rows].double(),
                _wide_pages(inputs.k_pages, inputs.k_scales, pages),
                _wide_pages(inputs.v_pages, inputs.v_scales, pages),
                torch.arange(len(pages), device=pages.device)[None],
                torch.tensor([0, inputs.rows]),
                torch.tensor([length]),
            )
        )
    return (torch.cat(outputs),)


def _pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    pages = _normal(*shape, device=device)
    return (pages, None) if dtype == BF16 else quantize_rows_reference(pages, dtype)


def _wide_pages(pages: Tensor, scales: Tensor | None, chosen: Tensor) -> Tensor:
    return dequantize_rows(pages[chosen], None if scales is None else scales[chosen], torch.float64)


@dataclass
class NormInputs:
    """x and residual [T, D], weight [D]; the gradients of the results, y and the sum, where gradients are wanted."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    grad_y: Tensor | None
    grad_sum: Tensor | None

    @classmethod
    def random(cls, tokens: int, size: int, device: torch.device, *, gradients: bool) -> "NormInputs":
        x, residual = (_normal(tokens, size, device=device) for _ in range(2))
        grads = [_normal(tokens, size, device=device) if gradients else None for _ in range(2)]
        return cls(x, residual, _normal(size, device=device), *grads)


def norm_reference(inputs: NormInputs) -> tuple[Tensor, ...]:
    """y, the sum, and the gradients of x, residual and weight where gradients are wanted."""
    x, residual, weight = (x.double().requires_grad_() for x in (inputs.x, inputs.residual, inputs.weight))
    summed = x + residual
    outputs = (rms_norm_reference(summed, weight, EPS), summed)
    return _with_gradients(outputs, (x, residual, weight), (inputs.grad_y, inputs.grad_sum))


@dataclass
class GateInputs:
    """gate and up [T, I]; the gradient of the result where gradients are wanted."""

    gate: Tensor
    up: Tensor
    grad: Tensor | None

    @classmethod
    def random(cls, tokens: int, size: int, device: torch.device, *, gradients: bool) -> "GateInputs":
        gate, up, grad = (_normal(tokens, size, device=device) for _ in range(3))
        return cls(gate, up, grad if gradients else None)


def gate_reference(inputs: GateInputs) -> tuple[Tensor, ...]:
    """The result, and the gradients of gate and up where gradients are wanted."""
    leaves = tuple(x.double().requires_grad_() for x in (inputs.gate, inputs.up))
    return _with_gradients((swiglu_reference(*leaves),), leaves, (inputs.grad,))


def _with_gradients(
    outputs: tuple[Tensor, ...], leaves: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    wide = [grad.double() for grad in grads if grad is not None]
    gradients = torch.autograd.grad(outputs, leaves, wide) if wide else ()
    return (*(output.detach() for output in outputs), *gradients)


@dataclass
class RotaryInputs:
    """New queries, keys and values [T, H, d], T a multiple of the page, their angles, and slots that fill the pages."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    k_pages: Tensor
    v_pages: Tensor
    slots: Tensor

    @classmethod
    def random(
        cls, tokens: int, *, query_heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> "RotaryInputs":
        positions = torch.randint(0, 32_768, (tokens,), device=device)
        cos, sin = rotary_tables(positions, rope_frequencies(head_dim, 500_000.0).to(device))
        pages = (math.ceil(tokens / PAGE), PAGE, kv_heads, head_dim)
        return cls(
            q=_normal(tokens, query_heads, head_dim, device=device),
            k=_normal(tokens, kv_heads, head_dim, device=device),
            v=_normal(tokens, kv_heads, head_dim, device=device),
            cos=cos,
            sin=sin,
            k_pages=torch.full(pages, torch.nan, dtype=BF16, device=device),
            v_pages=torch.full(pages, torch.nan, dtype=BF16, device=device),
            slots=torch.randperm(pages[0] * PAGE, device=device)[:tokens],
        )


def rotated_reference(inputs: RotaryInputs) -> tuple[Tensor, Tensor]:
    """The rotated queries and keys."""
    return apply_rotary_reference(inputs.q.double(), inputs.k.double(), inputs.cos.double(), inputs.sin.double())


def written_reference(inputs: RotaryInputs) -> tuple[Tensor, ...]:
    """The rotated queries, and the pages with the rotated keys and the values in their slots."""
    q, k = rotated_reference(inputs)
    k_pages, v_pages = inputs.k_pages.double(), inputs.v_pages.double()
    k_pages.flatten(0, 1)[inputs.slots] = k
    v_pages.flatten(0, 1)[inputs.slots] = inputs.v.double()
    return q, k_pages, v_pages


def _normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=BF16)


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
