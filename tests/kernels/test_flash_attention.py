from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels.attention._flash_tiles as flash_tiles
from kernels.attention import flash
from kernels.attention._flash_tiles import Inputs, Settings, Tile, Tiles
from kernels.attention.flash import flash_attention, flash_attention_reference
from kernels.common.ragged_tiles import most_tiles, plan_tiles
from tests.compare import check_all_close, check_close
from tests.interpreted import interpreted

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
# Lengths of queries and keys of each document: empty, single, around a band of 128 queries, ragged.
LENGTHS = {
    "one document": ([37], None),
    "ragged": ([3, 0, 130, 1, 128], None),
    "more keys": ([5, 1, 0, 140], [9, 300, 4, 141]),
    "fewer keys": ([150, 2, 129], [20, 0, 128]),
    "only keys": ([0, 0], [5, 3]),
}
MASKS = {"causal": (True, None), "window 3": (True, 3), "window 129": (True, 129), "full": (False, None)}


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_inputs(
    queries: list[int], keys: list[int] | None, dtype: torch.dtype, heads: tuple[int, int] = (6, 2), d: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as slices of one tensor of heads where lengths allow it, as a fused projection leaves them."""
    total_q, total_k = sum(queries), sum(queries if keys is None else keys)
    query_heads, kv_heads = heads
    if keys is None:
        return torch.randn(total_q, query_heads + 2 * kv_heads, d).to(dtype).split([query_heads, kv_heads, kv_heads], 1)
    q, k, v = ((total_q, query_heads), (total_k, kv_heads), (total_k, kv_heads))
    return torch.randn(*q, d).to(dtype), torch.randn(*k, d).to(dtype), torch.randn(*v, d).to(dtype)


@DTYPES
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equals_the_reference(dtype: torch.dtype, lengths: tuple, mask: tuple[bool, int | None]) -> None:
    q, k, v = random_inputs(*lengths, dtype)
    leaves = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    wide = tuple(x.double().detach().clone().requires_grad_() for x in (q, k, v))
    seqlens = cumulative(lengths[0]), None if lengths[1] is None else cumulative(lengths[1])
    causal, window = mask
    result = flash_attention(*leaves, *seqlens, causal=causal, window=window, scale=0.2)
    expected = flash_attention_reference(*wide, *seqlens, causal=causal, window=window, scale=0.2)
    assert result.dtype == dtype
    check_close(result, expected)
    grad = torch.randn_like(q)
    grads = torch.autograd.grad(result, leaves, grad, allow_unused=True, materialize_grads=True)
    check_all_close(grads, torch.autograd.grad(expected, wide, grad.double()))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 10),
    group=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_lengths(lengths: list[tuple[int, int]], window: int | None, group: int, dtype: torch.dtype) -> None:
    queries, keys = ([pair[side] for pair in lengths] for side in (0, 1))
    q, k, v = random_inputs(queries, keys, dtype, heads=(2 * group, 2), d=5)
    seqlens = cumulative(queries), cumulative(keys)
    result = flash_attention(q, k, v, *seqlens, window=window)
    check_close(result, flash_attention_reference(q.double(), k.double(), v.double(), *seqlens, window=window))


@DTYPES
def test_queries_without_keys_give_zero_and_get_no_gradient(dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in random_inputs([6, 4], [2, 0], dtype))
    result = flash_attention(q, k, v, cumulative([6, 4]), cumulative([2, 0]))
    blind = torch.tensor([True] * 4 + [False] * 2 + [True] * 4)
    assert (result[blind] == 0).all() and (result[~blind] != 0).all()
    grads = torch.autograd.grad(result.sum(), (q, k, v))
    assert (grads[0][blind] == 0).all()
    assert all(bool(grad.isfinite().all()) for grad in grads)


@DTYPES
def test_documents_do_not_see_each_other(dtype: torch.dtype) -> None:
    lengths = [7, 150, 1, 30]
    q, k, v = random_inputs(lengths, None, dtype)
    packed = flash_attention(q, k, v, cumulative(lengths)).split(lengths)
    for document, (one_q, one_k, one_v) in zip(
        packed, zip(*(x.split(lengths) for x in (q, k, v)), strict=True), strict=True
    ):
        alone = flash_attention(one_q, one_k, one_v, cumulative([one_q.shape[0]]))
        assert torch.equal(document, alone)


@DTYPES
def test_one_key_gives_its_value(dtype: torch.dtype) -> None:
    q, k, v = random_inputs([5, 5], None, dtype)
    result = flash_attention(q, k, v, cumulative([5, 5]), window=1)
    assert torch.equal(result, v.repeat_interleave(3, dim=1))


@DTYPES
def test_a_window_as_long_as_the_document_changes_nothing(dtype: torch.dtype) -> None:
    q, k, v = random_inputs([140], None, dtype)
    check_close(
        flash_attention(q, k, v, cumulative([140]), window=140), flash_attention(q, k, v, cumulative([140])).double()
    )


def test_a_chunk_equals_the_same_rows_of_the_whole() -> None:
    q, k, v = random_inputs([50], None, torch.float32)
    whole = flash_attention(q, k, v, cumulative([50]))
    chunk = flash_attention(q[30:], k, v, cumulative([20]), cumulative([50]))
    check_close(chunk, whole[30:])


def test_autocast_attends_in_its_dtype() -> None:
    leaves = tuple(x.detach().clone().requires_grad_() for x in random_inputs([40], None, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        result = flash_attention(*leaves, cumulative([40]))
    assert result.dtype == torch.bfloat16
    grads = torch.autograd.grad(result.float().sum(), leaves)
    assert {grad.dtype for grad in grads} == {torch.float32}
    check_close(result, flash_attention_reference(*(x.double() for x in leaves), cumulative([40])))


def test_a_window_without_causal_is_an_error() -> None:
    q, k, v = random_inputs([4], None, torch.float32)
    with pytest.raises(ValueError, match="causal"):
        flash_attention(q, k, v, cumulative([4]), causal=False, window=2)


def test_rows_past_the_last_document_are_zero() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = random_inputs([30], None, dtype)
        result = flash_attention(q, k, v, cumulative([3, 17]))
        assert result.shape == q.shape and (result[20:] == 0).all()
        assert torch.equal(result[:20], flash_attention(q[:20], k[:20], v[:20], cumulative([3, 17])))


@pytest.mark.parametrize(("arguments", "words"), [({"window": 0}, "at least 1"), ({"scale": 0.0}, "positive")])
def test_bad_options_are_errors(arguments: dict, words: str) -> None:
    q, k, v = random_inputs([4], None, torch.float32)
    with pytest.raises(ValueError, match=words):
        flash_attention(q, k, v, cumulative([4]), **arguments)


# In Triton: the same tests run on a GPU, or on the CPU through the interpreter, with small tiles so that all kinds of
# borders are crossed by few rows.

TRITON_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
TRITON_LENGTHS = {
    "ragged": ([17, 0, 1, 33], None),
    "more keys": ([5, 1, 0, 18], [9, 20, 4, 33]),
    "fewer keys": ([20, 2, 17], [3, 0, 16]),
    "only keys": ([0, 0], [5, 3]),
}
TRITON_MASKS = {"causal": (True, None), "window 3": (True, 3), "window 20": (True, 20), "full": (False, None)}


def square_tiles(rows: int = 16, **options: bool) -> Tiles:
    tile = Tile(rows, rows, 4, 2, **options)
    return Tiles(tile, tile, tile)


@pytest.fixture
def use_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tiles], None]:
    """Make the Triton kernels use other tiles."""
    return lambda tiles: monkeypatch.setattr(flash_tiles, "choose_tiles", lambda *_: tiles)


@pytest.fixture
def small_tiles(use_tiles: Callable[[Tiles], None]) -> None:
    use_tiles(square_tiles())


def check_triton(
    device: torch.device,
    lengths: tuple[list[int], list[int] | None],
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (2, 1),
    d: int = 16,
    few_keys: bool = False,
    **options: object,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compare output and gradients with the reference in fp64; return them.

    Among few keys one may take nearly all weight; then what is left of dQ is a difference of large numbers, and its
    error is measured by the size of all gradients.
    """
    leaves = tuple(x.detach().to(device) for x in random_inputs(*lengths, dtype, heads, d))
    leaves = tuple(x.requires_grad_() for x in leaves)
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    seqlens = tuple(None if side is None else cumulative(side).to(device) for side in lengths)
    deterministic = options.pop("deterministic", True)
    result = flash_attention(*leaves, *seqlens, deterministic=deterministic, **options)
    expected = flash_attention_reference(*wide, *seqlens, **options)
    assert result.dtype == dtype and result.is_contiguous()
    check_close(result, expected)
    grad = torch.randn(result.shape, device=device).to(dtype)
    grads = torch.autograd.grad(result, leaves, grad)
    wide_grads = torch.autograd.grad(expected, wide, grad.double(), materialize_grads=True)
    if few_keys:
        check_close(*(torch.cat([part.flatten() for part in parts]) for parts in (grads, wide_grads)))
    else:
        check_all_close(grads, wide_grads)
    return result, grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", TRITON_LENGTHS.values(), ids=TRITON_LENGTHS)
@pytest.mark.parametrize("mask", TRITON_MASKS.values(), ids=TRITON_MASKS)
def test_triton_equals_the_reference(
    device: torch.device, small_tiles: None, dtype: torch.dtype, lengths: tuple, mask: tuple[bool, int | None]
) -> None:
    heads = (2, 1) if dtype == torch.float32 else (1, 1)
    check_triton(device, lengths, dtype, heads, causal=mask[0], window=mask[1], scale=0.2)


@pytest.mark.parametrize("mask", TRITON_MASKS.values(), ids=TRITON_MASKS)
def test_triton_in_fp16(device: torch.device, small_tiles: None, mask: tuple[bool, int | None]) -> None:
    check_triton(device, ([17, 0, 20], [20, 3, 17]), torch.float16, causal=mask[0], window=mask[1])


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 1), (4, 2)], ids=str)
def test_triton_groups_of_heads(device: torch.device, small_tiles: None, heads: tuple[int, int]) -> None:
    check_triton(device, ([18], None), heads=heads)


