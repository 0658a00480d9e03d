from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import _decode_cpu as in_c
from kernels.attention._kv_quantization import LIMITS, dequantize_rows, quantize_rows_reference
from kernels.attention.flash import flash_attention
from kernels.attention.paged import paged_attention, paged_attention_reference, plan_paged_attention, write_pages
from tests.compare import check_close, relative_rms
from tests.paged import attend_one_by_one, grow_trees, hide_slots, make_case

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
PAGE, QUERY_HEADS, KV_HEADS, HEAD_DIM = 16, 6, 2, 12
# (new tokens, tokens in the cache with them) of each sequence.
BATCHES = {
    "decode one": [(1, 50)],
    "decode many": [(1, length) for length in (1, 15, 16, 17, 31, 32, 33, 200, 190, 64)],
    "verify": [(5, 40), (5, 37), (3, 3), (1, 20), (5, 5)],
    "prompts": [(40, 40), (17, 17), (16, 16), (150, 150)],
    "chunks": [(40, 100), (17, 33), (130, 140)],
    "mixed": [(1, 70), (0, 9), (20, 60), (4, 16), (1, 71), (33, 33), (1, 1)],
    "fewer keys than queries": [(4, 2), (30, 3), (1, 5)],
}


@dataclass
class Cache:
    """Keys and values of some sequences in pages; everything not theirs is NaN."""

    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lengths: Tensor
    q: Tensor

    def attend(self, window: int | None = None, **changes: Tensor) -> Tensor:
        arguments = {**vars(self), **changes}
        names = ("q", "k_pages", "v_pages", "block_tables", "cu_seqlens", "kv_lengths")
        return paged_attention(*(arguments[name] for name in names), window=window)

    def expected(self, window: int | None = None) -> Tensor:
        wide = (self.q.double(), self.k_pages.double(), self.v_pages.double())
        return paged_attention_reference(*wide, self.block_tables, self.cu_seqlens, self.kv_lengths, window=window)


def fill_cache(sequences: list[tuple[int, int]], dtype: torch.dtype, order: Tensor | None = None) -> Cache:
    """`order`: which physical page serves as the i-th; random by default."""
    num_pages = sum(length // PAGE + 1 for _, length in sequences) + 3
    order = torch.randperm(num_pages) if order is None else order
    k_pages, v_pages = (torch.full((num_pages, PAGE, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype) for _ in range(2))
    longest = max(length for _, length in sequences) // PAGE + 1
    # Entries past a sequence's pages are never read: they point outside of the pool.
    block_tables = torch.full((len(sequences), longest), 10**6, dtype=torch.int32)
    taken = 0
    for row, (_, length) in enumerate(sequences):
        pages = order[taken : taken + -(-length // PAGE)]
        taken += len(pages)
        block_tables[row, : len(pages)] = pages
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        keys, values = torch.randn(2, length, KV_HEADS, HEAD_DIM).to(dtype)
        write_pages(keys, values, k_pages, v_pages, slots)
    queries, lengths = (torch.tensor(column) for column in zip(*sequences, strict=True))
    cu_seqlens = torch.cat((torch.zeros(1), queries.cumsum(0))).int()
    q = torch.randn(int(queries.sum()), QUERY_HEADS, HEAD_DIM).to(dtype)
    return Cache(k_pages, v_pages, block_tables, cu_seqlens, lengths.int(), q)


@DTYPES
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 1, 16, 50])
def test_equals_the_reference(dtype: torch.dtype, sequences: list[tuple[int, int]], window: int | None) -> None:
    cache = fill_cache(sequences, dtype)
    cache.block_tables.clamp_(max=len(cache.k_pages) - 1)  # the reference reads whole tables
    result = cache.attend(window)
    assert result.dtype == dtype
    check_close(result, cache.expected(window))


@settings(max_examples=30, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 40),
)
def test_any_lengths(sequences: list[tuple[int, int]], window: int | None) -> None:
    cache = fill_cache(sequences, torch.float32)
    cache.block_tables.clamp_(max=len(cache.k_pages) - 1)
    check_close(cache.attend(window), cache.expected(window))


@DTYPES
@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
def test_physical_pages_do_not_matter(dtype: torch.dtype, sequences: list[tuple[int, int]]) -> None:
    """Side by side or scattered, with tables whose unused entries point nowhere: bitwise the same."""
    num_pages = len(fill_cache(sequences, dtype).k_pages)
    results = []
    for order in (torch.arange(num_pages), torch.arange(num_pages).flip(0), torch.randperm(num_pages)):
        torch.manual_seed(1)
        results.append(fill_cache(sequences, dtype, order).attend())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@DTYPES
def test_equals_packed_attention(dtype: torch.dtype) -> None:
    lengths = [33, 16, 1, 140]
    cache = fill_cache([(length, length) for length in lengths], dtype)
    slots = [(t[t < len(cache.k_pages)][:, None] * PAGE + torch.arange(PAGE)).flatten() for t in cache.block_tables]
    used = torch.cat([s[:length] for s, length in zip(slots, lengths, strict=True)])
    k, v = (pages.flatten(0, 1)[used] for pages in (cache.k_pages, cache.v_pages))
    check_close(cache.attend(), flash_attention(cache.q, k, v, cache.cu_seqlens).double())


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 40])
def test_chunks_and_decode_equal_the_whole_prompt(chunk: int) -> None:
    cache = fill_cache([(40, 40)], torch.float32)
    whole = cache.attend()
    for start in range(0, 40, chunk):
        stop = min(start + chunk, 40)
        part = cache.attend(
            q=cache.q[start:stop],
            cu_seqlens=torch.tensor([0, stop - start], dtype=torch.int32),
            kv_lengths=torch.tensor([stop], dtype=torch.int32),
        )
        check_close(part, whole[start:stop])


