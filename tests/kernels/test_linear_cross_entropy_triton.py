"""The Triton form of linear + cross-entropy, through the interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from kernels.losses.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.compare import check_all_close, check_close
from tests.kernels.losses import LOGITS, choose_logits, use_small_tiles, wide

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)


@pytest.fixture(params=LOGITS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_logits(monkeypatch, request.param)


def inputs(
    device: torch.device, tokens: int = 37, vocabulary: int = 101, size: int = 24, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(tokens, size), 0.3 * torch.randn(vocabulary, size)
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[::5] = -100
    return *(x.to(device, dtype).requires_grad_() for x in (hidden, weight)), labels.to(device)


@DTYPES
@pytest.mark.usefixtures("way")
def test_equals_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(device, dtype=dtype)
    oracle = wide(hidden, weight)
    loss, expected = linear_cross_entropy(hidden, weight, labels), linear_cross_entropy_reference(*oracle, labels)
    assert loss.shape == () and loss.dtype == torch.float32
    check_close(loss, expected, dtype=dtype)
    grads = torch.autograd.grad(loss / 7, (hidden, weight))
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    check_all_close(grads, torch.autograd.grad(expected / 7, oracle))


@pytest.mark.parametrize(("tokens", "vocabulary", "size"), [(1, 1, 1), (1, 40, 5), (16, 32, 16), (50, 17, 33)])
@pytest.mark.usefixtures("way")
def test_every_shape(device: torch.device, tokens: int, vocabulary: int, size: int) -> None:
    hidden, weight, labels = inputs(device, tokens, vocabulary, size)
    labels[0] = vocabulary - 1
    oracle = wide(hidden, weight)
    loss, expected = linear_cross_entropy(hidden, weight, labels), linear_cross_entropy_reference(*oracle, labels)
    with torch.no_grad():
        check_close(linear_cross_entropy(hidden, weight, labels), loss)
    if vocabulary > 1:  # else all is zero up to rounding
        check_close(loss, expected, dtype=torch.float32)
        grads = torch.autograd.grad(loss, (hidden, weight))
        check_all_close(grads, torch.autograd.grad(expected, oracle))


def test_without_gradients_no_logit_is_stored(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = inputs(device)
    monkeypatch.setattr(torch, "mm", None)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    check_close(loss, linear_cross_entropy_reference(*wide(hidden, weight), labels))


@pytest.mark.usefixtures("way")
def test_ignored_rows_are_worth_nothing(device: torch.device) -> None:
    hidden, weight, labels = inputs(device)
    poisoned = hidden.detach().clone()
    poisoned[labels == -100] = torch.nan
    poisoned.requires_grad_()
    grads = torch.autograd.grad(linear_cross_entropy(poisoned, weight, labels), (poisoned, weight))
    oracle = wide(hidden, weight)
    check_all_close(grads, torch.autograd.grad(linear_cross_entropy_reference(*oracle, labels), oracle))
    assert (grads[0][labels == -100] == 0).all()


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.usefixtures("way")
def test_no_labels_cost_nothing(device: torch.device, tokens: int) -> None:
    hidden, weight, labels = inputs(device, tokens)
    loss = linear_cross_entropy(hidden, weight, labels.fill_(-100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss == 0 and all(bool((grad == 0).all()) for grad in grads)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.usefixtures("way")
def test_frozen_inputs_get_no_gradient(device: torch.device, frozen: str) -> None:
    hidden, weight, labels = inputs(device)
    oracle = wide(hidden, weight)
    expected = torch.autograd.grad(linear_cross_entropy_reference(*oracle, labels), oracle)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    linear_cross_entropy(hidden, weight, labels).backward()
    for leaf, grad in zip((hidden, weight), expected, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.grad is not None:
            check_close(leaf.grad, grad)


def test_tied_weights_add_up(device: torch.device) -> None:
    _, weight, labels = inputs(device)
    tokens = torch.arange(len(labels), device=device)
    (oracle,) = wide(weight)
    linear_cross_entropy(weight[tokens], weight, labels).backward()
    linear_cross_entropy_reference(oracle[tokens], oracle, labels).backward()
    check_close(weight.grad, oracle.grad)


@pytest.mark.usefixtures("way")
def test_impossible_tokens_are_harmless(device: torch.device) -> None:
    """A logit that overflows to −inf has the probability 0 and leaves no NaN."""
    hidden, weight, labels = (x.detach() for x in inputs(device))
    hidden[:, 0], weight[3], labels[labels == 3] = 100.0, 0.0, 4
    weight[3, 0] = torch.finfo(torch.float32).min
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels)
    grads = torch.autograd.grad(loss, (hidden, weight))
    check_close(loss, linear_cross_entropy_reference(hidden, weight, labels))
    assert all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.usefixtures("way")
def test_nan_is_not_hidden(device: torch.device) -> None:
    hidden, weight, labels = inputs(device)
    with torch.no_grad():
        weight[5, 2] = torch.nan
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.isnan() and torch.autograd.grad(loss, hidden)[0].isnan().any()


def test_labels_outside_of_the_vocabulary_make_nan(device: torch.device) -> None:
    hidden, weight, labels = inputs(device)
    for label in (101, -1):
        labels[3] = label
        assert linear_cross_entropy(hidden, weight, labels).isnan()


def test_autocast_multiplies_in_bf16_and_sums_in_fp32(device: torch.device) -> None:
    hidden, weight, labels = inputs(device)
    oracle = wide(hidden, weight)
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32
    expected = linear_cross_entropy_reference(*oracle, labels)
    check_close(loss, expected, dtype=torch.bfloat16)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    check_all_close(grads, torch.autograd.grad(expected, oracle), dtype=torch.bfloat16)


def test_bad_inputs_are_errors(device: torch.device) -> None:
    hidden, weight, labels = inputs(device)
    with pytest.raises(ValueError, match="float64; Triton kernels take"):
        linear_cross_entropy(hidden.double(), weight, labels)
    with pytest.raises(ValueError, match="do not fit each other"):
        linear_cross_entropy(hidden, weight[:, :7], labels)
    with pytest.raises(ValueError, match="do not fit each other"):
        linear_cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        linear_cross_entropy(hidden, weight[:24].t(), labels)
