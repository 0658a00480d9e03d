"""Log-probabilities without a sort, against a sort."""

import math

import pytest
import torch

from kernels.sampling.token_logprobs import Logprobs, token_logprobs, token_logprobs_reference
from tests.compare import check_close


def check(actual: Logprobs, expected: Logprobs) -> None:
    assert torch.equal(actual.ranks.cpu(), expected.ranks)
    assert torch.equal(actual.top_tokens.cpu(), expected.top_tokens)
    for one, other in ((actual.chosen, expected.chosen), (actual.top, expected.top)):
        assert torch.equal(one.cpu() == -math.inf, other == -math.inf)
        check_close(one.cpu().clamp_min(-1e4), other.clamp_min(-1e4))


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_a_sort(device: torch.device, dtype: torch.dtype, num_top: int) -> None:
    """In rows of several blocks."""
    logits = (3 * torch.randn(6, 4200)).to(dtype)
    logits[1] = logits[1].round()  # ties
    logits[2, 3:] = -math.inf
    logits[3] = 7.0
    tokens = torch.tensor([0, 4199, 1, 4097, 5, 9])
    check(
        token_logprobs(logits.to(device), tokens.to(device), num_top), token_logprobs_reference(logits, tokens, num_top)
    )


def test_equals_a_sort_without_triton() -> None:
    logits, tokens = torch.randn(6, 45), torch.arange(6)
    check(token_logprobs(logits, tokens, 4), token_logprobs_reference(logits, tokens, 4))


def test_all_tokens_of_a_small_vocabulary(device: torch.device) -> None:
    logits, tokens = torch.randn(2, 5), torch.tensor([4, 0])
    check(token_logprobs(logits.to(device), tokens.to(device), 5), token_logprobs_reference(logits, tokens, 5))


def test_more_tokens_than_a_block_has(device: torch.device) -> None:
    """A block of forbidden tokens, and the last one, of two, run out before the others."""
    logits = torch.randn(2, 4098).round(decimals=1)
    logits[0, :2048] = -math.inf
    tokens = torch.tensor([4097, 3])
    check(token_logprobs(logits.to(device), tokens.to(device), 40), token_logprobs_reference(logits, tokens, 40))
    logits[:, :4090] = -math.inf
    actual = token_logprobs(logits.to(device), tokens.to(device), 12)
    check(actual, token_logprobs_reference(logits, tokens, 12))
    assert actual.top_tokens[:, 8:].tolist() == [[0, 1, 2, 3]] * 2


def test_a_row_without_a_token(device: torch.device) -> None:
    assert token_logprobs(torch.zeros(1, 4, device=device), torch.tensor([-1], device=device), 1).chosen.isnan().all()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="K ≤ V"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 4)
