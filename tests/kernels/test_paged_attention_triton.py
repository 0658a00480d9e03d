"""The Triton kernels of paged attention, interpreted on the CPU or native on a GPU: the same tests."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from kernels.attention._kv_quantization import LIMITS
from kernels.attention._paged_plan import ListedPlan, Tiles, Work, choose_tiles
from kernels.attention.paged import paged_attention, plan_paged_attention
from tests.compare import check_close
from tests.paged import PagedCase, grow_trees, hide_slots, make_case

# Small tiles and short splits, so that short sequences cross the borders of both.
SMALL = Tiles(rows=16, keys=16, chunk=16, warps=4, ahead=1, residents=2)
MANY_ROWS = SMALL._replace(rows=64)
# (new tokens, keys with them) of each sequence.
DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 49), (1, 0)]
VERIFY = [(5, 40), (5, 17), (3, 3), (5, 5)]
MIXED = [(1, 66), (18, 33), (0, 9), (4, 16), (1, 0), (0, 0), (7, 3), (11, 11)]
BATCHES = {"decode": DECODE, "verify": VERIFY, "mixed": MIXED}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def splits_of(case: PagedCase, plan: Any) -> list[int]:
    """How many splits the plan gives each sequence."""
    assert isinstance(plan, ListedPlan)
    return plan.work_for(case.q, case.k_pages).firsts[3, :-2].tolist()


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 1, 20])
def test_equals_the_reference(device: torch.device, sequences: list[tuple[int, int]], window: int | None) -> None:
    case = make_case(sequences, torch.float32, device)
    check_close(case.attend(window=window, tiles=SMALL), case.expected(window=window))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_in_16_bits(device: torch.device, dtype: torch.dtype, window: int | None) -> None:
    case = make_case(MIXED, dtype, device)
    result = case.attend(window=window, tiles=SMALL)
    assert result.dtype == dtype
    check_close(result, case.expected(window=window))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("invariant", [False, True])
def test_many_rows(device: torch.device, window: int | None, invariant: bool) -> None:
    """Tiles of many rows have a loop without masks for the keys that all of them see."""
    case = make_case([(40, 75), (50, 50), (1, 30)], torch.float32, device)
    check_close(case.attend(window=window, tiles=MANY_ROWS, batch_invariant=invariant), case.expected(window=window))


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
def test_tiles_of_its_own_choice(device: torch.device, sequences: list[tuple[int, int]]) -> None:
    case = make_case(sequences, torch.float32, device)
    check_close(case.attend(), case.expected())
    assert torch.equal(paged_attention(*case.operands), case.attend())


@pytest.mark.parametrize("page", [1, 8, 32])
def test_page_sizes(device: torch.device, page: int) -> None:
    case = make_case([(1, 33), (5, 17), (1, 8)], torch.float32, device, page=page)
    check_close(case.attend(tiles=SMALL), case.expected())


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_head_dims(device: torch.device, head_dim: int) -> None:
    case = make_case([(1, 33), (3, 20)], torch.float32, device, head_dim=head_dim, heads=(3, 1))
    check_close(case.attend(tiles=SMALL), case.expected())


@pytest.mark.parametrize("heads", [(2, 2), (5, 1), (20, 1), (6, 3)])
def test_groups_of_any_size(device: torch.device, heads: tuple[int, int]) -> None:
    """A group of 20 heads does not fit the 16 rows of a tile; one of 5 or 3 does not divide them."""
    case = make_case([(1, 20), (5, 33)], torch.float32, device, heads=heads)
    check_close(case.attend(tiles=SMALL), case.expected())


def test_rows_of_no_sequence_are_zero(device: torch.device) -> None:
    """As in a captured graph with room for more tokens than there are."""
    case = make_case([(2, 20), (3, 5)], torch.float32, device)
    padded = replace(case, q=torch.cat((case.q, torch.full_like(case.q, torch.nan))))
    result = padded.attend(tiles=SMALL)
    check_close(result[:5], case.expected())
    assert not result[5:].any()


def test_no_queries(device: torch.device) -> None:
    case = make_case([(0, 20), (0, 0)], torch.float32, device)
    assert case.attend().shape == (0, 4, 16)


@pytest.mark.parametrize("chunk", [16, 32, 48, 64])
def test_any_number_of_splits_gives_the_same(device: torch.device, chunk: int) -> None:
    """Room for any number of programs at once: then a sequence gets as many splits as there are chunks in it."""
    case = make_case([(1, 64), (5, 60), (20, 49), (1, 10)], torch.float32, device)
    tiles = SMALL._replace(chunk=chunk, residents=100)
    plan = case.plan(tiles=tiles)
    assert splits_of(case, plan) == [-(-length // chunk) for length in (64, 60, 49, 10)]
    check_close(case.attend(tiles=tiles), case.expected())


def test_splits_under_a_window(device: torch.device) -> None:
    case = make_case([(1, 64), (5, 60), (20, 49)], torch.float32, device)
    tiles = SMALL._replace(residents=100)
    plan = case.plan(tiles=tiles, window=24)
    # Keys 40 to 63 lie in two chunks of the 16 from 32 on; 32 to 59 too; a tile of 20 rows sees at most 44 from 16 ...
    assert splits_of(case, plan)[:2] == [2, 2]
    check_close(case.attend(window=24, tiles=tiles), case.expected(window=24))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_physical_pages_do_not_matter(device: torch.device, dtype: torch.dtype) -> None:
    num_pages = make_case(MIXED, dtype, device, page=8).k_pages.shape[0]
    orders = (torch.arange(num_pages), torch.arange(num_pages).flip(0), torch.randperm(num_pages))
    first, *others = (make_case(MIXED, dtype, device, page=8, order=order).attend(tiles=SMALL) for order in orders)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("stored", LIMITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_in_8_bits(device: torch.device, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Against the reference on what the pages hold, so that only the arithmetic can be off."""
    case = make_case([(1, 50), (5, 21), (20, 20), (1, 0)], dtype, device, stored=stored)
    check_close(case.attend(tiles=SMALL), case.expected(), dtype=torch.bfloat16 if dtype == torch.float16 else None)