@pytest.mark.parametrize("d", [5, 16, 24, 32, 48, 64, 80, 96, 128, 160, 256])
def test_triton_head_dims(device: torch.device, small_tiles: None, d: int) -> None:
    check_triton(device, ([18, 3], None), torch.bfloat16, heads=(1, 1), d=d)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_triton_lengths_around_tiles(device: torch.device, small_tiles: None, length: int) -> None:
    check_triton(device, ([length, length], None), heads=(1, 1))
    check_triton(device, ([length], [33]), heads=(1, 1), window=length)


@pytest.mark.parametrize("window", [None, 5])
def test_triton_every_distance_of_the_diagonal_from_a_tile(
    device: torch.device, small_tiles: None, window: int | None
) -> None:
    check_triton(device, ([19] * 16, list(range(19, 35))), heads=(1, 1), window=window)


@pytest.mark.parametrize("section", [1, 2, 3])
def test_triton_sections_of_heads(
    device: torch.device, small_tiles: None, monkeypatch: pytest.MonkeyPatch, section: int
) -> None:
    monkeypatch.setattr(flash_tiles, "section_of", lambda *_: section)
    check_triton(device, ([18], None), heads=(3, 3))
    check_triton(device, ([5], None), heads=(6, 3))


SWEEP = {
    "wide": Tiles(Tile(16, 32, 4, 1), Tile(16, 64, 4, 2), Tile(16, 32, 4, 3)),
    "tall": Tiles(Tile(32, 16, 4, 1), Tile(64, 16, 4, 2), Tile(32, 16, 4, 3)),
    "mixed": Tiles(Tile(64, 32, 4, 2), Tile(16, 16, 4, 2), Tile(64, 64, 4, 2)),
    "persistent": square_tiles()._replace(programs_per_processor=1),
    "two programs a processor": square_tiles()._replace(programs_per_processor=2),
    "descriptors": square_tiles(descriptors=True),
}


