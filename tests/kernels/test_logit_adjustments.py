"""Bias and penalties from device state: kernel and CPU form against the definitions, and against the engine's."""

import math

import pytest
import torch
from torch import Tensor

from kernels.sampling.logit_adjustments import (
    ALWAYS,
    IN_PROMPT,
    RequestState,
    adjust_scores,
    adjust_scores_reference,
    count_tokens,
)
from tests.compare import check_close

VOCABULARY, SLOTS = 2100, 4


def state(device: torch.device) -> RequestState:
    """Slot 0 has everything, 1 only penalties, 2 only biases, 3 nothing."""
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 3, (SLOTS, VOCABULARY), generator=generator, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(0, 2, (SLOTS, VOCABULARY), generator=generator, dtype=torch.int32)
    tokens = torch.full((SLOTS, 5), -1, dtype=torch.int32)
    values, until = torch.zeros(SLOTS, 5), torch.full((SLOTS, 5), ALWAYS, dtype=torch.int32)
    tokens[0] = torch.tensor([3, 2099, 3, 1057, -1])
    tokens[2, :2] = torch.tensor([0, 1020])
    values[0], values[2, :2] = torch.tensor([1.5, -4.0, 0.25, -math.inf, 9.0]), torch.tensor([-100.0, 7.0])
    until[0, 1], until[0, 3] = 4, 6
    penalties = torch.tensor([[1.3, 0.4, 0.7], [0.6, -0.5, 0.2], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    parts = (counts, *penalties.T.contiguous(), tokens, values, until)
    return RequestState(*(part.contiguous().to(device) for part in parts))


def rows(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "logits": (3 * torch.randn(8, VOCABULARY)).to(dtype).to(device),
        "slots": torch.tensor([0, 0, 1, 2, 3, -1, 0, 1], dtype=torch.int32, device=device),
        "positions": torch.tensor([3, 5, 0, 9, 1, 2, 6, 1], dtype=torch.int32, device=device),
    }


def drafts(device: torch.device) -> Tensor:
    """Tokens with and without a bias, twice the same, in the first block and in the last."""
    drafted = [[3, 3, -1], [2099, 11, 11], [11, -1, -1], [1020, 0, 5], [-1] * 3, [1, 2, 3], [1057, 3, 2048], [-1] * 3]
    return torch.tensor(drafted, device=device)


def check(given: dict[str, Tensor], own: RequestState, drafted: Tensor | None) -> None:
    logits = given.pop("logits")
    expected = adjust_scores_reference(logits, own, drafted=drafted, **given)
    actual = adjust_scores(logits, own, drafted=drafted, **given).cpu()
    assert actual.dtype == torch.float32
    assert torch.equal(actual == -math.inf, expected == -math.inf)
    check_close(actual.clamp_min(-1e4), expected.clamp_min(-1e4), dtype=torch.float32)
    unadjusted = given["slots"].cpu() == -1
    assert torch.equal(actual[unadjusted], logits.cpu().float()[unadjusted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_drafts", [False, True])
def test_equals_the_definitions(device: torch.device, has_drafts: bool, dtype: torch.dtype) -> None:
    check(rows(device, dtype), state(device), drafts(device) if has_drafts else None)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_equals_the_definitions_without_triton(has_drafts: bool) -> None:
    cpu = torch.device("cpu")
    check(rows(cpu, torch.float32), state(cpu), drafts(cpu) if has_drafts else None)


def test_no_biases_at_all(device: torch.device) -> None:
    own = state(device)
    none = (part[:, :0].contiguous() for part in own[4:])
    check(rows(device, torch.float32), RequestState(*own[:4], *none), None)


def test_emitted_tokens_are_counted(device: torch.device) -> None:
    counts = torch.zeros(3, 9, dtype=torch.int32, device=device)
    counts[1, 4] = IN_PROMPT + 2
    tokens = torch.tensor([[4, 4, -1], [0, -1, -1], [8, 8, 8]], device=device)
    count_tokens(counts, torch.tensor([1, 0, -1], device=device), tokens)
    expected = torch.zeros(3, 9, dtype=torch.int32)
    expected[1, 4], expected[0, 0] = IN_PROMPT + 4, 1
    assert torch.equal(counts.cpu(), expected)


def test_bad_input_is_refused() -> None:
    own, given = state(torch.device("cpu")), rows(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="counts"):
        adjust_scores(given["logits"][:, :9], own, slots=given["slots"], positions=given["positions"])
    with pytest.raises(ValueError, match="contiguous"):
        adjust_scores(**given, state=own._replace(counts=own.counts.T.contiguous().T))
