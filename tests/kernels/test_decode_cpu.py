"""Attention of decode and verification in C on the CPU: against fp64, its bits whatever is beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.attention._decode_cpu as in_c
import kernels.attention._paged_cpu as module
from tests.compare import check_close
from tests.paged import PagedCase, attend_one_by_one, make_case

DTYPES = [dtype for dtype in in_c._SOURCES if in_c._library(dtype) is not None]
pytestmark = pytest.mark.skipif(not DTYPES, reason="no C compiler, or a processor without AVX2")

CPU = torch.device("cpu")
# (new tokens, tokens in the cache with them): around pages, around chunks of keys, several chunks, verification.
SEQUENCES = [(1, 1), (1, 16), (1, 17), (5, 5), (4, 200), (1, 255), (1, 256), (1, 257), (3, 258), (16, 700), (1, 1100)]
# Query heads to a key/value head: alone, fewer than fit a register tile, as many, more.
HEADS = pytest.mark.parametrize("heads", [(2, 2), (9, 3), (4, 1), (14, 2), (9, 1)], ids=str)


Make = Callable[..., PagedCase]


@pytest.fixture(params=DTYPES, ids=str, scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    """A case of these sequences, in each dtype that C takes here."""

    def case(sequences: list[tuple[int, int]], **how: Any) -> PagedCase:
        return make_case(sequences, request.param, CPU, **{"head_dim": 64, **how})

    return case


def readable(case: PagedCase) -> PagedCase:
    """The reference reads whole tables."""
    return replace(case, block_tables=case.block_tables.clamp(max=len(case.k_pages) - 1))


def is_taken(case: PagedCase) -> bool:
    return in_c.takes(case.q, case.k_pages.flatten(0, 1), case.v_pages.flatten(0, 1))


@HEADS
@pytest.mark.parametrize("window", [None, 1, 20, 300])
def test_against_fp64(make: Make, heads: tuple[int, int], window: int | None) -> None:
    case = make(SEQUENCES, heads=heads)
    assert is_taken(case)
    check_close(case.attend(window=window), readable(case).expected(window=window))


@pytest.mark.parametrize(("head_dim", "page"), [(64, 1), (128, 16), (192, 4), (256, 64)])
def test_head_dims_and_pages(make: Make, head_dim: int, page: int) -> None:
    case = make(SEQUENCES, head_dim=head_dim, page=page)
    check_close(case.attend(scale=0.3), readable(case).expected(scale=0.3))


@settings(max_examples=20, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 16), st.integers(1, 40)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 40),
)
def test_any_lengths_spelled_out(make: Make, sequences: list[tuple[int, int]], window: int | None) -> None:
    case = make([(min(queries, length), length) for queries, length in sequences])
    check_close(case.attend(window=window), attend_one_by_one(case, window))


@pytest.mark.parametrize("window", [None, 100])
def test_a_query_has_the_same_bits_alone(make: Make, window: int | None) -> None:
    """Without other sequences and without drafts after it, wherever the pages lie."""
    case = make(SEQUENCES, heads=(9, 3))
    together, bounds = case.attend(window=window), case.cu_seqlens.tolist()
    for number, (queries, _) in enumerate(SEQUENCES):
        for query in range(queries):
            alone = case.sequence(number, query, query + 1).attend(window=window)
            assert torch.equal(alone[0], together[bounds[number] + query])
    in_order = make(SEQUENCES, heads=(9, 3), order=torch.arange(len(case.k_pages)))
    assert torch.equal(in_order.attend(window=window), together)


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


def test_beside_prompts_and_sequences_without_queries(make: Make) -> None:
    case = make([(1, 300), (0, 9), (40, 100), (2, 30), (17, 17)])
    check_close(case.attend(), readable(case).expected())


def test_agrees_with_torch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SEQUENCES, heads=(9, 3))
    ours = case.attend()
    monkeypatch.setattr(module, "decodes", lambda *tensors: False)
    check_close(case.attend(), ours.double())


def test_scores_far_apart_and_large(make: Make) -> None:
    """One key takes all, beside others 2^-126 and less of it; scores beyond what fp32 could raise e to."""
    case = make([(1, 600), (2, 40)])
    for factor in (30.0, 3000.0):
        loud = replace(case, q=case.q * factor)
        check_close(loud.attend(), readable(loud).expected())


@pytest.mark.parametrize("spoiled", ["k_pages", "v_pages"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_sequence_and_shows(make: Make, spoiled: str, value: float) -> None:
    case = make([(1, 300), (2, 300), (1, 20)])
    getattr(case, spoiled)[case.block_tables[1, 0], 3] = value
    result = case.attend()
    assert result[[0, 3]].isfinite().all() and not result[1:3].isfinite().any()


def test_strided_queries_and_what_is_left_to_torch(make: Make) -> None:
    case = make(SEQUENCES, heads=(4, 2))
    wide = torch.cat((case.q, case.q), 1)[:, :4]
    assert not wide.is_contiguous() and is_taken(replace(case, q=wide))
    assert torch.equal(replace(case, q=wide).attend(), case.attend())
    assert not is_taken(make([(1, 5)], head_dim=32))
    assert not is_taken(make_case([(1, 5)], torch.float16, CPU, head_dim=64))
    assert not is_taken(replace(case, q=case.q.transpose(0, 1).contiguous().transpose(0, 1)))