@pytest.mark.parametrize("stored", LIMITS, ids=str)
def test_pages_in_8_bits_with_tiles_of_its_own_choice(device: torch.device, stored: torch.dtype) -> None:
    """Keys become fp32 before they are multiplied, so a tile has no more of them than of pages in fp32."""
    case = make_case([(1, 200), (3, 90)], torch.float32, device, stored=stored, head_dim=128)
    wide = make_case([(1, 200), (3, 90)], torch.float32, device, head_dim=128)
    keys = [choose_tiles(x.q, x.k_pages, 2, batch_invariant=False).keys for x in (case, wide)]
    assert keys == [32, 32]
    check_close(case.attend(), case.expected())


@pytest.mark.parametrize("stored", LIMITS, ids=str)
def test_pages_in_8_bits_under_a_window(device: torch.device, stored: torch.dtype) -> None:
    case = make_case([(1, 50), (20, 40)], torch.float32, device, stored=stored, page=8)
    for tiles in (SMALL, MANY_ROWS):
        check_close(case.attend(window=18, tiles=tiles), case.expected(window=18))


@pytest.mark.parametrize("tiles", [SMALL, MANY_ROWS], ids=["decode", "many rows"])
@pytest.mark.parametrize("window", [None, 12])
def test_tree_masks(device: torch.device, tiles: Tiles, window: int | None) -> None:
    case = grow_trees(make_case([(9, 40), (5, 5), (1, 17), (12, 29), (7, 3)], torch.float32, device))
    result = case.attend(window=window, tiles=tiles)
    check_close(result, case.expected(window=window))
    assert not torch.equal(result, replace(case, tree_mask=None).attend(window=window, tiles=tiles))


def test_a_chain_is_a_tree(device: torch.device) -> None:
    case = make_case([(6, 30), (4, 4)], torch.float32, device)
    everything = torch.ones(case.q.shape[0], 6, dtype=torch.bool, device=device)
    assert torch.equal(replace(case, tree_mask=everything).attend(tiles=SMALL), case.attend(tiles=SMALL))


@pytest.mark.parametrize("tiles", [SMALL, MANY_ROWS], ids=["decode", "many rows"])
@pytest.mark.parametrize("window", [None, 12])
def test_hidden_slots_have_no_key(device: torch.device, tiles: Tiles, window: int | None) -> None:
    """What they hold is NaN; under a short window some queries see nothing at all."""
    case = hide_slots(make_case([(1, 50), (9, 30), (20, 20), (1, 2)], torch.float32, device), share=0.6)
    check_close(case.attend(window=window, tiles=tiles), case.expected(window=window))
    nothing = replace(case, visible_slots=torch.zeros_like(case.visible_slots))
    assert not nothing.attend(window=window, tiles=tiles).any()


