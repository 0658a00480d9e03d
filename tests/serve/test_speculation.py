"""Speculation changes speed, never output: greedy and seeded tokens are equal, the others equally distributed."""

import math
from collections import Counter
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from kernels.sampling import verification
from kernels.sampling.verification import VerifyOutput
from model.transformer import Transformer
from serve.engine import engine as engine_module
from serve.engine import sampling
from serve.engine.requests import Sequence
from serve.engine.runner import LanguageModel
from serve.engine.sampling import Rows, Sampler
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from tests.serve.recorded_graphs import recorded_graphs
from tests.serve.toys import (
    CountingModel,
    TableModel,
    drain,
    generate,
    greedy,
    greedy_oracle,
    make_engine,
    random_prompts,
)
from tests.tiny import tiny_model

PROMPTS = random_prompts(8, seed=1)
NUM_TOKENS = 24
EAGER = pytest.mark.eager
"""Of rows whose graphs other rows of the same test have: what differs is not in them."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


@pytest.fixture(scope="module")
def expected(model: Transformer) -> list[list[int]]:
    return [greedy_oracle(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def noisy_twin(model: Transformer, noise: float = 0.03) -> Transformer:
    """A draft that is right sometimes: the target with noise on its weights."""
    twin = deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return twin


def drafts(model: Transformer) -> dict[str, LanguageModel | str]:
    return {"equal": model, "twin": noisy_twin(model), "stranger": tiny_model(seed=8, num_layers=1), "ngram": "ngram"}


# Each draft and each number of tokens, not each of both together; None learns how many.
DRAFTED = [("equal", 1), ("equal", None), ("twin", 2), ("twin", 4), ("twin", None)]
DRAFTED += [("stranger", 3), ("ngram", 1), ("ngram", 4), ("ngram", None)]


@pytest.mark.parametrize(("draft", "num_drafts"), DRAFTED)
def test_greedy_output_does_not_change(
    model: Transformer, expected: list[list[int]], draft: str, num_drafts: int | None
) -> None:
    engine = make_engine(model, drafts(model)[draft], num_speculative_tokens=num_drafts)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == expected
    assert engine.stats().num_draft_tokens > 0


MANY = random_prompts(10, seed=4, high=14)


@pytest.fixture(scope="module")
def expected_of_many(model: Transformer) -> list[list[int]]:
    return generate(make_engine(model), MANY, greedy(40))


@pytest.mark.parametrize("draft", [pytest.param("equal", marks=EAGER), "twin", pytest.param("ngram", marks=EAGER)])
def test_greedy_output_does_not_change_under_memory_pressure(
    model: Transformer, expected_of_many: list[list[int]], draft: str
) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 3, "num_pages": 10, "max_model_len": None}
    engine = make_engine(model, drafts(model)[draft], max_num_batched_tokens=24, **options)
    assert generate(engine, MANY, greedy(40)) == expected_of_many
    assert engine.stats().num_preemptions >= 2


@pytest.mark.parametrize(("draft", "num_drafts"), DRAFTED)
def test_seeded_output_does_not_change(model: Transformer, draft: str, num_drafts: int | None) -> None:
    params = [
        SamplingParams(
            seed=number,
            temperature=0.5 + 0.1 * number,
            top_k=(0, 40)[number % 2],
            top_p=(1.0, 0.9)[number // 2 % 2],
            repetition_penalty=(1.0, 1.3)[number // 4],
            frequency_penalty=(0.0, 0.4)[number % 2],
            min_tokens=number,
            max_tokens=NUM_TOKENS,
        )
        for number in range(len(PROMPTS))
    ]
    plain = generate(make_engine(model), PROMPTS, params)
    engine = make_engine(model, drafts(model)[draft], num_speculative_tokens=num_drafts)
    assert generate(engine, PROMPTS, params) == plain
    stats = engine.stats()
    if draft == "twin":
        assert stats.num_accepted_tokens < stats.num_draft_tokens
        assert stats.num_accepted_tokens > 0 or num_drafts is None  # the few tries of one that learns may all be wrong
    if draft == "equal":  # the shared random draws make both models agree
        assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens  # some lie behind the end of a sequence


@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (0.0, {}),
        (1.0, {}),
        pytest.param(1.0, {"num_pages": 10, "max_model_len": None}, marks=EAGER),
        pytest.param(0.0, {"enable_prefix_caching": False}, marks=EAGER),
    ],
)
def test_an_equal_draft_is_always_right(model: Transformer, temperature: float, options: dict) -> None:
    """Any error in the draft's cache (catching up, roll-back, forks, shared prefixes) would make it wrong somewhere."""
    prompts = random_prompts(10, seed=4, high=40)
    prompts += [prompts[0] + [9], prompts[0] + [8]]
    engine = make_engine(model, model, num_speculative_tokens=4, max_num_batched_tokens=40, **options)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=31, ignore_eos=True, n=1 + number % 2)
        engine.add_request(str(number), prompt, params)
    outputs = drain(engine)
    assert engine.stats().num_draft_tokens > 200
    for output in outputs.values():
        assert output.num_accepted == output.num_drafted > 0
        assert len(output.drafted_mask) == output.num_output_tokens == 31


