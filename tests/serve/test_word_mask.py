"""Tokens that a request allows and words that it forbids: never broken, and exact with drafts, choices and memory."""

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

from model.transformer import Transformer
from serve.engine.token_mask import WordMask
from serve.sampling_params import SamplingParams
from tests.serve.test_speculation import FIRST, NUM_SEQUENCES, V, noisy_twin, p_value, tables
from tests.serve.test_token_mask import Alternating
from tests.serve.toys import EOS, TableModel, drain, generate, greedy, make_engine, random_prompts
from tests.serve.toys import toy_tokenizer as tokenizer_of
from tests.tiny import full_logits, tiny_model

PROMPTS = random_prompts(4, seed=2)
NUM_TOKENS = 24
TOKENIZER = tokenizer_of()
LETTERS = tuple(TOKENIZER.encode("abcdefghijklmnopqrstuvwxyz -"))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


def spelled(word: str) -> list[list[int]]:
    """A word as tokens, at the beginning of a text and behind a space."""
    return [TOKENIZER.encode(word), TOKENIZER.encode(" " + word)]


def is_bad(output: list[int], words: list[str]) -> bool:
    return any(output[-len(ids) :] == ids for word in words for ids in spelled(word))


def oracle(model: Transformer, prompt: list[int], allowed: tuple[int, ...] | None, words: list[str]) -> list[int]:
    """Greedy decoding by full passes: the best token that is allowed and completes no spelling of a word."""
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        ranked = full_logits(model, prompt + output)[-1].argsort(descending=True).tolist()
        free = (token for token in ranked if allowed is None or token in allowed)
        output.append(next(token for token in free if not is_bad([*output, token], words)))
    return output


@pytest.fixture(scope="module")
def words(model: Transformer) -> list[str]:
    """Words that the model would write in letters: of one token, and of two in a row."""
    runs = generate(make_engine(model), PROMPTS, greedy(NUM_TOKENS, allowed_token_ids=LETTERS))
    texts = [TOKENIZER.decode(run) for run in runs]
    return [part for text in texts for at in range(0, 12, 4) for part in (text[at], text[at + 1 : at + 3])]


@pytest.mark.parametrize("draft", [None, "twin", "ngram"])
@pytest.mark.parametrize("n", [1, 3])
def test_greedy_output_is_the_best_of_what_is_left(
    model: Transformer, words: list[str], draft: str | None, n: int
) -> None:
    settings: list[tuple[tuple[int, ...] | None, list[str]]] = [
        (LETTERS, []),
        (None, words),
        (LETTERS, words),
        (None, []),
    ]
    options: dict[str, Any] = {"num_speculative_tokens": 3} if draft else {}
    source = noisy_twin(model) if draft == "twin" else draft
    engine = make_engine(model, source, num_pages=30, max_model_len=128, max_num_batched_tokens=40, **options)
    for number, (prompt, (allowed, bad)) in enumerate(zip(PROMPTS, settings, strict=True)):
        params = greedy(NUM_TOKENS, allowed_token_ids=allowed, bad_words=tuple(bad), n=n)
        engine.add_request(str(number), prompt, params)
    found = drain(engine)
    for number, (prompt, own) in enumerate(zip(PROMPTS, settings, strict=True)):
        expected = oracle(model, prompt, *own)
        assert [found[str(number), index].new_token_ids for index in range(n)] == [expected] * n
        assert number != 2 or expected != oracle(model, prompt, LETTERS, []), "nothing was forbidden"
    assert not draft or engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("draft", ["twin", "ngram"])
def test_seeded_output_does_not_depend_on_drafts(model: Transformer, words: list[str], draft: str) -> None:
    params = [
        SamplingParams(
            seed=number, max_tokens=NUM_TOKENS, allowed_token_ids=allowed, bad_words=tuple(words), min_tokens=number
        )
        for number, allowed in enumerate((LETTERS, None, (*LETTERS, EOS), None))
    ]
    plain = generate(make_engine(model), PROMPTS, params)
    source = noisy_twin(model) if draft == "twin" else draft
    assert generate(make_engine(model, source, num_speculative_tokens=3), PROMPTS, params) == plain
    assert all(not is_bad(run[: at + 1], words) for run in plain for at in range(len(run)))


@pytest.mark.parametrize("draft", [None, "partial"])
def test_the_distribution_is_the_targets_over_what_is_left(draft: str | None) -> None:
    model, allowed, word = tables(), (1, 2, 3), '!"'
    assert tokenizer_of(V).encode(word) == [2, 3]
    source = TableModel(model[draft]) if draft else None
    options = {"max_num_seqs": 50, "max_num_batched_tokens": 1000, "num_pages": 200, "max_model_len": 16}
    engine = make_engine(TableModel(model["target"]), source, num_speculative_tokens=2 if draft else None, **options)
    params = SamplingParams(max_tokens=3, n=50, ignore_eos=True, allowed_token_ids=allowed, bad_words=(word,))
    for number in range(NUM_SEQUENCES // 50):
        engine.add_request(str(number), [FIRST], params)
    counts = Counter(tuple(output.new_token_ids) for output in drain(engine).values())
    exact = {}
    for run in product(range(V), repeat=3):
        probability, last = 1.0, FIRST
        for at, token in enumerate(run):
            free = [one for one in allowed if not (at and last == 2 and one == 3)]
            row = model["target"][last].double()
            probability *= float(row[token] / row[free].sum()) if token in free else 0.0
            last = token
        exact[run] = probability
    assert p_value(counts, exact) > 1e-4


def test_with_another_mask_both_hold(model: Transformer) -> None:
    engine = make_engine(model)
    allowed = tuple(range(100, 140))
    engine.add_request("r", PROMPTS[0], greedy(NUM_TOKENS, allowed_token_ids=allowed))
    engine.set_token_mask("r", Alternating())
    [output] = drain(engine).values()
    assert set(output.new_token_ids) <= set(allowed)
    assert all(token % 2 == number % 2 for number, token in enumerate(output.new_token_ids))


def test_where_nothing_else_is_left_a_bad_word_is_written(model: Transformer) -> None:
    token = TOKENIZER.encode("x")[0]
    params = greedy(4, allowed_token_ids=(token,), bad_words=("x",))
    assert generate(make_engine(model), PROMPTS[:1], params) == [[token] * 4]
    ends = SamplingParams(max_tokens=4, allowed_token_ids=(EOS,), min_tokens=2)
    with pytest.raises(ValueError, match="allowed_token_ids names only tokens that end the text"):
        make_engine(model).add_request("r", [5], ends)
    with pytest.raises(ValueError, match="allowed_token_ids must name"):
        make_engine(model).add_request("r", [5], SamplingParams(allowed_token_ids=()))
    with pytest.raises(ValueError, match="allowed_token_ids must be between 0 and 511, not 512"):
        make_engine(model).add_request("r", [5], SamplingParams(allowed_token_ids=(512,)))


def test_a_word_is_found_by_its_last_token_only_behind_the_others() -> None:
    mask = WordMask(np.ones(9, dtype=bool), [(1, 2, 3), (5,)], min_tokens=2, ends=(8,))
    forbidden = {
        (): {5, 8}, (1,): {5, 8}, (1, 2): {3, 5}, (2,): {5, 8}, (1, 2, 2): {5}, (4, 1, 2): {3, 5}, (1, 1, 2): {3, 5},
    }  # fmt: skip
    for output, banned in forbidden.items():
        assert set(np.flatnonzero(~mask.allowed(list(output)))) == banned, output
