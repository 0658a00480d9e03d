"""Distributions, penalties, random draws and log-probabilities against slow references."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from kernels.sampling.token_logprobs import token_logprobs
from model.transformer import Transformer
from serve.engine.batch_state import BatchState
from serve.engine.kv_cache import BlockTable
from serve.engine.requests import NonFiniteLogitsError, Sequence, TextStream
from serve.engine.sampling import Sampler, SequenceRows, logprob_entries
from serve.outputs import TokenLogprobs
from serve.sampling_params import SamplingParams
from tests.serve.toys import drain, greedy, make_engine, random_prompts
from tests.tiny import full_logits, tiny_model

V = 12


def sequence(params: SamplingParams, prompt: list[int], output: list[int], *, id: int = 0) -> Sequence:
    return Sequence(
        id=id,
        request_id="r",
        index=0,
        params=params,
        tokens=prompt + output,
        num_prompt_tokens=len(prompt),
        arrival=0.0,
        priority=0,
        deadline=None,
        seed=params.seed or 0,
        end_token_ids=(1, *params.stop_token_ids),
        table=BlockTable(1),
        text=TextStream(None),  # type: ignore[arg-type]
        batch_row=id,
    )


def sampler_of(sequences: list[Sequence], *, max_drafts: int = 0) -> Sampler:
    """A sampler where each sequence has a row, its id."""
    state = BatchState(len(sequences), V, max_drafts=max_drafts, device=torch.device("cpu"))
    state.add(sequences)
    return Sampler(state)


def slowly_adjusted(scores: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The definitions, one token at a time."""
    adjusted = []
    for token, score in enumerate(scores):
        score += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        score -= params.frequency_penalty * output.count(token)
        score -= params.presence_penalty * (token in output)
        if len(output) < params.min_tokens and token in (1, *params.stop_token_ids):
            score = -math.inf
        adjusted.append(score)
    return adjusted


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 0.8},
        {"frequency_penalty": -0.5},
        {"logit_bias": {0: 3.0, 7: -100.0}},
        {"min_tokens": 5, "max_tokens": 9, "stop_token_ids": (4,)},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": -0.3,
            "frequency_penalty": 0.4,
            "logit_bias": {2: -1.0},
            "min_tokens": 9,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("drafted", [(), (3, 3, 11)])
def test_adjustments_are_those_of_the_definitions(params: dict[str, Any], drafted: tuple[int, ...]) -> None:
    own = SamplingParams(**{"max_tokens": 20} | params)
    prompt, output = [2, 3, 3, 9], [5, 3, 5]
    scores = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 3
    expected = slowly_adjusted(scores.tolist(), own, prompt, output + list(drafted))
    other = sequence(SamplingParams(logit_bias={3: 1.0, 4: 1.0, 5: 1.0}), [2], [3], id=0)
    sampler = sampler_of([other], max_drafts=4)
    one = sequence(own, prompt, output)
    one.id = 1  # it takes the row that the other has left
    sampler.state.add([one])
    sampler.state.write_drafts(torch.tensor([0]), torch.tensor([[*drafted, 7]]))
    probabilities = sampler.probabilities(scores[None], sampler.rows([one], [len(drafted)]))
    torch.testing.assert_close(probabilities[0], torch.tensor(expected).softmax(0))


def test_counts_follow_what_is_drawn() -> None:
    """Penalties see the tokens of earlier steps, though nobody has told the row of them but the steps."""
    own = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7, max_tokens=20)
    one, plain = sequence(own, [2, 3], [5], id=0), sequence(SamplingParams(), [2], [5], id=1)
    sampler = sampler_of([one, plain])
    for tokens in ([[5, 8, 8], [5, 8, 8]], [[3, -1, -1], [4, -1, -1]]):
        found, lengths = torch.tensor(tokens), torch.tensor([4, 3])
        sampler.state.advance(torch.tensor([0, 1]), found, lengths=lengths, counted=torch.tensor([0, -1]))
        for sequence_, row in zip((one, plain), tokens, strict=True):
            sequence_.tokens += [token for token in row if token >= 0]
    assert sampler.state.feed[:2, 0].tolist() == [3, 4]
    scores = torch.randn(V, generator=torch.Generator().manual_seed(0))
    probabilities = sampler.probabilities(scores.expand(2, V), sampler.rows([one, plain], [0, 0]))
    expected = slowly_adjusted(scores.tolist(), own, [2, 3], [5, 5, 8, 8, 3])
    torch.testing.assert_close(probabilities, torch.stack([torch.tensor(expected), scores]).softmax(1))


