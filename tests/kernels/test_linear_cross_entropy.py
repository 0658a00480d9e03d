import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.losses.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.compare import check_all_close, check_close, check_slopes

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def inputs(tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(tokens, 24).to(dtype), (0.3 * torch.randn(vocabulary, 24)).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().double().clone().requires_grad_() for x in tensors)


@DTYPES
@pytest.mark.parametrize(("tokens", "vocabulary"), [(30, 101), (70, 9000)], ids=["a block", "blocks"])
def test_equals_the_reference(dtype: torch.dtype, tokens: int, vocabulary: int) -> None:
    hidden, weight, labels = inputs(tokens, vocabulary, dtype)
    oracle = wide(hidden, weight)
    loss, expected = linear_cross_entropy(hidden, weight, labels), linear_cross_entropy_reference(*oracle, labels)
    assert loss.shape == () and loss.dtype == torch.promote_types(dtype, torch.float32)
    check_close(loss, expected, dtype=dtype)
    # The gradient that arrives is not 1 when a sum is divided by a count.
    grads = torch.autograd.grad(loss / 7, (hidden, weight))
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    check_all_close(grads, torch.autograd.grad(expected / 7, oracle))


def test_gradients_are_slopes() -> None:
    hidden, weight, labels = inputs(30, 101, torch.float64)
    check_slopes(lambda h, w: linear_cross_entropy(h, w, labels), (hidden, weight))


def test_autocast_multiplies_in_bf16_and_sums_in_fp32() -> None:
    hidden, weight, labels = inputs(30, 101)
    oracle = wide(hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32
    expected = linear_cross_entropy_reference(*oracle, labels)
    check_close(loss, expected, dtype=torch.bfloat16)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    check_all_close(grads, torch.autograd.grad(expected, oracle), dtype=torch.bfloat16)


def test_ignored_rows_are_not_even_read() -> None:
    hidden, weight, labels = inputs(30, 50)
    poisoned = hidden.detach().clone()
    poisoned[labels == -100] = torch.nan
    poisoned.requires_grad_()
    grads = torch.autograd.grad(linear_cross_entropy(poisoned, weight, labels), (poisoned, weight))
    check_all_close(
        grads, torch.autograd.grad(linear_cross_entropy_reference(hidden, weight, labels), (hidden, weight))
    )
    assert (grads[0][labels == -100] == 0).all()


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_labels_cost_nothing(tokens: int) -> None:
    hidden, weight, _ = inputs(tokens, 50)
    loss = linear_cross_entropy(hidden, weight, torch.full((tokens,), -100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss == 0 and all(bool((grad == 0).all()) for grad in grads)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    hidden, weight, labels = inputs(10, 50)
    expected = torch.autograd.grad(linear_cross_entropy_reference(hidden, weight, labels), (hidden, weight))
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    for leaf, grad in zip((hidden, weight), expected, strict=True):
        if leaf.requires_grad:
            check_close(leaf.grad, grad)
        else:
            assert leaf.grad is None


def test_backward_works_once() -> None:
    hidden, weight, labels = inputs(10, 50)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call backward once"):
        loss.backward()


def test_impossible_tokens_are_harmless() -> None:
    """A logit that overflows to −inf has the probability 0 and leaves no NaN."""
    hidden, weight, labels = (x.detach() for x in inputs(10, 50))
    hidden[:, 0], weight[3], labels[labels == 3] = 100.0, 0.0, 4
    weight[3, 0] = torch.finfo(torch.float32).min
    hidden.requires_grad_(), weight.requires_grad_()
    assert ((hidden @ weight.t())[:, 3] == -torch.inf).all()
    loss = linear_cross_entropy(hidden, weight, labels)
    grads = torch.autograd.grad(loss, (hidden, weight))
    check_close(loss, linear_cross_entropy_reference(hidden, weight, labels))
    assert all(bool(grad.isfinite().all()) for grad in grads)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_all_logits_never_exist_and_chunks_add_up() -> None:
    """What a chunk is too small for gives what its rows give apart."""
    tokens, vocabulary = 100, 400_000
    hidden, weight = torch.randn(tokens, 2).requires_grad_(), torch.randn(vocabulary, 2).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    with LargestTensor() as largest:
        loss = linear_cross_entropy(hidden, weight, labels)
        loss.backward()
    assert max(hidden.numel(), weight.numel()) < largest.elements <= 0.5 * tokens * vocabulary
    apart = [linear_cross_entropy(hidden[rows], weight, labels[rows]) for rows in torch.arange(tokens).split(35)]
    check_close(loss, sum(apart))
    check_all_close((hidden.grad, weight.grad), torch.autograd.grad(sum(apart), (hidden, weight)))
