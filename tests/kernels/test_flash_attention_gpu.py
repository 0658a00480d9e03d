"""Flash attention as compiled for the GPU, with the tiles that it really uses.

The grid: 5 head dims × 4 groupings of heads × 8 sets of lengths × 4 masks × 2 dtypes = 1280 cases, each with output
and gradients; 32 of them in one test, which compiles its kernels once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.attention._flash_tiles as flash_tiles
from kernels.attention._flash_tiles import Tile, Tiles, choose_tiles
from kernels.attention.flash import flash_attention, flash_attention_reference
from tests.compare import check_all_close, check_close

pytestmark = pytest.mark.gpu

HEADS = [(4, 4), (8, 2), (6, 2), (3, 1)]
LENGTHS = [
    ([1], None),
    ([127, 128, 129, 1], None),
    ([300, 0, 64, 63, 65], None),
    ([700], None),
    ([5, 128, 1, 0], [300, 128, 513, 9]),
    ([200, 130, 256], [3, 129, 0]),
    (list(range(20)), list(range(20, 0, -1))),
    ([257, 1], [640, 1]),
]
MASKS = {"causal": (True, None), "window 50": (True, 50), "window 300": (True, 300), "full": (False, None)}


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def random_inputs(
    lengths: tuple[list[int], list[int] | None], dtype: torch.dtype, heads: tuple[int, int], d: int
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = sum(lengths[0]), sum(lengths[0] if lengths[1] is None else lengths[1])
    q = torch.randn(queries, heads[0], d, device="cuda").to(dtype)
    k, v = (torch.randn(keys, heads[1], d, device="cuda").to(dtype) for _ in range(2))
    return q, k, v


def check_case(
    lengths: tuple[list[int], list[int] | None], dtype: torch.dtype, heads: tuple[int, int], d: int, **options: Any
) -> None:
    """Compare output and gradients with the reference in fp64."""
    deterministic = options.pop("deterministic", True)
    leaves = tuple(x.requires_grad_() for x in random_inputs(lengths, dtype, heads, d))
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    seqlens = tuple(None if side is None else cumulative(side) for side in lengths)
    result = flash_attention(*leaves, *seqlens, deterministic=deterministic, **options)
    expected = flash_attention_reference(*wide, *seqlens, **options)
    check_close(result, expected, what=f"output of {lengths}, heads {heads}")
    grad = torch.randn_like(result)
    grads = torch.autograd.grad(result, leaves, grad)
    check_all_close(grads, torch.autograd.grad(expected, wide, grad.double(), materialize_grads=True))


@pytest.mark.covering(pairs=True)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_grid(dtype: torch.dtype, d: int, mask: tuple[bool, int | None]) -> None:
    for heads in HEADS:
        for lengths in LENGTHS:
            check_case(lengths, dtype, heads, d, causal=mask[0], window=mask[1])


@pytest.mark.parametrize("d", [8, 16, 24, 32, 48, 72, 112, 160, 192, 224])
def test_other_head_dims(d: int) -> None:
    for lengths in LENGTHS:
        check_case(lengths, torch.bfloat16, (4, 2), d)


@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_fp32(d: int) -> None:
    for lengths in LENGTHS:
        check_case(lengths, torch.float32, (4, 2), d)
        check_case(lengths, torch.float32, (2, 2), d, window=50)


@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_query_gradients_added_up_in_any_order(d: int, mask: tuple[bool, int | None]) -> None:
    for lengths in LENGTHS:
        check_case(lengths, torch.bfloat16, (8, 2), d, causal=mask[0], window=mask[1], deterministic=False)


FORMS: dict[str, Callable[[Tiles], Tiles]] = {
    "persistent": lambda tiles: tiles._replace(programs_per_processor=1),
    "two programs a processor": lambda tiles: tiles._replace(programs_per_processor=2),
    "descriptors": lambda tiles: Tiles(*(tile._replace(descriptors=True) for tile in tiles[:3])),
    "small tiles": lambda _: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 3)),
}


@pytest.mark.parametrize("change", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("d", [64, 80, 128])
def test_other_forms_of_the_kernels(monkeypatch: pytest.MonkeyPatch, d: int, change: Callable[[Tiles], Tiles]) -> None:
    if change is FORMS["descriptors"] and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs the tensor memory accelerator")
    tiles = change(choose_tiles(d, torch.bfloat16, torch.device("cuda")))
    monkeypatch.setattr(flash_tiles, "choose_tiles", lambda *_: tiles)
    for lengths in LENGTHS:
        check_case(lengths, torch.bfloat16, (8, 2), d)
        check_case(lengths, torch.bfloat16, (8, 2), d, window=50)


def test_long_documents() -> None:
    for options in ({}, {"window": 1000}, {"causal": False}):
        check_case(([4096, 3000], None), torch.bfloat16, (2, 1), 128, **options)


def test_more_documents_than_a_plan_program_ranks() -> None:
    lengths = torch.randint(0, 30, (500,)).tolist()
    check_case((lengths, None), torch.bfloat16, (2, 1), 64)


def test_a_document_among_nan_is_finite() -> None:
    lengths = [70, 200, 90]
    q, k, v = random_inputs((lengths, None), torch.bfloat16, (4, 2), 128)
    alone = tuple(x[70:270].clone().requires_grad_() for x in (q, k, v))
    for x in (q, k, v):
        x[:70] = torch.nan
        x[270:] = torch.nan
        x.requires_grad_()
    results = flash_attention(*alone, cumulative([200])), flash_attention(q, k, v, cumulative(lengths))[70:270]
    assert results[0].isfinite().all() and torch.equal(*results)
    grad = torch.randn_like(results[0])
    pairs = zip(
        torch.autograd.grad(results[0], alone, grad), torch.autograd.grad(results[1], (q, k, v), grad), strict=True
    )
    for one, other in pairs:
        assert one.isfinite().all() and torch.equal(one, other[70:270])


def test_backward_repeats_its_bits() -> None:
    lengths = [1000, 1, 300, 2000]
    inputs = tuple(x.requires_grad_() for x in random_inputs((lengths, None), torch.bfloat16, (16, 4), 128))
    grad = torch.randn_like(inputs[0])
    seqlens = cumulative(lengths)
    runs = [torch.autograd.grad(flash_attention(*inputs, seqlens, deterministic=True), inputs, grad) for _ in range(4)]
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


def test_nothing_waits_for_the_device() -> None:
    inputs = tuple(x.requires_grad_() for x in random_inputs(([100, 30], None), torch.bfloat16, (4, 2), 64))
    seqlens, grad = cumulative([100, 30]), torch.randn_like(inputs[0])
    torch.autograd.grad(flash_attention(*inputs, seqlens), inputs, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(flash_attention(*inputs, seqlens), inputs, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_serves_all_lengths() -> None:
    inputs = tuple(x.requires_grad_() for x in random_inputs(([400], None), torch.bfloat16, (8, 2), 128))
    seqlens, grad = cumulative([100, 100, 100, 100]), torch.randn_like(inputs[0])

    def step() -> tuple[Tensor, ...]:
        result = flash_attention(*inputs, seqlens)
        return result, *torch.autograd.grad(result, inputs, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([100, 100, 100, 100], [1, 0, 398, 1], [400, 0, 0, 0], [0, 0, 3, 200]):
        seqlens.copy_(cumulative(lengths))
        graph.replay()
        for one, other in zip(captured, step(), strict=True):
            assert one.isfinite().all() and torch.equal(one, other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_caller(dynamic: bool) -> None:
    weight = (torch.randn(256, 8 * 64, device="cuda") / 16).bfloat16().requires_grad_()

    def caller(x: Tensor, weight: Tensor, seqlens: Tensor) -> Tensor:
        q, k, v = (x @ weight).unflatten(1, (8, 64)).split([4, 2, 2], dim=1)
        return torch.nn.functional.silu(flash_attention(q, k, v, seqlens, window=100)).flatten(1)

    compiled = torch.compile(caller, dynamic=dynamic)
    for lengths in ([200, 56], [7, 300, 45]):
        x, seqlens = torch.randn(sum(lengths), 256, device="cuda").bfloat16(), cumulative(lengths)
        x.requires_grad_()
        results = [function(x, weight, seqlens) for function in (caller, compiled)]
        check_close(results[1], results[0])
        grad = torch.randn_like(results[0])
        grads = [torch.autograd.grad(result, (x, weight), grad) for result in results]
        check_all_close(grads[1], grads[0])


def needs_memory(gib: int) -> None:
    if torch.cuda.get_device_properties("cuda").total_memory < gib << 30:
        pytest.skip(f"needs {gib} GiB of GPU memory")


def test_rows_far_apart() -> None:
    """Strides of 2**26 elements: within one tile addresses differ by more than 2**31."""
    needs_memory(30)
    heads, d, rows, stride = (2, 2), 64, 60, 1 << 26
    memory = torch.empty(rows * stride, dtype=torch.bfloat16, device="cuda")
    far = tuple(memory.as_strided((rows, 2, d), (stride, d, 1), part * 2 * d) for part in range(3))
    near = random_inputs(([rows], None), torch.bfloat16, heads, d)
    for x, y in zip(far, near, strict=True):
        x.copy_(y)
    seqlens = cumulative([25, 35])
    results = [flash_attention(*(x.requires_grad_() for x in inputs), seqlens) for inputs in (far, near)]
    assert torch.equal(*results)
    grad = torch.randn_like(results[0])
    pair = [torch.autograd.grad(*run, grad) for run in zip(results, (far, near), strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(*pair, strict=True))


def test_more_than_2_to_the_31_elements() -> None:
    needs_memory(60)
    heads, d, length = (32, 8), 128, 513
    count = (1 << 31) // (heads[0] * d * length) + 2
    q, k, v = (
        torch.randn(count * length, n, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    )
    assert q.numel() > 1 << 31
    result = flash_attention(q, k, v, cumulative([length] * count))
    grad = torch.randn_like(result)
    grads = torch.autograd.grad(result, (q, k, v), grad)
    last = tuple(x[-length:].detach().clone().requires_grad_() for x in (q, k, v))
    alone = flash_attention(*last, cumulative([length]))
    assert torch.equal(result[-length:], alone)
    for one, other in zip(grads, torch.autograd.grad(alone, last, grad[-length:]), strict=True):
        assert torch.equal(one[-length:], other)