def test_one_plan_serves_every_layer() -> None:
    layers = [fill_cache(BATCHES["mixed"], torch.float32, torch.arange(60)) for _ in range(2)]
    first = layers[0]
    plan = plan_paged_attention(first.block_tables, first.cu_seqlens, first.kv_lengths, PAGE, window=20)
    for layer in layers:
        planned = paged_attention(
            layer.q, layer.k_pages, layer.v_pages, layer.block_tables, layer.cu_seqlens, layer.kv_lengths,
            window=20, plan=plan,
        )  # fmt: skip
        assert torch.equal(planned, layer.attend(20))


def test_queries_may_be_strided() -> None:
    cache = fill_cache(BATCHES["mixed"], torch.bfloat16)
    joint = torch.cat((cache.q, torch.full_like(cache.q, torch.nan)), dim=1)
    assert torch.equal(cache.attend(q=joint[:, :QUERY_HEADS]), cache.attend())


def test_writing_skips_negative_slots_and_touches_nothing_else() -> None:
    k, v = torch.randn(2, 4, KV_HEADS, HEAD_DIM)
    k_pages, v_pages = torch.zeros(2, 3, PAGE, KV_HEADS, HEAD_DIM)
    write_pages(k, v, k_pages, v_pages, torch.tensor([17, -1, 0, 47]))
    for pages, new in ((k_pages, k), (v_pages, v)):
        expected = torch.zeros(3 * PAGE, KV_HEADS, HEAD_DIM)
        expected[[17, 0, 47]] = new[[0, 2, 3]]
        assert torch.equal(pages.flatten(0, 1), expected)


def test_writing_takes_slices_of_a_projection() -> None:
    heads = torch.randn(5, 2 * KV_HEADS, HEAD_DIM)
    k_pages, v_pages = torch.zeros(2, 1, PAGE, KV_HEADS, HEAD_DIM)
    write_pages(heads[:, :KV_HEADS], heads[:, KV_HEADS:], k_pages, v_pages, torch.arange(5))
    assert torch.equal(k_pages[0, :5], heads[:, :KV_HEADS]) and torch.equal(v_pages[0, :5], heads[:, KV_HEADS:])