def test_the_mask_tells_drafted_tokens_from_the_targets_own(model: Transformer) -> None:
    engine = make_engine(model, noisy_twin(model), num_speculative_tokens=3)
    engine.add_request("r", PROMPTS[0], greedy(40))
    masks = []
    while engine.has_work():
        for output in engine.step():
            masks.append(output.drafted_mask)
            assert len(output.new_token_ids) == len(output.drafted_mask) <= 4
    counted = engine.stats()
    assert all(mask[-1:] == [False] and all(mask[:-1]) for mask in masks[:-1])
    assert counted.num_accepted_tokens == sum(counted.accepted_per_position)
    assert sum(map(sum, masks)) in (counted.num_accepted_tokens, counted.num_accepted_tokens - len(masks[-1]))


def test_the_draft_computes_no_token_twice_and_no_cached_prefix(model: Transformer) -> None:
    counting = CountingModel(model)
    engine = make_engine(model, counting, num_speculative_tokens=2, max_num_batched_tokens=256)
    prompt = random_prompts(1, low=100, high=101)[0]
    # The prompt's pass emits one token, each of ten rounds three, all accepted. In the last round the draft need not
    # compute its second guess nor the target's own token after it.
    generate(engine, [prompt], greedy(31))
    assert counting.num_tokens == 100 + 31 - 2
    counting.num_tokens = 0
    generate(engine, [[*prompt, 7]], greedy(4))
    assert counting.num_tokens == (101 - 96) + 4 - 2


def test_choices_share_the_drafts_computation_of_the_prompt(model: Transformer) -> None:
    counting = CountingModel(model)
    engine = make_engine(model, counting, num_speculative_tokens=1, max_num_batched_tokens=256)
    engine.add_request("r", random_prompts(1, low=37, high=38)[0], greedy(3, n=4))
    outputs = drain(engine)
    assert counting.num_tokens == 38 + 3 * (38 - 32)
    assert all(output.num_accepted == output.num_drafted == 1 for output in outputs.values())


# Distributions: a model that is a table, so that many sequences are cheap.

V = 5
FIRST = 0
NUM_SEQUENCES = 1200


def tables() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    target = torch.softmax(1.2 * torch.randn(V, V, generator=generator), dim=-1)
    target[:, 4] = 0  # a token that the target never says
    target /= target.sum(dim=-1, keepdim=True)
    partial = torch.softmax(1.2 * torch.randn(V, V, generator=generator), dim=-1)
    one_hot = torch.zeros(V, V)
    one_hot[:, 2] = 1
    disjoint = torch.zeros(V, V)
    disjoint[:, 4] = 1
    return {"target": target, "equal": target, "partial": partial, "one-hot": one_hot, "disjoint": disjoint}