@pytest.mark.covering
@pytest.mark.parametrize("tiles", SWEEP.values(), ids=SWEEP)
@pytest.mark.parametrize("mask", TRITON_MASKS.values(), ids=TRITON_MASKS)
def test_triton_tiles_agree(
    device: torch.device, use_tiles: Callable[[Tiles], None], tiles: Tiles, mask: tuple[bool, int | None]
) -> None:
    use_tiles(tiles)
    check_triton(device, ([37, 18], [40, 9]), heads=(1, 1), causal=mask[0], window=mask[1])


@pytest.mark.parametrize("d", [16, 24])
def test_triton_descriptors_read_no_neighbour(device: torch.device, use_tiles: Callable[[Tiles], None], d: int) -> None:
    use_tiles(square_tiles(descriptors=True))
    check_poisoned_neighbours(device, d)


@pytest.mark.parametrize("d", [12, 16])
@pytest.mark.parametrize("window", [None, 4])
def test_triton_reads_no_neighbour(device: torch.device, small_tiles: None, d: int, window: int | None) -> None:
    check_poisoned_neighbours(device, d, window=window)


def check_poisoned_neighbours(device: torch.device, d: int, **options: object) -> None:
    """A document among others that are all NaN gives the bits that it gives alone."""
    lengths = [5, 18, 7]
    q, k, v = (x.to(device) for x in random_inputs(lengths, None, torch.float32, (2, 1), d))
    alone = tuple(x[5:23].clone().requires_grad_() for x in (q, k, v))
    for x in (q, k, v):
        x[:5], x[23:] = torch.nan, torch.nan
    among = tuple(x.clone().requires_grad_() for x in (q, k, v))
    results = (
        flash_attention(*alone, cumulative([18]).to(device), **options),
        flash_attention(*among, cumulative(lengths).to(device), **options)[5:23],
    )
    grad = torch.randn(results[0].shape, device=device)
    grads = tuple(torch.autograd.grad(*pair, grad) for pair in zip(results, (alone, among), strict=True))
    assert results[0].isfinite().all() and torch.equal(*results)
    for one, other in zip(*grads, strict=True):
        assert one.isfinite().all() and torch.equal(one, other[5:23])


