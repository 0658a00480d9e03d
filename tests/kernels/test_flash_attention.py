import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.flash_attention import flash_attention, flash_attention_reference
from tests.compare import check_all_close, check_close

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