def joint_counts(draft: str | None, num_drafts: int | None, params: dict[str, Any], length: int) -> Counter:
    """How often each run of `length` first tokens comes out of the engine."""
    model = tables()
    options = {"max_num_seqs": 50, "max_num_batched_tokens": 1000, "num_pages": 200, "max_model_len": 16}
    source: LanguageModel | None = TableModel(model[draft]) if draft else None
    engine = make_engine(TableModel(model["target"]), source, num_speculative_tokens=num_drafts, **options)
    for number in range(NUM_SEQUENCES // 50):
        engine.add_request(str(number), [FIRST], SamplingParams(max_tokens=length, n=50, ignore_eos=True, **params))
    return Counter(tuple(output.new_token_ids) for output in drain(engine).values())


def exact_joint(temperature: float, top_k: int, length: int) -> dict[tuple[int, ...], float]:
    table = tables()["target"] ** (1 / temperature)
    if top_k:
        table = table * (table >= table.topk(top_k, dim=-1).values[:, -1:])
    table = (table / table.sum(dim=-1, keepdim=True)).double()
    return {
        run: math.prod(float(table[a, b]) for a, b in zip((FIRST, *run), run, strict=False))
        for run in product(range(V), repeat=length)
    }


def p_value(counts: Counter, exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the cells with at least 5 expected, the rest as one cell; impossible runs must not occur."""
    assert not [run for run in counts if exact[run] == 0], "a run that the target never emits"
    total = counts.total()
    big = [run for run, probability in exact.items() if probability * total >= 5]
    seen = [counts[run] for run in big]
    awaited = [exact[run] * total for run in big]
    if total - sum(awaited) > 1:
        seen.append(total - sum(seen))
        awaited.append(total - sum(awaited))
    awaited = [cell * sum(seen) / sum(awaited) for cell in awaited]
    return float(stats.chisquare(seen, awaited).pvalue)


def total_variation(counts: Counter, exact: dict[tuple[int, ...], float]) -> float:
    return sum(abs(counts[run] / counts.total() - probability) for run, probability in exact.items()) / 2


def bound(num_cells: int, delta: float = 1e-6) -> float:
    return math.sqrt(num_cells / NUM_SEQUENCES) / 2 + math.sqrt(math.log(1 / delta) / (2 * NUM_SEQUENCES))


@pytest.mark.parametrize(
    ("draft", "num_drafts"),
    [
        *(("partial", 1), ("partial", 4), ("disjoint", 2)),
        *(pytest.param(draft, number, marks=EAGER) for draft, number in (("equal", 2), ("one-hot", 1), ("one-hot", 3))),
    ],
)
def test_the_joint_distribution_is_the_targets(draft: str, num_drafts: int) -> None:
    counts = joint_counts(draft, num_drafts, {}, length=3)
    exact = exact_joint(1.0, 0, 3)
    assert p_value(counts, exact) > 1e-4
    assert total_variation(counts, exact) < bound(4**3)


def test_the_joint_distribution_without_a_draft() -> None:
    assert p_value(joint_counts(None, None, {}, length=3), exact_joint(1.0, 0, 3)) > 1e-4


@pytest.mark.parametrize("params", [{"temperature": 0.6}, {"temperature": 1.5, "top_k": 3}], ids=str)
def test_the_joint_distribution_follows_the_sampling_settings(params: dict[str, Any]) -> None:
    counts = joint_counts("partial", 3, params, length=2)
    exact = exact_joint(params["temperature"], params.get("top_k", 0), 2)
    assert p_value(counts, exact) > 1e-4


def test_penalties_see_the_accepted_prefix() -> None:
    """A draft token counts for the tokens behind it, in the draft's distribution as in the target's."""
    scores = tables()["target"].double().log()
    exact = {}
    for run in product(range(V), repeat=3):
        probability, last = 1.0, FIRST
        for at, token in enumerate(run):
            penalty = torch.tensor([1.5 * (t in run[:at]) + 0.5 * run[:at].count(t) for t in range(V)])
            probability *= float(torch.softmax(scores[last] - penalty, dim=-1)[token])
            last = token
        exact[run] = probability
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    assert p_value(joint_counts("partial", 3, penalties, length=3), exact) > 1e-4
    assert p_value(joint_counts("partial", 3, {}, length=3), exact) < 1e-6


def test_seeds_that_differ_give_the_targets_distribution_too() -> None:
    model = tables()
    options = {"max_num_seqs": 50, "max_num_batched_tokens": 1000, "num_pages": 200, "max_model_len": 16}
    engine = make_engine(TableModel(model["target"]), TableModel(model["partial"]), num_speculative_tokens=2, **options)
    for seed in range(NUM_SEQUENCES):
        engine.add_request(str(seed), [FIRST], SamplingParams(max_tokens=2, seed=seed, ignore_eos=True))
    counts = Counter(tuple(output.new_token_ids) for output in drain(engine).values())
    assert p_value(counts, exact_joint(1.0, 0, 2)) > 1e-4


@pytest.mark.eager
def test_the_test_notices_the_classic_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection, drawing from p itself instead of max(p - q, 0) looks right and is wrong."""
    monkeypatch.setattr(verification._Left, "weights", lambda self: self.p)
    assert p_value(joint_counts("partial", 2, {}, length=3), exact_joint(1.0, 0, 3)) < 1e-6


@pytest.mark.eager
def test_the_test_notices_a_draft_that_misreports_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampling.verify

    def wrong(target_p: Tensor, draft_p: Tensor, *rest: Any, **more: Any) -> VerifyOutput:
        return right(target_p, torch.full_like(draft_p, 1 / V), *rest, **more)

    monkeypatch.setattr(sampling, "verify", wrong)
    assert p_value(joint_counts("partial", 2, {}, length=3), exact_joint(1.0, 0, 3)) < 1e-6


@pytest.mark.eager
def test_one_request_that_cannot_be_verified_fails_alone(
    model: Transformer, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Sampler.rows

    def wrong(sampler: Sampler, sequences: list[Sequence], num_before: list[int]) -> Rows:
        if any(sequence.request_id == "bad" and sequence.num_output > 2 for sequence in sequences):
            raise RuntimeError("poisoned")
        return right(sampler, sequences, num_before)

    monkeypatch.setattr(Sampler, "rows", wrong)
    engine = make_engine(model, noisy_twin(model), num_speculative_tokens=2, max_num_seqs=16)
    engine.add_request("bad", [5, 6], SamplingParams(max_tokens=9))
    engine.add_request("good", [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, greedy(NUM_TOKENS))
    outputs: dict[tuple[str, int], RequestOutput] = drain(engine)
    assert outputs[("bad", 0)].finish_reason == "error"
    assert outputs[("good", 0)].num_output_tokens == 9
    assert [outputs[(str(number), 0)].new_token_ids for number in range(len(PROMPTS))] == expected


def test_a_failing_draft_costs_speed_only(model: Transformer, expected: list[list[int]]) -> None:
    engine = make_engine(model, CountingModel(noisy_twin(model), poison=expected[0][3]), num_speculative_tokens=2)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == expected


class HighestToken(TableModel):
    """A draft that notes the highest id it was asked about, on its device, and which answers all the same."""

    def __init__(self, probabilities: Tensor) -> None:
        super().__init__(probabilities)
        self.highest, self.num_passes = torch.tensor(-1), torch.tensor(0)

    def __call__(self, tokens: Tensor, *rest: Any, **more: Any) -> Tensor:
        self.highest.copy_(torch.maximum(self.highest, tokens.max()))
        self.num_passes += 1
        return super().__call__(tokens.clamp(max=self.config.vocab_size - 1), *rest, **more)


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
def test_ids_beyond_the_drafts_embedding_never_reach_it(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal vocabularies one may be padded further: what requests name is bounded, what the target says is not."""
    monkeypatch.setattr(engine_module, "graphs_on", lambda device: recorded_graphs() if captured else None)
    table = torch.full((8, 8), 0.01)
    for token in range(8):
        table[token, (token + 1) % 8] = 1.0  # so it says 6 and 7, of which the draft has no row
    draft = HighestToken(table[:6, :6])
    engine = make_engine(TableModel(table), draft, num_speculative_tokens=2)
    for prompt, params in (([6], greedy(1)), ([5], greedy(1, logit_bias={6: 1.0}))):
        with pytest.raises(ValueError, match="5"):
            engine.add_request("refused", prompt, params)
    prompts = [[number] * 3 for number in range(6)]
    assert generate(engine, prompts, greedy(20)) == generate(make_engine(TableModel(table)), prompts, greedy(20))
    assert draft.highest == 5 and draft.num_passes > 20 and engine.stats().num_accepted_tokens > 0
    assert not captured or (engine.stats().num_graphs > 2 and not engine.stats().num_graph_failures)


@EAGER
@pytest.mark.parametrize("share_cache", [False, True])
def test_likeliest_tokens_are_those_that_the_sampler_draws(
    model: Transformer, share_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes without the sampler propose the same, whoever is in the batch and whatever was wanted of them."""
    params = [greedy(NUM_TOKENS - 2 * number) for number in range(len(PROMPTS))]
    params[2], params[5] = greedy(NUM_TOKENS, min_tokens=6), greedy(NUM_TOKENS, repetition_penalty=1.3)
    chained, found = [0], []
    for is_chained in (True, False):
        engine = make_engine(
            model, noisy_twin(model), share_cache=share_cache, num_speculative_tokens=4, max_model_len=60
        )
        draft: Any = engine.draft
        proposed: list[Any] = []
        propose, likeliest = draft.propose, draft._draw_likeliest

        def noted(wanted: Any, propose: Any = propose, engine: Any = engine, proposed: Any = proposed) -> Any:
            trees = propose(wanted)
            rows = [
                (one.sequence.request_id, one.sequence.batch_row, trees[one.sequence.id].num_tokens) for one in wanted
            ]
            proposed.append([(name, engine.state.feed[row, 1 : 1 + count].tolist()) for name, row, count in rows])
            return trees

        def counted(guesses: Any, num_drawn: int, likeliest: Any = likeliest) -> int:
            chained[0] += 1
            return int(likeliest(guesses, num_drawn))

        monkeypatch.setattr(draft, "propose", noted)
        monkeypatch.setattr(draft, "_draw_likeliest", counted)
        if not is_chained:
            monkeypatch.setattr(draft, "_takes_likeliest", lambda guess: False)
        found.append((generate(engine, PROMPTS, params), proposed))
    assert found[0] == found[1] and chained[0] > 0