def test_a_row_that_is_taken_again_is_written_again() -> None:
    """A sequence that was preempted may come back to its first row from another, in which it has gone on."""
    own = sequence(SamplingParams(presence_penalty=2.0), [3], [5])
    state = BatchState(2, V, max_drafts=0, device=torch.device("cpu"))
    for row, drawn in ((0, [7]), (1, [8]), (0, [])):
        own.batch_row = row
        state.add([own])
        own.tokens += drawn
        own.table.num_returns += 1
    assert state.adjustments.counts[0].nonzero().flatten().tolist() == [3, 5, 7, 8]


def test_penalties_of_a_whole_generation(model: Transformer) -> None:
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {7: 2.0}}
    prompt = random_prompts(1, low=20, high=21)[0]
    tokens: list[int] = []
    for _ in range(20):
        scores = full_logits(model, prompt + tokens)[-1].tolist()
        adjusted = slowly_adjusted(scores, SamplingParams(**params), prompt, tokens)
        tokens.append(int(np.argmax(adjusted)))
    engine = make_engine(model, max_num_batched_tokens=16)
    engine.add_request("r", prompt, greedy(20, **params))
    assert drain(engine)[("r", 0)].new_token_ids == tokens


@pytest.mark.parametrize("is_draft", [False, True])
def test_draws_follow_the_distribution(is_draft: bool) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)).expand(6000, V)
    each = [sequence(SamplingParams(temperature=0.8, seed=id), [2], [3] * (id % 5), id=id) for id in range(6000)]
    sampler = sampler_of(each, max_drafts=3)
    rows = sampler.rows(each, [id % 3 for id in range(6000)])
    if is_draft:
        sampler.guess(logits, rows, by_rejection=True)
        drawn = sampler.state.feed[rows.batch_rows, 1 + rows.num_before]
    else:
        drawn = sampler.draw(logits, rows)
    expected = torch.softmax(logits[0].double() / 0.8, dim=-1) * 6000
    assert stats.chisquare(drawn.bincount(minlength=V), expected / expected.sum() * 6000).pvalue > 1e-4


def test_mixed_rows_are_drawn_as_alone() -> None:
    logits = torch.randn(50, V, generator=torch.Generator().manual_seed(2))
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 2.0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 0.7, "top_p": 0.5},
        {"temperature": 1.1, "min_p": 0.3},
    ]
    each = [sequence(SamplingParams(seed=n, **kinds[n % 6]), [2, 5], [3] * n, id=n) for n in range(50)]
    sampler = sampler_of(each)
    alone = [int(sampler.draw(logits[n : n + 1], sampler.rows(each[n : n + 1], [0]))) for n in range(50)]
    before = logits.clone()
    assert sampler.draw(logits, sampler.rows(each, [0] * 50)).tolist() == alone
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_a_number_gives_no_token(temperature: float) -> None:
    logits = torch.zeros(2, V)
    logits[1, 3] = math.nan
    each = [sequence(SamplingParams(temperature=temperature), [2], [], id=id) for id in range(2)]
    sampler = sampler_of(each)
    good, bad = sampler.draw(logits, sampler.rows(each, [0, 0])).tolist()
    assert good >= 0 and bad == -1


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


def check_entry(entry: TokenLogprobs, scores: torch.Tensor, num_top: int) -> None:
    logprobs = torch.log_softmax(scores.double(), dim=-1)
    assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]), abs=1e-4)
    order = logprobs.argsort(descending=True).tolist()
    assert entry.rank == order.index(entry.token_id) + 1
    assert [token for token, _ in entry.top] == order[:num_top]
    assert [value for _, value in entry.top] == pytest.approx(logprobs[order[:num_top]].tolist(), abs=1e-4)


