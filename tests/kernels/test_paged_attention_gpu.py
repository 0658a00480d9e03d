"""Paged attention natively: many shapes, tables beyond 2³¹ elements, CUDA graphs, a compiled caller."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.attention._kv_quantization import LIMITS
from kernels.attention._paged_plan import ListedPlan
from kernels.attention.paged import paged_attention, paged_attention_reference, plan_paged_attention
from kernels.attention.write_pages import write_pages, write_pages_reference
from tests.compare import check_close, relative_rms
from tests.paged import PagedCase, grow_trees, hide_slots, make_case

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
DECODE = [(1, length) for length in (1, 15, 16, 17, 127, 128, 129, 1000, 2049, 0)]
VERIFY = [(5, length) for length in (5, 64, 300, 1500)] + [(3, 3)]
PROMPTS = [(130, 130), (64, 300), (1, 700), (17, 17), (0, 9), (40, 7), (257, 900)]
LONG = [(1, 9000)]
BATCHES = {"decode": DECODE, "verify": VERIFY, "prompts": PROMPTS, "long": LONG}


def random_batches(seed: int) -> list[list[tuple[int, int]]]:
    """Eighteen batches of decode, verification, (chunks of) prompts and mixtures of them."""
    draw = random.Random(seed)

    def lengths(count: int, most: int) -> list[int]:
        return [draw.choice((draw.randint(0, most), 16 * draw.randint(1, most // 16))) for _ in range(count)]

    decode = [[(1, length) for length in lengths(count, most)] for count, most in ((1, 5000), (3, 900), (20, 300))]
    verify = [[(n, n + length) for length in lengths(count, 2000)] for n, count in ((2, 1), (4, 5), (8, 9), (3, 2))]
    prompts = [[(draw.randint(1, 1 + length), length) for length in lengths(count, 600)] for count in (1, 2, 4, 8)]
    mixed = [[(1, length) for length in lengths(4, 400)] + [(draw.randint(0, 300), 400)] for _ in range(3)]
    return [*decode, *verify, *prompts, *mixed, *BATCHES.values()]


# Head dim, query and key/value heads, dtype, window, batch invariance.
CONFIGS = [
    *product([128], [(8, 2)], [torch.bfloat16, torch.float16], [None, 100], [False, True]),
    *product([128], [(7, 1), (4, 4)], [torch.bfloat16], [None, 100], [False]),
    *product([64], [(8, 2)], [torch.bfloat16], [None, 100], [False, True]),
    *product([80, 96, 256], [(8, 2)], [torch.bfloat16], [None], [False, True]),
    *product([80, 96, 256], [(8, 2)], [torch.bfloat16], [100], [False]),
]


@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=lambda number: "-".join(map(str, CONFIGS[number])))
def test_shapes(number: int) -> None:
    """18 batches in each of 25 configurations: 450 shapes."""
    head_dim, heads, dtype, window, invariant = CONFIGS[number]
    checked = 0
    for sequences in random_batches(number):
        case = make_case(sequences, dtype, GPU, heads=heads, head_dim=head_dim)
        result = case.attend(window=window, batch_invariant=invariant)
        check_close(result, case.expected(window=window), what=str(sequences))
        checked += 1
    assert checked == 18 and len(CONFIGS) == 25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", LIMITS, ids=str)
@pytest.mark.parametrize(("head_dim", "window"), [(128, None), (64, 100)])
def test_shapes_in_8_bits(dtype: torch.dtype, stored: torch.dtype, head_dim: int, window: int | None) -> None:
    """18 batches in each of 8 configurations: 144 shapes."""
    for sequences in random_batches(head_dim):
        case = make_case(sequences, dtype, GPU, heads=(8, 2), head_dim=head_dim, stored=stored)
        check_close(case.attend(window=window), case.expected(window=window), dtype=torch.bfloat16, what=str(sequences))


@pytest.mark.parametrize("invariant", [False, True])
def test_in_fp32(invariant: bool) -> None:
    for sequences in random_batches(1):
        case = make_case(sequences, torch.float32, GPU, heads=(8, 2), head_dim=64)
        check_close(case.attend(batch_invariant=invariant), case.expected(), what=str(sequences))


@pytest.mark.parametrize("page", [1, 8, 32, 128, 256])
def test_page_sizes(page: int) -> None:
    for name, sequences in BATCHES.items():
        case = make_case(sequences, torch.bfloat16, GPU, page=page, heads=(8, 2), head_dim=128)
        check_close(case.attend(), case.expected(), what=name)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [None, 100])
def test_trees_and_hidden_slots(name: str, window: int | None) -> None:
    case = make_case(BATCHES[name], torch.bfloat16, GPU, heads=(8, 2), head_dim=128)
    for changed in (grow_trees(case), hide_slots(case), grow_trees(hide_slots(case))):
        check_close(changed.attend(window=window), changed.expected(window=window))


def test_nothing_waits_for_the_device() -> None:
    case = make_case(PROMPTS, torch.bfloat16, GPU, heads=(8, 2), head_dim=128)
    slots = torch.tensor([3, -1, 7], device=GPU)
    keys = case.k_pages[0, :3].clone()
    case.attend()
    write_pages(keys, keys, case.k_pages, case.v_pages, slots)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.attend(window=50)
        write_pages(keys, keys, case.k_pages, case.v_pages, slots)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("name", BATCHES)
def test_physical_pages_do_not_matter(name: str) -> None:
    sequences = BATCHES[name]
    num_pages = sum(-(-length // 16) for _, length in sequences) + 3
    results = [
        make_case(sequences, torch.bfloat16, GPU, heads=(8, 2), head_dim=128, order=order).attend()
        for order in (torch.arange(num_pages), torch.arange(num_pages).flip(0), torch.randperm(num_pages))
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_long_sequence_is_split_over_the_chip() -> None:
    case = make_case(LONG, torch.bfloat16, GPU, heads=(8, 2), head_dim=128)
    plan = case.plan()
    assert isinstance(plan, ListedPlan)
    items = int(plan.work_for(case.q, case.k_pages).firsts[0, -1]) * 2
    assert items >= min(torch.cuda.get_device_properties(GPU).multi_processor_count, 9000 // 128 * 2)


def test_batch_invariance() -> None:
    """Alone, in company, in other company, row by row and chunk by chunk: the same bits. By default they differ."""
    sequences = [(1, 3000), (5, 2000), (300, 1200), (1, 70), (4, 9000)]
    counts = [queries for queries, _ in sequences]
    for heads, head_dim, window in (((8, 2), 128, None), ((8, 1), 64, None), ((4, 4), 80, 700)):
        case = make_case(sequences, torch.bfloat16, GPU, heads=heads, head_dim=head_dim)
        together = case.attend(batch_invariant=True, window=window).split(counts)
        differ = False
        by_default = case.attend(window=window).split(counts)
        for number, result in enumerate(together):
            alone = case.sequence(number)
            assert torch.equal(alone.attend(batch_invariant=True, window=window), result)
            differ |= not torch.equal(alone.attend(window=window), by_default[number])
        assert differ
        for number, step in ((1, 1), (2, 100), (2, 37), (4, 1)):
            parts = [
                case.sequence(number, i, min(i + step, counts[number])).attend(batch_invariant=True, window=window)
                for i in range(0, counts[number], step)
            ]
            assert torch.equal(torch.cat(parts), together[number])
        crowd = make_case(sequences * 40, torch.bfloat16, GPU, heads=heads, head_dim=head_dim)
        among_many = crowd.attend(batch_invariant=True, window=window).split(counts * 40)
        for number in range(5):
            assert torch.equal(crowd.sequence(number).attend(batch_invariant=True, window=window), among_many[number])


def far_case(dtype: torch.dtype) -> PagedCase:
    """Pages of which the first and the last lie more than 2³¹ elements apart."""
    num_pages, page, num_kv_heads, head_dim = 2**31 // (16 * 2 * 128) + 100, 16, 2, 128
    near = make_case([(1, 100), (5, 70), (40, 90)], torch.bfloat16, GPU, heads=(8, 2), head_dim=128, stored=dtype)
    used = near.k_pages.shape[0]
    far = {}
    for name in ("k_pages", "v_pages"):
        pages = torch.empty(num_pages, page, num_kv_heads, head_dim, dtype=dtype, device=GPU)
        pages[-used:] = getattr(near, name)
        far[name] = pages
    for name in ("k_scales", "v_scales"):
        if getattr(near, name) is not None:
            far[name] = torch.ones(num_pages, page, num_kv_heads, device=GPU)
            far[name][-used:] = getattr(near, name)
    tables = torch.where(near.block_tables < used, near.block_tables + num_pages - used, near.block_tables)
    return replace(near, block_tables=tables, **far)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_slots_beyond_2_to_the_31_elements(dtype: torch.dtype) -> None:
    case = far_case(dtype)
    check_close(case.attend(), case.expected(), dtype=torch.bfloat16)
    check_close(case.attend(batch_invariant=True), case.expected(), dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 128, device=GPU, dtype=torch.bfloat16)
    last = case.k_pages.shape[0] * 16 - 1
    slots = torch.tensor([last, 5], device=GPU)
    write_pages(k, v, case.k_pages, case.v_pages, slots, k_scales=case.k_scales, v_scales=case.v_scales)
    small = [torch.zeros(1, 16, 2, 128, dtype=dtype, device=GPU) for _ in range(2)]
    scales = [None if case.k_scales is None else torch.zeros(1, 16, 2, device=GPU) for _ in range(2)]
    write_pages_reference(k, v, *small, torch.tensor([15, 5], device=GPU), k_scales=scales[0], v_scales=scales[1])
    assert torch.equal(case.k_pages[-1, 15], small[0][0, 15]) and torch.equal(case.v_pages[0, 5], small[1][0, 5])


class Graph:
    """A captured step of plan and attention, whose buffers are filled anew before each replay."""

    def __init__(self, room: PagedCase, invariant: bool) -> None:
        self.buffers, self.invariant = room, invariant
        self.run()  # compiles outside of the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.run()

    def run(self) -> Tensor:
        case = self.buffers
        plan = case.plan(batch_invariant=self.invariant)
        return paged_attention(*case.operands, plan=plan, **case.options)

    def replay(self, case: PagedCase) -> Tensor:
        """Attend for a case with no more sequences, tokens or pages than there is room for."""
        buffers, tokens, sequences = self.buffers, case.q.shape[0], case.kv_lengths.shape[0]
        buffers.q.fill_(torch.nan)[:tokens] = case.q
        buffers.k_pages[: len(case.k_pages)] = case.k_pages
        buffers.v_pages[: len(case.v_pages)] = case.v_pages
        buffers.block_tables.fill_(10**6)[:sequences, : case.block_tables.shape[1]] = case.block_tables
        buffers.cu_seqlens.fill_(tokens)[: sequences + 1] = case.cu_seqlens
        buffers.kv_lengths.zero_()[:sequences] = case.kv_lengths
        self.graph.replay()
        assert not self.out[tokens:].any()
        return self.out[:tokens]


@pytest.mark.parametrize("invariant", [False, True])
def test_one_cuda_graph_serves_all_lengths(invariant: bool) -> None:
    options = {"heads": (8, 2), "head_dim": 128}
    room = make_case([(8, 9000)] + [(8, 10)] * 15, torch.bfloat16, GPU, **options)  # type: ignore[arg-type]
    graph = Graph(room, invariant)
    batches = [LONG, DECODE, VERIFY, [(1, 5)], [(8, 900)] * 8, [(120, 1000), (1, 8000)], [(1, 64)] * 16, LONG]
    for sequences in batches:
        case = make_case(sequences, torch.bfloat16, GPU, **options)  # type: ignore[arg-type]
        check_close(graph.replay(case).clone(), case.expected(), what=str(sequences))


def test_a_compiled_caller() -> None:
    case = make_case(VERIFY, torch.bfloat16, GPU, heads=(8, 2), head_dim=128)

    def layer(q: Tensor) -> Tensor:
        plan = plan_paged_attention(*case.operands[3:], 16)
        return paged_attention(q * 2, *case.operands[1:], plan=plan).float().sin()

    with torch.no_grad():
        expected = layer(case.q)
        assert relative_rms(torch.compile(layer)(case.q), expected) < 1e-2


@pytest.mark.parametrize("stored", LIMITS, ids=str)
def test_writing_equals_the_reference_to_the_bit(stored: torch.dtype) -> None:
    for num_heads, head_dim in product((1, 3, 8), (64, 80, 128)):
        k, v = torch.randn(2, 500, num_heads, head_dim, device=GPU, dtype=torch.bfloat16)
        k[3], v[5, 0] = 0, 1e-6
        slots = torch.randperm(600, device=GPU)[:500]
        slots[::7] = -1
        ours, theirs = (list(empty_pool(stored, num_heads, head_dim)) for _ in range(2))
        for write, (k_pages, v_pages, k_scales, v_scales) in ((write_pages, ours), (write_pages_reference, theirs)):
            write(k, v, k_pages, v_pages, slots, k_scales=k_scales, v_scales=v_scales)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def empty_pool(stored: torch.dtype, num_heads: int, head_dim: int) -> Iterator[Tensor]:
    for _ in range(2):
        yield torch.zeros(60, 10, num_heads, head_dim, device=GPU).to(stored)
    for _ in range(2):
        yield torch.zeros(60, 10, num_heads, device=GPU)


def test_the_reference_on_the_gpu_is_the_reference() -> None:
    case = make_case(VERIFY, torch.float32, GPU)
    on_cpu = PagedCase(**{name: None if x is None else x.cpu() for name, x in vars(case).items()})
    operands = (on_cpu.q.double(), *on_cpu.operands[1:])
    check_close(case.expected().cpu(), paged_attention_reference(*operands))
