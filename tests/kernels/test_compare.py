"""The comparator must reject what it is there to reject."""

import pytest
import torch

from tests.compare import BOUNDS, check_close

DTYPES = pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)


@DTYPES
def test_rounding_passes(dtype: torch.dtype) -> None:
    expected = torch.randn(100, 30, dtype=torch.float64)
    check_close(expected.to(dtype), expected)


@DTYPES
def test_one_percent_fails(dtype: torch.dtype) -> None:
    expected = torch.randn(100, 30, dtype=torch.float64)
    with pytest.raises(AssertionError, match="off by"):
        check_close((1.01 * expected).to(dtype), expected)


@DTYPES
def test_one_wrong_row_of_a_hundred_fails(dtype: torch.dtype) -> None:
    expected = torch.randn(100, 30, dtype=torch.float64)
    actual = expected.to(dtype, copy=True)
    actual[-1] = 0
    with pytest.raises(AssertionError, match="off by"):
        check_close(actual, expected)


def test_nan_and_foreign_shapes_fail() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        check_close(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0]))
    with pytest.raises(AssertionError, match="shape"):
        check_close(torch.ones(3, 1), torch.ones(3))


def test_uninitialised_memory_is_poisoned() -> None:
    assert torch.empty(1000).isnan().all()
    assert torch.ones(10).new_empty(1000).isnan().all()
