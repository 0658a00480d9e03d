"""Selecting, gathering and adding back of routed tokens: exact indices, exact other rows, gradients."""

import pytest
import torch
from torch import Tensor

from kernels.token_routing import gather_rows, scatter_add_rows, select_tokens, select_tokens_reference, selected_rows
from tests.compare import check_all_close, check_close, check_slopes


def mask_of(pattern: str, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    if pattern == "some":
        return torch.rand(tokens, generator=generator) < 0.3
    return torch.full((tokens,), pattern == "all")


@pytest.mark.parametrize("pattern", ["some", "all", "none"])
@pytest.mark.parametrize(
    ("tokens", "capacity"), [(1, 1), (2100, 9), (2100, 2100), (33, 50), (2048, 1100), (0, 3), (5, 0)]
)
def test_selected_tokens(device: torch.device, pattern: str, tokens: int, capacity: int) -> None:
    mask = mask_of(pattern, tokens)
    expected, expected_count = select_tokens_reference(mask.tolist(), capacity)
    index, count = select_tokens(mask.to(device), capacity)
    assert (index.tolist(), int(count)) == (expected, expected_count)
    assert index.dtype == torch.int64 and count.dtype == torch.int32 and count.dim() == 0


def test_selected_tokens_without_triton() -> None:
    for pattern in ("some", "all", "none"):
        mask = mask_of(pattern, 50)
        for capacity in (0, 1, 20, 60):
            index, count = select_tokens(mask, capacity)
            assert (index.tolist(), int(count)) == select_tokens_reference(mask.tolist(), capacity)


@pytest.mark.parametrize("pattern", ["some", "all", "none"])
@pytest.mark.parametrize("tokens", [70, 1000])
def test_rows_for_the_selected_tokens(device: torch.device, pattern: str, tokens: int) -> None:
    """With Triton a row for everybody; for those who may wait, where tokens are many, for the selected alone."""
    mask = mask_of(pattern, tokens)
    rows = mask.nonzero()[:, 0].tolist()
    for may_wait in (False, True):
        index, count = selected_rows(mask.to(device), may_wait=may_wait)
        waits = may_wait and tokens == 1000
        assert index.tolist() == rows + [tokens] * (0 if waits else tokens - len(rows))
        assert count is None if waits else count is not None and int(count) == len(rows)


def test_rows_without_triton() -> None:
    for pattern in ("some", "all", "none"):
        mask = mask_of(pattern, 50)
        index, count = selected_rows(mask)
        assert index.tolist() == mask.nonzero()[:, 0].tolist() and count is None


def routed(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [11, size], index [7] with two unused rows, delta, gate, an incoming gradient."""
    index = torch.tensor([0, 3, 4, 8, 10, 11, -1])
    x, delta, grad = (torch.randn(n, size).to(dtype) for n in (11, 7, 11))
    return x, index, delta, torch.rand(7), grad


def plainly_added(x: Tensor, index: Tensor, delta: Tensor, gate: Tensor | None) -> Tensor:
    rows = list(x)
    for row, token in enumerate(index.tolist()):
        if 0 <= token < len(x):
            rows[token] = rows[token] + (delta[row] if gate is None else gate[row] * delta[row])
    return torch.stack(rows)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("size", [1, 24, 4200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(device: torch.device, dtype: torch.dtype, size: int, has_gate: bool) -> None:
    x, index, delta, gate, grad = (t.to(device) for t in routed(size, dtype))
    leaves = [t.detach().requires_grad_() for t in ((x, delta, gate) if has_gate else (x, delta))]
    oracle = [t.detach().double().requires_grad_() for t in leaves]
    actual = scatter_add_rows(leaves[0], index, *leaves[1:])
    expected = plainly_added(oracle[0], index, oracle[1], oracle[2] if has_gate else None)
    check_close(actual, expected)
    unselected = [1, 2, 5, 6, 7, 9]
    assert torch.equal(actual[unselected], x[unselected])
    grads = torch.autograd.grad(actual, leaves, grad)
    check_all_close(grads, torch.autograd.grad(expected, oracle, grad.double()), dtype=dtype)

    leaf = x.clone().requires_grad_()
    gathered = gather_rows(leaf, index)
    assert torch.equal(gathered[:5], x[index[:5]]) and not gathered[5:].any()
    (grad_x,) = torch.autograd.grad(gathered, leaf, delta)
    assert torch.equal(grad_x[index[:5]], delta[:5]) and not grad_x[unselected].any()

    with torch.no_grad():
        assert torch.equal(scatter_add_rows(x, index, *leaves[1:]), actual)
        assert scatter_add_rows(x, index, *leaves[1:], in_place=True) is x
        assert torch.equal(x, actual)


def test_slopes_without_triton() -> None:
    _, index, *_ = routed(5, torch.float32)
    leaves = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((11, 5), (7, 5), (7,)))
    weights = torch.randn(11, 5, dtype=torch.float64)

    def loss(x: Tensor, delta: Tensor, gate: Tensor) -> Tensor:
        kept = gather_rows(x, index)
        return (scatter_add_rows(x, index, delta * kept, gate).sin() * weights).sum()

    check_slopes(loss, leaves)


def test_all_selected_and_a_gate_of_one_is_the_dense_layer(device: torch.device) -> None:
    x, delta = (torch.randn(20, 12, device=device) for _ in range(2))
    index, _ = select_tokens(torch.ones(20, dtype=torch.bool, device=device), 20)
    assert torch.equal(scatter_add_rows(x, index, delta, torch.ones(20, device=device)), x + delta)
    assert torch.equal(gather_rows(x, index), x)


@pytest.mark.parametrize("empty", ["tokens", "index"])
def test_nothing_to_do(device: torch.device, empty: str) -> None:
    tokens, count = (0, 3) if empty == "tokens" else (3, 0)
    x, index = torch.randn(tokens, 4, device=device), torch.full((count,), tokens, device=device)
    assert torch.equal(gather_rows(x, index), torch.zeros(count, 4, device=device))
    assert torch.equal(scatter_add_rows(x, index, torch.ones(count, 4, device=device)), x)


def test_bad_input_is_refused() -> None:
    x, index = torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="bool"):
        select_tokens(torch.zeros(3), 1)
    with pytest.raises(ValueError, match="int64"):
        gather_rows(x, index.int())
    with pytest.raises(ValueError, match="a row of delta"):
        scatter_add_rows(x, index, torch.zeros(3, 4))
