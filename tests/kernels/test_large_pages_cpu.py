"""Weights in large pages: the same numbers, side by side, in memory that goes with the last of them."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.common import large_pages_cpu
from kernels.common.large_pages_cpu import in_large_pages

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int8]


@pytest.fixture(autouse=True)
def nothing_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages_cpu, "_areas", [])
    monkeypatch.setattr(large_pages_cpu, "_AREA", 1 << 20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_the_same_contiguous_and_where_vectors_are_read_fast(dtype: torch.dtype) -> None:
    for shape in ((300, 301), (17, 5000), (3, 100, 400)):
        tensor = torch.randint(-100, 100, shape).to(dtype).transpose(0, 1)
        kept = in_large_pages(tensor)
        assert torch.equal(kept, tensor) and kept.is_contiguous() and kept.dtype == dtype
        assert kept.data_ptr() % 64 == 0 and kept.untyped_storage().nbytes() == kept.nbytes


def test_none_is_written_over_by_a_later_one() -> None:
    tensors = [torch.full((200, 1000 + number), number) for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        kept = list(pool.map(in_large_pages, tensors))
    assert all(map(torch.equal, kept, tensors))


def test_small_matrices_share_a_large_page() -> None:
    first, second = (in_large_pages(torch.ones(100, 1000)) for _ in range(2))
    assert first.data_ptr() % large_pages_cpu._PAGE == 0
    assert second.data_ptr() - first.data_ptr() == -(-first.nbytes // 64) * 64


def test_what_is_small_or_larger_than_an_area_is_kept_too() -> None:
    small, large = torch.ones(10, 10), torch.arange(1 << 19)
    assert in_large_pages(small) is small
    assert torch.equal(in_large_pages(large), large)


def test_memory_that_no_tensor_is_in_is_filled_again() -> None:
    """A product with a weight that is trained through rounding turns it anew each time."""
    addresses = {in_large_pages(torch.ones(100, 1000)).data_ptr() for _ in range(20)}
    assert len(addresses) == 1 and len(large_pages_cpu._areas) == 1
    first_row = in_large_pages(torch.ones(100, 1000))[0]
    for _ in range(20):
        in_large_pages(torch.zeros(100, 1000))
    assert first_row.eq(1).all()


def test_memory_is_freed_with_the_last_tensor_in_it() -> None:
    first, second = in_large_pages(torch.ones(100, 1000)), in_large_pages(torch.ones(100, 1000))
    gone = weakref.ref(large_pages_cpu._areas[0]._memory)
    in_large_pages(torch.ones(1 << 20))  # begins another area
    del first
    gc.collect()
    assert gone() is not None and second.sum() == 100_000
    del second
    gc.collect()
    assert gone() is None