@pytest.mark.parametrize("draft", [None, "equal"])
def test_logprobs_are_the_models_own(model: Transformer, draft: str | None) -> None:
    """Of the model's distribution, whatever is sampled from: penalties and temperature do not show."""
    prompt = random_prompts(1, low=30, high=31)[0]
    params = SamplingParams(
        temperature=1.3, seed=4, repetition_penalty=1.2, logprobs=3, max_tokens=15, ignore_eos=True, stop=("q",)
    )
    engine = make_engine(model, model if draft else None, num_speculative_tokens=3)
    engine.add_request("r", prompt, params)
    output = drain(engine)[("r", 0)]
    scores = full_logits(model, prompt + output.new_token_ids)
    assert [entry.token_id for entry in output.logprobs or []] == output.new_token_ids
    for position, entry in enumerate(output.logprobs or []):
        check_entry(entry, scores[len(prompt) - 1 + position], 3)


@pytest.mark.parametrize("budget", [8, 64, 512])
def test_prompt_logprobs_in_any_chunks(model: Transformer, budget: int) -> None:
    prompt = random_prompts(1, low=150, high=151)[0]
    engine = make_engine(model, max_num_batched_tokens=budget)
    engine.add_request("first", prompt, greedy(1))
    drain(engine)  # its pages are cached now, and must not be used
    engine.add_request("r", prompt, greedy(3, prompt_logprobs=2, n=2))
    if budget == 8:  # interrupted twice inside the prompt
        for _ in range(2):
            assert engine.step() == engine.step() == engine.step() == []
            engine.scheduler.preempt(engine.scheduler.running[0])
    joined = drain(engine)
    assert joined[("r", 1)].prompt_logprobs is None
    entries = joined[("r", 0)].prompt_logprobs or []
    assert len(entries) == len(prompt) and entries[0] is None
    scores = full_logits(model, prompt)
    for position, entry in enumerate(entries[1:], 1):
        assert entry is not None and entry.token_id == prompt[position]
        check_entry(entry, scores[position - 1], 2)


@pytest.mark.parametrize("beside", [(), ({"temperature": 1.0, "seed": 7},)], ids=["greedy", "mixed"])
def test_the_likeliest_are_found_and_left_for_the_next_step(beside: tuple[dict[str, Any], ...]) -> None:
    """Where all ask for them, and where one is drawn beside: the same tokens, feed and text."""
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0, logprobs=2)]
    params += [SamplingParams(**others) for others in beside]
    each = [sequence(one, [2, 3], [5] * id, id=id) for id, one in enumerate(params)]
    state = BatchState(len(each), V, max_drafts=0, device=torch.device("cpu"), num_kept_tokens=8)
    state.add(each)
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(4))
    logits[0, 3] = math.nan
    asked = [SequenceRows(one, first) for one, first in zip(each, (0, 2, 4), strict=False)]
    (pending,) = Sampler(state).sample(logits, asked)
    wrong, right = (pending.read()[number] for number in range(2))
    best = int(logits[2].argmax())
    assert isinstance(wrong.error, NonFiniteLogitsError) and right.tokens == [best]
    assert (right.num_drafted, right.num_accepted) == (0, 0)
    assert right.logprobs is not None
    check_entry(right.logprobs[0], logits[2], 2)
    assert state.feed[:2, 0].tolist() == [0, best]
    assert state.text is not None and state.text[:2, :4].tolist() == [[2, 3, -1, 0], [2, 3, 5, best]]


def test_logprobs_of_many_rows_come_in_order() -> None:
    logits = torch.randn(40, V, generator=torch.Generator().manual_seed(3))
    tokens = torch.randint(V, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    entries = logprob_entries(tokens, token_logprobs(logits, torch.tensor(tokens), 5), 3)
    for row, token, entry in zip(logits, tokens, entries, strict=True):
        assert entry.token_id == token
        check_entry(entry, row, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {V: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": (3,)}, "stop"),
        ({"stop_token_ids": (V,)}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 0}, "n must"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": V + 1}, "prompt_logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
    ids=str,
)
def test_every_field_has_bounds(changes: dict[str, Any], message: str) -> None:
    SamplingParams().validate(V)
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes).validate(V)


def test_one_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
