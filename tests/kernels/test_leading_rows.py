"""Products of as many rows as a number on the device says: their values, and that no others are computed."""

import pytest
import torch

from kernels.linear.leading_rows import linear_of_leading_rows, linear_of_leading_rows_reference
from tests.compare import check_close


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("count", [0, 1, 40, 200, 300])
@pytest.mark.parametrize(("rows", "n", "k"), [(300, 70, 50), (257, 128, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_leading_rows(
    device: torch.device, dtype: torch.dtype, rows: int, n: int, k: int, count: int, has_bias: bool
) -> None:
    x, weight, bias = torch.randn(rows, k + 3)[:, :k], torch.randn(n, k), torch.randn(n)
    x[count:] = torch.nan
    x, weight, bias = (t.to(device, dtype) for t in (x, weight, bias))
    actual = linear_of_leading_rows(x, weight, bias if has_bias else None, torch.tensor(count, dtype=torch.int32))
    assert actual.shape == (rows, n) and actual.dtype == dtype
    count = min(count, rows)
    wide = [t.double() for t in (x, weight, bias)]
    check_close(actual[:count], linear_of_leading_rows_reference(*wide[:2], wide[2] if has_bias else None, count))


def test_tiles_past_the_count_are_not_computed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.full((300, 64), -7.0, device=device)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: made)
    x, weight = (torch.randn(size, 32, device=device) for size in (300, 64))
    linear_of_leading_rows(x, weight, None, torch.tensor(33, dtype=torch.int32, device=device))
    assert (made[:33] != -7).any(1).all() and (made[33:] == -7).all()


def test_without_triton_all_rows_are_computed() -> None:
    x, weight, bias = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)
    actual = linear_of_leading_rows(x, weight, bias, torch.tensor(2, dtype=torch.int32))
    check_close(actual[:2], linear_of_leading_rows_reference(x.double(), weight.double(), bias.double(), 2))