def test_queries_and_pages_may_be_strided(device: torch.device) -> None:
    case = make_case(MIXED, torch.float32, device)
    joint = torch.cat((case.q, torch.full_like(case.q, torch.nan)), dim=1)
    strided = replace(
        case,
        q=joint[:, : case.q.shape[1]],
        k_pages=case.k_pages.transpose(1, 2).contiguous().transpose(1, 2),
        v_pages=torch.stack((case.v_pages, case.v_pages)).transpose(0, 1)[:, 1],
    )
    assert torch.equal(strided.attend(tiles=SMALL), case.attend(tiles=SMALL))


def test_one_plan_serves_every_layer(device: torch.device) -> None:
    case = make_case(VERIFY, torch.float32, device)
    plan = case.plan(window=20, tiles=SMALL)
    for layer in (case, replace(case, q=case.q + 1)):
        planned = paged_attention(*layer.operands, window=20, plan=plan)
        assert torch.equal(planned, layer.attend(window=20, tiles=SMALL))
    assert isinstance(plan, ListedPlan) and len(plan._listed) == 1


def test_decode_in_rows_equals_one_by_one(device: torch.device) -> None:
    case = make_case([(5, 40)], torch.float32, device)
    alone = torch.cat([case.sequence(0, i, i + 1).attend(tiles=SMALL) for i in range(5)])
    check_close(case.attend(tiles=SMALL), alone.double())


INVARIANT = [(1, 90), (4, 60), (12, 33), (1, 10)]
COUNTS = [queries for queries, _ in INVARIANT]


