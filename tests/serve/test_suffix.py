"""Looking up how the text went on: against a search everywhere, exact in every mode, idle where nothing repeats."""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from model.transformer import Transformer
from serve.engine.drafts.length import MAX_DRAFT_TOKENS, PassCosts
from serve.engine.drafts.suffix import MOST_MATCHED, Text
from serve.engine.drafts.tree import AtHand
from serve.engine.engine import Engine
from serve.sampling_params import SamplingParams
from tests.serve.test_draft_length import Reader, a_sequence, adaptive_length
from tests.serve.test_speculation import FIRST, NUM_SEQUENCES, exact_joint, noisy_twin, p_value, tables
from tests.serve.toys import TableModel, drain, generate, greedy, greedy_oracle, make_engine, random_prompts
from tests.tiny import tiny_model

NUM_TOKENS = 24
SIZE = 40
"""Of the tables' vocabulary."""
PROMPTS = [prompt + prompt[:-1] for prompt in random_prompts(8, seed=1, low=3, high=30)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


@pytest.fixture(scope="module")
def expected(model: Transformer) -> list[list[int]]:
    return [greedy_oracle(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def longest_match(tokens: list[int], most: int) -> tuple[int, int]:
    """Its length and the latest place where it ended earlier, by looking everywhere; (1, -1) for less than 2 tokens."""
    found = (1, -1)
    for place in range(len(tokens) - 1):
        length = 0
        while length <= place and length < most and tokens[place - length] == tokens[-1 - length]:
            length += 1
        found = max(found, (length, place)) if length > 1 else found
    return found


@pytest.mark.parametrize("alphabet", [2, 3, 8, 60])
def test_the_longest_match_is_found_however_the_text_arrives(alphabet: int) -> None:
    drawn = random.Random(alphabet)
    for _ in range(30):
        text, tokens = Text(), [drawn.randrange(alphabet)]
        for _ in range(12):
            tokens += [drawn.randrange(alphabet) for _ in range(drawn.randrange(1, 5))]
            text.index(tokens)
            text.look_up(tokens, 5)
            length, place = longest_match(tokens, MOST_MATCHED)
            if place < 0:
                assert not text.guess
                continue
            assert 2 ** (text.level + 1) <= length < 2 ** (text.level + 2)
            for at, token in enumerate(text.guess):  # what follows the place, and then itself
                assert token == (tokens + text.guess)[place + 1 + at]
            assert len(text.guess) == 5


def engine_of(model: Transformer, twin: bool, **options: Any) -> Engine:
    return make_engine(model, "suffix", noisy_twin(model) if twin else None, **options)


@pytest.mark.parametrize(("twin", "num_drafts"), [(False, 3), (False, None), (True, 1), (True, 3), (True, None)])
def test_output_does_not_change(
    model: Transformer, expected: list[list[int]], twin: bool, num_drafts: int | None
) -> None:
    engine = engine_of(model, twin, num_speculative_tokens=num_drafts)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == expected
    params = [SamplingParams(seed=n, max_tokens=NUM_TOKENS, repetition_penalty=1 + n % 2 / 5) for n in range(8)]
    plain = generate(make_engine(model), PROMPTS, params)
    assert generate(engine_of(model, twin, num_speculative_tokens=num_drafts), PROMPTS, params) == plain
    assert engine.stats().num_accepted_tokens > 0 or not twin or num_drafts is None


@pytest.mark.parametrize("twin", [False, True])
def test_output_does_not_change_under_memory_pressure(model: Transformer, twin: bool) -> None:
    prompts = [prompt * 2 for prompt in random_prompts(10, seed=4, high=8)]
    expected = generate(make_engine(model), prompts, greedy(40))
    options: dict[str, Any] = {"num_speculative_tokens": 3, "num_pages": 10, "max_model_len": None}
    engine = engine_of(model, twin, max_num_batched_tokens=24, **options)
    assert generate(engine, prompts, greedy(40)) == expected
    assert engine.stats().num_preemptions >= 2


@pytest.mark.parametrize("draft", [None, "partial"])
def test_sampled_tokens_have_the_targets_distribution(draft: str | None) -> None:
    """After a prompt whose end stood before: rows of one step are drafted by the text, others by the model."""
    model, options = tables(), {"max_num_seqs": 50, "max_num_batched_tokens": 1000, "num_pages": 200}
    engine = make_engine(
        TableModel(model["target"]), "suffix", TableModel(model[draft]) if draft else None, num_speculative_tokens=2,
        max_model_len=32, **options,
    )  # fmt: skip
    for number in range(NUM_SEQUENCES // 50):
        engine.add_request(str(number), [2, FIRST, 1, 2, FIRST], SamplingParams(max_tokens=3, n=50, ignore_eos=True))
    counts = Counter(tuple(output.new_token_ids) for output in drain(engine).values())
    assert p_value(counts, exact_joint(1.0, 0, 3)) > 1e-4
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def cycle(length: int, right: int) -> TableModel:
    """A model that counts to `length` and begins anew; only of the tokens below `right` it knows the next."""
    table = torch.full((SIZE, SIZE), 1e-4)
    for token in range(length):
        table[token, (token + 1) % length if token < right else SIZE - 1] = 1.0
    return TableModel(table)


@pytest.mark.eager
def test_the_model_and_the_text_share_the_work() -> None:
    """A model that is right half the time drafts until the text repeats itself; from then on the text does."""
    engine = make_engine(cycle(20, 20), "suffix", cycle(20, 10), num_speculative_tokens=4)
    passes = engine.draft.model.runner  # type: ignore[union-attr]
    run, computed = passes.run, []
    passes.run = lambda *inputs: (computed.append(engine.stats().num_generation_tokens), run(*inputs))[1]
    generate(engine, [[0]], greedy(200))
    assert len(computed) > 1 and max(computed) < 30
    assert engine.stats().num_steps < 25 + 180 / 4


def fixed_costs(engine: Engine, monkeypatch: pytest.MonkeyPatch, draft_s: float) -> None:
    """Let a pass of the target take 1 s and 0.1 s a row, and one of the draft `draft_s`."""
    for costs, seconds in ((engine.draft_length.target_costs, 0.9), (engine.draft_length.draft_costs, draft_s)):
        record, row_s = costs.record, 0.1 if seconds == 0.9 else 0.0
        own = lambda rows, _, record=record, s=seconds, row_s=row_s: record(rows, s + row_s * rows)  # noqa: E731
        monkeypatch.setattr(costs, "record", own)


def test_a_text_that_repeats_itself_is_quoted_and_another_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cycle(20, 20), "suffix")
    fixed_costs(engine, monkeypatch, 0.0)
    engine.add_request("r", list(range(20)) * 2, greedy(160))
    drain(engine)
    assert engine.stats().num_steps < 160 / 5
    drawn = random.Random(2)
    engine = make_engine(TableModel(torch.full((SIZE, SIZE), 1 / SIZE)), "suffix")
    fixed_costs(engine, monkeypatch, 0.0)
    engine.add_request("r", [drawn.randrange(SIZE) for _ in range(60)], SamplingParams(max_tokens=160, ignore_eos=True))
    drain(engine)
    # Two passes of so many rows prepare for others; only the third says what they cost.
    assert engine.stats().num_draft_tokens <= 3 * MAX_DRAFT_TOKENS


@pytest.mark.parametrize(("acceptance", "taken"), [(0.05, False), (0.3, False), (0.95, True)])
def test_what_promises_more_is_taken(acceptance: float, taken: bool) -> None:
    """Beside a draft that is right 3 times of 5 and costs little."""
    adaptive = adaptive_length()
    adaptive.draft = Reader(guess=AtHand(MAX_DRAFT_TOKENS, acceptance))
    for rows in range(1, 12):
        adaptive.target_costs.record(rows, 1 + 0.05 * rows)
    adaptive.draft_costs.record(1, 0.05)
    other, sequence = a_sequence(), a_sequence(id=1)
    for _ in range(300):
        adaptive.observe(other, 5, 3 if other.recent_accepted < 1.5 * other.recent_rejected else 0)
    adaptive.begin_step([sequence])
    assert adaptive.takes_at_hand(sequence) == taken and adaptive(sequence) > 0
    adaptive.draft = Reader(guess=AtHand(MAX_DRAFT_TOKENS, acceptance), runs_passes=False)
    adaptive._length = 0
    adaptive.begin_step([sequence])
    assert adaptive.takes_at_hand(sequence) == adaptive.is_drafting == (acceptance > 0.1)


def test_nothing_is_taken_before_costs_are_known() -> None:
    adaptive = adaptive_length()
    adaptive.target_costs, adaptive.draft = PassCosts(), Reader(guess=AtHand(4, 0.9), runs_passes=False)
    adaptive.begin_step([a_sequence()])
    assert not adaptive.is_drafting
