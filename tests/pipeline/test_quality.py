"""Held-out quality: what all batches together give, in one pass with a reference as in one without."""

import math

import pytest
import torch

from pipeline.measure.quality import HeldOut
from tests.tiny import tiny_model
from train.evaluate import compare, mean_nll
from train.packing import Batch


def batch(seed: int, length: int, num_bytes: int) -> Batch:
    tokens = torch.randint(512, (length,), generator=torch.Generator().manual_seed(seed))
    labels = torch.cat((tokens[1:], torch.tensor([-100])))
    return Batch(
        tokens, torch.arange(length), torch.tensor([0, length], dtype=torch.int32), labels, length - 1, num_bytes
    )


HELD_OUT = HeldOut((batch(1, 30, 100), batch(2, 50, 120), batch(3, 20, 90)))


@pytest.mark.parametrize("with_reference", [False, True])
def test_the_figures_are_those_of_all_batches_together(with_reference: bool) -> None:
    model, reference = tiny_model(seed=1), tiny_model(seed=2)
    states = HELD_OUT.states(reference)
    quality = HELD_OUT.quality(model, states if with_reference else None)
    nll, tokens, num_bytes = mean_nll(model, HELD_OUT.batches), 97, 310
    assert quality.tokens == tokens
    assert quality.nll.value == pytest.approx(nll, rel=1e-6)
    assert quality.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert quality.bits_per_byte.value == pytest.approx(nll * tokens / math.log(2) / num_bytes, rel=1e-6)
    assert quality.nll.margin and quality.bits_per_byte.margin
    if not with_reference:
        assert quality.kl is quality.agreement is quality.acceptance is None
        return
    both = compare(model, states, HELD_OUT.batches)
    assert quality.kl and quality.agreement and quality.acceptance
    assert quality.kl.value == pytest.approx(both.kl, rel=1e-5)
    assert quality.agreement.value == pytest.approx(both.agreement)
    assert quality.acceptance.value == pytest.approx(both.acceptance, rel=1e-5)