def test_triton_takes_slices_of_a_fused_projection(device: torch.device, small_tiles: None) -> None:
    fused = torch.randn(20, 6, 16, device=device, requires_grad=True)
    wide = fused.detach().double().requires_grad_()
    seqlens = cumulative([13, 7]).to(device)
    result = flash_attention(*fused.split([4, 1, 1], dim=1), seqlens)
    expected = flash_attention_reference(*wide.split([4, 1, 1], dim=1), seqlens)
    check_close(result, expected)
    # The gradient of a sum has strides of 0.
    check_close(*(torch.autograd.grad(x.sum(), y)[0] for x, y in ((result, fused), (expected, wide))))
    heads_first = (torch.randn(heads, 20, 16, device=device).transpose(0, 1) for heads in (4, 1, 1))
    q, k, v = heads_first
    check_close(
        flash_attention(q, k, v, seqlens), flash_attention_reference(q.double(), k.double(), v.double(), seqlens)
    )


def test_triton_adds_up_query_gradients_in_any_order(device: torch.device, small_tiles: None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_triton(device, ([20, 1, 17], [23, 9, 4]), dtype, heads=(4, 2), d=24, deterministic=False)
        check_triton(device, ([20, 17], [3, 30]), dtype, causal=False, deterministic=False)
        check_triton(device, ([40, 17], None), dtype, heads=(2, 1), window=18, deterministic=False)


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("torch_repeats", [True, False])
def test_triton_repeats_bits_where_the_call_or_torch_asks_for_it(
    device: torch.device, small_tiles: None, monkeypatch: pytest.MonkeyPatch, asked: bool | None, torch_repeats: bool
) -> None:
    """Where blocks add to dQ, it is a sum in fp32 that begins at zero."""
    computed = []

    def grad_keys(inputs: Inputs, settings: Settings, grad_q: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        computed.append(grad_q.dtype == torch.bfloat16)
        return of_keys(inputs, settings, grad_q, *others)

    of_keys = flash._grad_keys
    monkeypatch.setattr(flash, "_grad_keys", grad_keys)
    torch.use_deterministic_algorithms(torch_repeats, warn_only=True)
    inputs = tuple(x.detach().to(device).requires_grad_() for x in random_inputs([20], None, torch.bfloat16))
    flash_attention(*inputs, cumulative([20]).to(device), deterministic=asked).sum().backward()
    assert computed == [torch_repeats if asked is None else asked]


def test_triton_backward_repeats_its_bits(device: torch.device, small_tiles: None) -> None:
    inputs = random_inputs([20, 18], None, torch.bfloat16, heads=(2, 1))
    inputs = tuple(x.detach().to(device).requires_grad_() for x in inputs)
    seqlens = cumulative([20, 18]).to(device)
    results = [flash_attention(*inputs, seqlens, deterministic=True).sum() for _ in range(2)]
    first, second = (torch.autograd.grad(result, inputs) for result in results)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@TRITON_DTYPES
def test_triton_queries_without_keys(device: torch.device, small_tiles: None, dtype: torch.dtype) -> None:
    result, grads = check_triton(device, ([26, 4], [17, 0]), dtype)
    blind = torch.tensor([True] * 9 + [False] * 17 + [True] * 4, device=device)
    assert (result[blind] == 0).all() and (result[~blind] != 0).all()
    assert (grads[0][blind] == 0).all()


def test_triton_rows_past_the_last_document(device: torch.device, small_tiles: None) -> None:
    q, k, v = (x.detach().to(device) for x in random_inputs([40], None, torch.float32, heads=(2, 1)))
    for x in (q, k, v):
        x[20:] = torch.nan
        x.requires_grad_()
    seqlens = cumulative([3, 17]).to(device)
    result = flash_attention(q, k, v, seqlens)
    assert (result[20:] == 0).all()
    check_close(result[:20], flash_attention_reference(*(x[:20].double() for x in (q, k, v)), seqlens))
    for grad in torch.autograd.grad(result, (q, k, v), torch.randn_like(result)):
        assert grad.isfinite().all() and (grad[20:] == 0).all()


@pytest.mark.parametrize("lengths", [[0], [0, 0]], ids=str)
def test_triton_nothing_at_all(device: torch.device, small_tiles: None, lengths: list[int]) -> None:
    result, grads = check_triton(device, (lengths, None))
    assert result.shape == (0, 2, 16) and grads[1].shape == (0, 1, 16)
    check_triton(device, (lengths, [7] * len(lengths)))
    check_triton(device, ([7] * len(lengths), lengths))


def test_triton_scores_do_not_overflow(device: torch.device, small_tiles: None) -> None:
    q, k, v = (x.to(device) for x in random_inputs([40], None, torch.float32))
    seqlens = cumulative([40]).to(device)
    result = flash_attention(1000 * q, k, v, seqlens)
    expected = flash_attention_reference(1000 * q.double(), k.double(), v.double(), seqlens)
    # The scores are in the thousands, so their rounding is seen in the probabilities.
    check_close(result, expected, dtype=torch.float16)
    check_close(flash_attention(q, k, v, seqlens, window=1), v.repeat_interleave(3, dim=1).double())


@pytest.mark.parametrize("deterministic", [True, False])
def test_triton_rows_that_are_not_there_stay_harmless(
    device: torch.device, small_tiles: None, deterministic: bool
) -> None:
    """Scores around −300: a key past the end, with its score of 0, would have a weight beyond fp32."""
    q, k, v = (x.to(device) for x in random_inputs([20], None, torch.float32, heads=(1, 1)))
    leaves = tuple(x.requires_grad_() for x in (q + 10, k - 10, v))
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    seqlens = cumulative([20]).to(device)
    result = flash_attention(*leaves, seqlens, causal=False, deterministic=deterministic)
    expected = flash_attention_reference(*wide, seqlens, causal=False)
    check_close(result, expected, dtype=torch.float16)
    grad = torch.randn_like(result)
    grads = torch.autograd.grad(result, leaves, grad)
    check_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), dtype=torch.float16)


