"""The adaptive draft length: the textbook formula on measured costs, zero when drafting loses, and back."""

import random

import pytest

from model.transformer import Transformer
from serve.draft_length import MAX_DRAFT_TOKENS, AdaptiveLength, PassCosts, expected_tokens
from serve.sampling_params import SamplingParams
from serve.sequence import Sequence
from tests.serve.test_sampling import sequence as make_sequence
from tests.serve.toys import drain, greedy, make_engine, random_prompts
from tests.tiny import tiny_model


def a_sequence(num_output: int = 5) -> Sequence:
    return make_sequence(SamplingParams(), [2], [3] * num_output)


@pytest.mark.parametrize(("acceptance", "k", "expected"), [(0.8, 4, 3.3616), (0.75, 7, 3.5995), (0.9, 10, 6.8619)])
def test_expected_tokens(acceptance: float, k: int, expected: float) -> None:
    assert expected_tokens(acceptance, k) == pytest.approx(expected, abs=5e-5)


def trained(acceptance: float, *, draft_s: float, row_s: float = 0.0, num_decoding: int = 1) -> AdaptiveLength:
    """A controller that has seen many verifications, a target of 1 s + row_s a row, and a draft of draft_s."""
    adaptive = AdaptiveLength()
    for rows in range(1, 10 * num_decoding):
        adaptive.target_costs.record(rows, 1 + row_s * rows)
    adaptive.draft_costs.record(num_decoding, draft_s)
    random_, other = random.Random(0), a_sequence()
    for _ in range(2000):
        accepted = next((n for n in range(4) if random_.random() > acceptance), 4)
        adaptive.observe(other, 4, accepted)
    adaptive.begin_step(num_decoding)
    return adaptive


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft_s", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("row_s", [0.0, 0.1])
def test_the_length_is_the_best_by_the_formula(acceptance: float, draft_s: float, row_s: float) -> None:
    adaptive = trained(acceptance, draft_s=draft_s, row_s=row_s)
    a = adaptive.acceptance(a_sequence())
    assert a == pytest.approx(acceptance, abs=0.06)
    rates = [expected_tokens(a, k) / (k * draft_s + 1 + row_s * (k + 1)) for k in range(MAX_DRAFT_TOKENS + 1)]
    chosen = adaptive(a_sequence())
    assert rates[chosen] >= max(rates) / 1.031
    if chosen:
        assert rates[chosen] == max(rates)


def test_no_draft_when_it_loses() -> None:
    assert trained(0.9, draft_s=1.5)(a_sequence()) == 0  # a slow draft
    assert trained(0.02, draft_s=0.1)(a_sequence()) == 0  # a poor one
    busy = trained(0.7, draft_s=2.0, row_s=0.5, num_decoding=16)  # a target that is busy already
    assert busy(a_sequence()) == 0


def test_a_sequence_that_is_easier_than_the_rest_drafts_more() -> None:
    adaptive = trained(0.5, draft_s=0.15)
    easy, hard = a_sequence(), a_sequence()
    for _ in range(30):
        adaptive.observe(easy, 4, 4)
        adaptive.observe(hard, 4, 0)
    assert adaptive(easy) > adaptive(a_sequence()) > adaptive(hard) == 0


def test_a_probe_now_and_then_and_recovery() -> None:
    adaptive = trained(0.02, draft_s=0.1)
    probes = [n for n in range(2, 600) if adaptive(a_sequence(n))]
    assert probes == [16, 32, 64, 128, 256, 512]
    for _ in range(200):  # probes of many sequences find the draft good again
        adaptive.observe(a_sequence(16), 1, 1)
    assert adaptive(a_sequence()) > 0


def test_costs_are_interpolated_and_hiccups_damped() -> None:
    costs = PassCosts()
    assert costs.estimate(4) is None
    costs.record(2, 1.0)
    costs.record(6, 3.0)
    assert [costs.estimate(rows) for rows in (1, 2, 4, 6, 100)] == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])
    costs.record(2, 1000.0)
    assert costs.estimate(2) == pytest.approx(1.4)
    for _ in range(100):
        costs.record(2, 0.5)
    assert costs.estimate(2) == pytest.approx(0.5, rel=1e-3)


def test_an_engine_stops_drafting_with_a_draft_that_costs_as_much_and_knows_nothing() -> None:
    model, draft = tiny_model(seed=3), tiny_model(seed=9)
    engine = make_engine(model, draft)
    for number, prompt in enumerate(random_prompts(4)):
        engine.add_request(str(number), prompt, greedy(150))
    drain(engine)
    stats = engine.stats()
    assert stats.num_draft_tokens < 0.25 * stats.num_generation_tokens


def test_an_engine_drafts_with_a_cheap_draft_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Transformer = tiny_model(seed=3)
    engine = make_engine(model, model)
    costs = engine.draft_length
    monkeypatch.setattr(costs.draft_costs, "record", lambda rows, seconds: None)  # its passes count as free
    engine.add_request("r", [5, 6, 7], greedy(120))
    drain(engine)
    stats = engine.stats()
    assert stats.num_accepted_tokens > 60 and stats.num_steps < 60
