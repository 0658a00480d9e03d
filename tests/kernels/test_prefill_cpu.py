"""Attention of prompts in C on the CPU: against fp64, its bits in any company, 8 bits, packed documents."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.attention._flash_cpu as packed
import kernels.attention._paged_cpu as module
import kernels.attention._prefill_cpu as in_c
from kernels.attention._cached_rows import CachedRows
from kernels.attention._kv_quantization import LIMITS
from kernels.attention.flash import flash_attention
from tests.compare import check_close
from tests.paged import PagedCase, make_case

pytestmark = pytest.mark.skipif(in_c._library() is None, reason="no C compiler, or a processor without AVX2")
CPU = torch.device("cpu")
# (new tokens, tokens in the cache with them): around tiles of rows, blocks of keys and tasks; chunks; a decode beside.
SEQUENCES = [(17, 17), (64, 64), (65, 65), (130, 130), (1, 70), (0, 9), (20, 200), (40, 256), (33, 257), (30, 3)]
# Query heads to a key/value head: alone, as in SmolLM2, as many as a task takes, more.
HEADS = pytest.mark.parametrize("heads", [(2, 2), (9, 3), (4, 1), (7, 1)], ids=str)
Make = Callable[..., PagedCase]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str, scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    """A case of these sequences, in each dtype that C takes."""

    def case(sequences: list[tuple[int, int]], **how: Any) -> PagedCase:
        return make_case(sequences, request.param, CPU, **{"head_dim": 64, **how})

    return case


def readable(case: PagedCase) -> PagedCase:
    """The reference reads whole tables."""
    return replace(case, block_tables=case.block_tables.clamp(max=len(case.k_pages) - 1))


def is_taken(case: PagedCase) -> bool:
    k, v = ((case.k_pages, case.k_scales), (case.v_pages, case.v_scales))
    return in_c.takes(case.q, CachedRows.of_pages(*k), CachedRows.of_pages(*v))


@HEADS
@pytest.mark.parametrize("window", [None, 1, 20, 100])
def test_against_fp64(make: Make, heads: tuple[int, int], window: int | None) -> None:
    case = make(SEQUENCES, heads=heads)
    assert is_taken(case)
    check_close(case.attend(window=window), readable(case).expected(window=window))


@pytest.mark.parametrize(("head_dim", "page"), [(8, 16), (72, 1), (128, 4), (256, 64)])
def test_head_dims_and_pages(make: Make, head_dim: int, page: int) -> None:
    case = make(SEQUENCES, head_dim=head_dim, page=page)
    assert is_taken(case)
    check_close(case.attend(scale=0.3), readable(case).expected(scale=0.3))


@settings(max_examples=20, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 90),
)
def test_any_lengths(sequences: list[tuple[int, int]], window: int | None) -> None:
    case = readable(make_case(sequences, torch.float32, CPU))
    check_close(case.attend(window=window), case.expected(window=window))


@pytest.mark.parametrize("window", [None, 50])
def test_chunks_and_company_change_no_bit(make: Make, window: int | None) -> None:
    """A prompt in chunks, alone, beside others, wherever its pages lie."""
    sequences = [(200, 230), (130, 130)]
    case = make(sequences, heads=(9, 3))
    whole, bounds = case.attend(window=window), case.cu_seqlens.tolist()
    for number, (queries, _) in enumerate(sequences):
        for size in (17, 50, queries):
            for first in range(0, queries - 17, size):
                stop = queries if queries - first - size < 17 else first + size
                chunk = case.sequence(number, first, stop).attend(window=window)
                assert torch.equal(chunk, whole[bounds[number] + first : bounds[number] + stop])
    in_order = make(sequences, heads=(9, 3), order=torch.arange(len(case.k_pages)))
    assert torch.equal(in_order.attend(window=window), whole)


def test_threads_change_no_bit(make: Make) -> None:
    case, before = make(SEQUENCES), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(case.attend())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("stored", LIMITS, ids=str)
def test_eight_bits_against_fp64(make: Make, stored: torch.dtype) -> None:
    case = make([sequence for sequence in SEQUENCES if sequence[0] > 16], stored=stored)
    assert is_taken(case)
    check_close(case.attend(window=100), readable(case).expected(window=100))


def test_agrees_with_torch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SEQUENCES, heads=(9, 3))
    ours = case.attend()
    monkeypatch.setattr(module, "prefills", lambda *tensors: False)
    check_close(case.attend(), ours.double())


def test_scores_far_apart_and_large(make: Make) -> None:
    """One key takes all, beside others 2^-126 and less of it; scores beyond what fp32 could raise e to."""
    case = make([(40, 200), (100, 100)])
    loud = replace(case, q=case.q * 30)
    check_close(loud.attend(), readable(loud).expected())
    assert replace(case, q=case.q * 1e6).attend().isfinite().all()


@pytest.mark.parametrize("spoiled", ["k_pages", "v_pages"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_sequence_and_shows(make: Make, spoiled: str, value: float) -> None:
    case = make([(20, 20), (100, 100), (30, 30)])
    getattr(case, spoiled)[case.block_tables[1, 0], 0] = value
    result = case.attend().split([20, 100, 30])
    assert result[0].isfinite().all() and result[2].isfinite().all() and not result[1].isfinite().any()


def test_strided_queries_and_what_is_left_to_torch(make: Make) -> None:
    case = make(SEQUENCES, heads=(4, 2))
    wide = torch.cat((case.q, case.q), 1)[:, :4]
    assert not wide.is_contiguous() and is_taken(replace(case, q=wide))
    assert torch.equal(replace(case, q=wide).attend(), case.attend())
    assert not is_taken(make([(20, 20)], head_dim=12)) and not is_taken(make([(20, 20)], head_dim=264))
    assert not is_taken(make_case([(20, 20)], torch.float16, CPU))


@pytest.mark.parametrize("window", [None, 30])
def test_packed_documents_without_gradients(make: Make, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch attends them, and to the bit as pages of one slot; rows past the last document are zero."""
    case = make([(100, 100), (5, 5), (64, 64)], heads=(9, 3), page=1, order=torch.arange(172))
    k, v = (pages.flatten(0, 1)[:169] for pages in (case.k_pages, case.v_pages))
    padded = torch.cat((case.q, case.q[:3]))
    ours = flash_attention(padded, k, v, case.cu_seqlens, case.cu_seqlens, window=window)
    assert torch.equal(ours[:100], case.attend(window=window)[:100]) and not ours[169:].any()
    learnt = flash_attention(padded.clone().requires_grad_(), k, v, case.cu_seqlens, case.cu_seqlens, window=window)
    assert learnt.requires_grad
    check_close(learnt.detach(), ours.double())
    monkeypatch.setattr(packed, "attend_prefill", lambda *arguments: pytest.fail("torch attends with both directions"))
    flash_attention(padded, k, v, case.cu_seqlens, case.cu_seqlens, causal=False)


@pytest.mark.parametrize("line", ["#define WIDTH 16", "#undef __AMX_BF16__"])
def test_other_forms(make: Make, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 lanes, as with AVX-512, by two registers each where the processor has 8; pairs of bf16 without AMX."""
    source = tmp_path / "_prefill_other.c"
    source.write_text(f'{line}\n#include "{Path(in_c.__file__).with_name("_prefill.c")}"\n')
    case = make(SEQUENCES, heads=(9, 3))
    usual, library = case.attend(window=50), in_c.load(source)
    assert library is not None
    monkeypatch.setattr(in_c, "_library", lambda: library)
    check_close(case.attend(window=50), usual.double())