@pytest.fixture
def rows_alike(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply a row alike wherever it lies in its tile, as matrix units do and BLAS does not."""
    if device.type == "cuda":
        return

    def create_dot(a: Any, b: Any, c: Any, *_: Any) -> TensorHandle:
        return TensorHandle((a.data[:, :, None] * b.data[None]).sum(1) + c.data, c.dtype.scalar)

    monkeypatch.setattr(interpreter_builder, "create_dot", create_dot)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.usefixtures("rows_alike")
def test_batch_invariance(device: torch.device, window: int | None) -> None:
    """The same bits alone and in company, in another order, row by row and chunk by chunk, split or not."""
    case = make_case(INVARIANT, torch.float32, device)
    options = {"batch_invariant": True, "window": window}
    one_program, some, many = (SMALL._replace(chunk=32, residents=residents) for residents in (1, 2, 100))
    whole = case.attend(tiles=some, **options)
    check_close(whole, case.expected(window=window))
    together = list(whole.split(COUNTS))
    for number, (result, tiles) in enumerate(zip(together, (one_program, many, some, many), strict=True)):
        assert torch.equal(case.sequence(number).attend(tiles=tiles, **options), result)
    rows = [case.sequence(1, i, i + 1).attend(tiles=many, **options) for i in range(4)]
    assert torch.equal(torch.cat(rows), together[1])
    chunks = [case.sequence(2, i, i + 6).attend(tiles=one_program, **options) for i in (0, 6)]
    assert torch.equal(torch.cat(chunks), together[2])
    backwards = replace(
        case,
        q=torch.cat(case.q.split(COUNTS)[::-1]),
        block_tables=case.block_tables.flip(0),
        cu_seqlens=torch.tensor([0, *COUNTS[::-1]], device=device).cumsum(0).int(),
        kv_lengths=case.kv_lengths.flip(0),
    )
    assert torch.equal(backwards.attend(tiles=many, **options), torch.cat(together[::-1]))


@pytest.mark.usefixtures("rows_alike")
def test_without_it_company_changes_bits(device: torch.device) -> None:
    """The inverse of the test above: it can fail."""
    case = make_case(INVARIANT, torch.float32, device)
    together = case.attend(tiles=SMALL).split(COUNTS)
    alone = [case.sequence(number).attend(tiles=SMALL) for number in range(len(INVARIANT))]
    assert not all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def list_ranges(work: Work, case: PagedCase) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """The work as (sequence, first row) → [(first key, end, partial result)]."""
    table = work.items[:, : int(work.firsts[0, -1])].T.tolist()
    ranges: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for sequence, start, queries, row, low, high, length, partial in table:
        bounds = [*case.cu_seqlens.tolist(), case.q.shape[0]]
        assert (start, queries) == (bounds[sequence], bounds[sequence + 1] - bounds[sequence])
        assert length == ([*case.kv_lengths.tolist(), 0])[sequence]
        ranges.setdefault((sequence, row), []).append((low, high, partial))
    return ranges


def check_work(case: PagedCase, tiles: Tiles, window: int | None, invariant: bool) -> None:
    """Check that each row attends to each key it sees exactly once, and that each partial result is merged once."""
    plan = case.plan(window=window, tiles=tiles, batch_invariant=invariant)
    assert isinstance(plan, ListedPlan)
    work = plan.work_for(case.q, case.k_pages)
    ranges = list_ranges(work, case)
    merges = {tuple(merge[:3]): merge[3:] for merge in work.merges[:, : int(work.firsts[2, -1])].T.tolist()}
    partials = []
    bounds = [*case.cu_seqlens.tolist(), case.q.shape[0]]
    for number, length in enumerate([*case.kv_lengths.tolist(), 0]):
        queries = bounds[number + 1] - bounds[number]
        for row in range(0, queries * 3, 16):
            first, last = row // 3, min((row + 15) // 3, queries - 1)
            high = max(0, length - queries + last + 1)
            low = 0 if window is None else min(high, max(0, length - queries + first - window + 1))
            parts = ranges.pop((number, row))
            seen = [key for part_low, part_high, _ in parts for key in range(part_low, part_high)]
            assert sorted(seen) == list(range(low, high))
            if len(parts) > 1:
                first_partial, distance, splits = merges.pop((bounds[number], queries, row))
                assert sorted(part[2] for part in parts) == [first_partial + i * distance for i in range(splits)]
                partials += [part[2] for part in parts]
            else:
                assert parts[0][2] == -1
    assert not ranges and not merges
    assert len(set(partials)) == len(partials) and all(0 <= partial < work.num_partials for partial in partials)


@pytest.mark.parametrize("seed", range(40))
def test_the_work_covers_every_key_once(device: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    most = draw.choice((60, 300, 3000))
    sequences = [(draw.randint(0, 50), draw.randint(0, most)) for _ in range(draw.randint(1, 5))] + [(1, 20)]
    case = make_case(sequences, torch.float32, device, heads=(6, 2), head_dim=1)
    case = replace(case, q=torch.cat((case.q, case.q[:1])))  # a token of no sequence
    tiles = SMALL._replace(chunk=draw.choice((16, 32, 48)), residents=draw.choice((1, 4, 50)))
    check_work(case, tiles, draw.choice((None, 7, 30, 43, 100, 500)), draw.random() < 0.4)


@pytest.mark.parametrize("length", range(70, 86, 3))
def test_a_window_across_the_most_chunks(device: torch.device, length: int) -> None:
    """Tiles of 6 queries see 38 keys from anywhere between two multiples of 16, in splits of 16."""
    case = make_case([(40, length)], torch.float32, device, heads=(6, 2), head_dim=1)
    for invariant in (False, True):
        check_work(case, SMALL._replace(residents=100), 33, invariant)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case = make_case([(1, 5)], torch.float32, device)
    scales = torch.ones(case.k_pages.shape[:3], device=device)
    wrong = {
        "for torch.bfloat16 they hold": replace(case, q=case.q.bfloat16()),
        "take no scales": replace(case, k_scales=scales, v_scales=scales),
        "need k_scales": replace(case, k_pages=case.k_pages.to(torch.int8), v_pages=case.v_pages.to(torch.int8)),
        "must be alike": replace(case, k_pages=case.k_pages.to(torch.int8)),
        "does not fit pages": replace(case, q=case.q[:, :3]),
        "contiguous in its last": replace(case, q=case.q.transpose(1, 2)),
        "tree_mask has": replace(case, tree_mask=torch.ones(2, 2, dtype=torch.bool, device=device)),
    }
    for message, bad in wrong.items():
        with pytest.raises(ValueError, match=message):
            paged_attention(*bad.operands, **bad.options)
    with pytest.raises(ValueError, match="must be positive"):
        case.attend(scale=-1.0)
    with pytest.raises(ValueError, match="at most 256"):
        wide = make_case([(1, 5)], torch.float32, device, head_dim=264)
        paged_attention(*wide.operands)
    assert isinstance(plan_paged_attention(*case.operands[3:], 16), ListedPlan)