SMALL = [(1, 20), (4, 9), (0, 3), (2, 2), (3, 1), (1, 0), (17, 18)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("change", [None, grow_trees, hide_slots], ids=["plain", "tree", "hidden"])
@pytest.mark.parametrize("stored", [None, *LIMITS], ids=str)
def test_against_attention_spelled_out(window: int | None, change: Any, stored: torch.dtype | None) -> None:
    """The reference and the CPU form with trees, hidden slots and 8-bit pages."""
    if change is hide_slots and stored is not None:
        pytest.skip("hidden slots of 8 bits cannot hold NaN")
    case = make_case(SMALL, torch.float32, CPU, page=8, heads=(2, 1), head_dim=8, stored=stored)
    if change is not None:
        case = change(case)
    expected = attend_one_by_one(case, window)
    check_close(case.expected(window=window), expected)
    check_close(case.attend(window=window), expected)


def test_extras_keep_the_dtype() -> None:
    case = grow_trees(make_case(SMALL, torch.bfloat16, CPU))
    result = case.attend()
    assert result.dtype == torch.bfloat16
    check_close(result, case.expected())


@pytest.mark.parametrize("stored", LIMITS, ids=str)
def test_eight_bits_on_the_cpu(stored: torch.dtype) -> None:
    """Decoding, verifying and prompts in groups; in bf16 keys are rounded once more, as plain pages hold them."""
    for sequences in (*BATCHES.values(), SMALL):
        for dtype, window in ((torch.float32, None), (torch.float32, 20), (torch.bfloat16, None)):
            case = make_case(sequences, dtype, CPU, heads=(6, 2), head_dim=12, stored=stored)
            case.block_tables = case.block_tables.clamp(max=len(case.k_pages) - 1)  # the reference reads whole tables
            check_close(case.attend(window=window), case.expected(window=window))


def outliers_in_a_channel(x: Tensor) -> Tensor:
    """As keys of language models have them: one channel, in every token, twenty times the others."""
    return x * torch.where(torch.arange(x.shape[-1]) == 3, 20.0, 1.0)


@pytest.mark.parametrize("planted", [False, True], ids=["even", "outlier channel"])
@pytest.mark.parametrize(("stored", "bounds"), [(torch.int8, (0.01, 0.08)), (torch.float8_e4m3fn, (0.042, 0.042))])
def test_what_eight_bits_cost(stored: torch.dtype, bounds: tuple[float, float], planted: bool) -> None:
    """Against fp64 over unrounded keys and values: each number is off by half a step at most, and outputs by little.

    A step of int8 is 1/127 of the largest channel, so an outlier coarsens the others; one of fp8 is a part of the
    number itself, 0.026 in RMS: as much again comes from the scores, 0.037 in all.
    """
    q, k, v = torch.randn(4, 6, 64), torch.randn(200, 2, 64), torch.randn(200, 2, 64)
    k = outliers_in_a_channel(k) if planted else k
    q[..., 3] /= 20 if planted else 1
    rounded = [dequantize_rows(*quantize_rows_reference(x, stored), torch.float64) for x in (k, v)]
    size = k.double().abs().amax(-1, keepdim=True)
    half_steps = size / 254 if stored == torch.int8 else torch.maximum(k.double().abs() / 16, size / 448 / 1024)
    assert bool(((rounded[0] - k).abs() <= half_steps * (1 + 1e-6)).all())
    case = make_case([(4, 200)], torch.float32, CPU, heads=(6, 2), head_dim=64, stored=stored)
    pages = case.block_tables[0, :13].long()
    slots = (pages[:, None] * 16 + torch.arange(16)).flatten()[:200]
    write_pages(k, v, case.k_pages, case.v_pages, slots, k_scales=case.k_scales, v_scales=case.v_scales)
    exact = spell_out(q.double(), k.double(), v.double())
    assert relative_rms(replace(case, q=q).attend().double(), exact) < bounds[planted]


def spell_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries at the end of the keys, causal."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def test_the_kernel_in_c_reads_no_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_c, "_library", lambda dtype: object())
    q, k = torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(16, 2, 64, dtype=torch.bfloat16)
    assert in_c.takes(q, k, k)
    for stored in LIMITS:
        assert not in_c.takes(q, k.to(stored), k.to(stored))


@DTYPES
def test_batch_invariant_on_the_cpu(dtype: torch.dtype) -> None:
    """Each sequence gives the same bits alone as in company."""
    sequences = BATCHES["decode many"] + BATCHES["mixed"]
    case = make_case(sequences, dtype, CPU, heads=(6, 2), head_dim=12)
    together = case.attend(batch_invariant=True).split([queries for queries, _ in sequences])
    for number, result in enumerate(together):
        assert torch.equal(case.sequence(number).attend(batch_invariant=True), result)