def test_triton_autocast_attends_in_its_dtype(device: torch.device, small_tiles: None) -> None:
    leaves = tuple(x.detach().to(device).requires_grad_() for x in random_inputs([20], None, torch.float32))
    seqlens = cumulative([20]).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        result = flash_attention(*leaves, seqlens)
    assert result.dtype == torch.bfloat16
    grads = torch.autograd.grad(result.float().sum(), leaves)
    assert {grad.dtype for grad in grads} == {torch.float32}
    check_close(result, flash_attention_reference(*(x.double() for x in leaves), seqlens))


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=2),
    window=st.none() | st.integers(1, 45),
    group=st.integers(1, 3),
    deterministic=st.booleans(),
)
def test_triton_any_lengths(
    lengths: list[tuple[int, int]], window: int | None, group: int, deterministic: bool
) -> None:
    torch.manual_seed(0)  # a case has the same numbers whenever it is tried
    if torch.cuda.is_available():
        check_any_case(torch.device("cuda"), lengths, group, window=window, deterministic=deterministic)
        return
    with interpreted():
        check_any_case(torch.device("cpu"), lengths, group, window=window, deterministic=deterministic)


def check_any_case(device: torch.device, lengths: list[tuple[int, int]], group: int, **options: object) -> None:
    sides = [pair[0] for pair in lengths], [pair[1] for pair in lengths]
    check_triton(device, sides, torch.float32, (group, 1), few_keys=True, **options)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5, 130])
def test_a_plan_lists_the_tiles_of_the_longest_documents_first(
    device: torch.device, count: int, last_first: bool
) -> None:
    rows, others = (torch.randint(0, 40, (count,)).tolist() for _ in range(2))
    bounds, other_bounds = cumulative(rows), cumulative(others)
    total = sum(rows) + 9
    tiles, number = plan_tiles(
        bounds.to(device), other_bounds.to(device), num_rows=total, rows_per_tile=16, last_first=last_first
    )
    # The rows past the last document are a document of 9 rows and nothing on the other side.
    rows, others = [*rows, 9], [*others, 0]
    expected = []
    for b in sorted(range(count + 1), key=lambda b: (-others[b], b)):
        firsts = range(0, rows[b], 16)
        for first in reversed(firsts) if last_first else firsts:
            expected.append([bounds[b], rows[b], other_bounds[b], others[b], first])
    assert tiles[: number.item()].tolist() == [[int(x) for x in tile] for tile in expected]
    assert number.item() <= len(tiles) == most_tiles(total, count, 16)


BAD_INPUTS = {
    "float64": lambda q, k, v: (q.double(), k.double(), v.double()),
    "contiguous": lambda q, k, v: (q.mT.contiguous().mT, k, v),
    "one dtype": lambda q, k, v: (q, k.half(), v),
    "fit together": lambda q, k, v: (q, k[:, :, :8], v),
    "do not fit": lambda q, k, v: (q[:, :5], k, v),
    "up to 256": lambda q, k, v: tuple(x.repeat(1, 1, 22) for x in (q, k, v)),
}


@pytest.mark.parametrize(("words", "change"), BAD_INPUTS.items(), ids=BAD_INPUTS)
def test_triton_refuses_what_it_cannot_compute(device: torch.device, words: str, change: Callable) -> None:
    inputs = change(*(x.to(device) for x in random_inputs([4], None, torch.float32)))
    with pytest.raises(ValueError, match=words):
        flash_attention(*inputs, cumulative([4]).to(device))


def test_triton_refuses_documents_without_partner(device: torch.device) -> None:
    q, k, v = (x.to(device) for x in random_inputs([4], None, torch.float32))
    with pytest.raises(ValueError, match="documents"):
        flash_attention(q, k, v, cumulative([4]).to(device), cumulative([2, 2]).to(device))
