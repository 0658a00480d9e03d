"""Masks from outside: what they forbid is never said, and with draft tokens the output is distributed as without."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from model.transformer import Transformer
from serve.engine.engine import Engine
from serve.engine.token_mask import PlainMask
from serve.sampling_params import SamplingParams
from tests.serve.test_speculation import FIRST, NUM_SEQUENCES, V, exact_joint, noisy_twin, p_value, tables
from tests.serve.toys import VOCAB_SIZE, TableModel, drain, generate, greedy, make_engine, random_prompts
from tests.tiny import full_logits, tiny_model

PROMPTS = random_prompts(6, seed=1)
NUM_TOKENS = 20


class Alternating(PlainMask):
    """Even and odd tokens in turn, even ones first."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size

    def allowed(self, output: Sequence[int]) -> np.ndarray:
        assert all(token % 2 == number % 2 for number, token in enumerate(output)), "asked behind what it forbids"
        return np.arange(self.vocab_size) % 2 == len(output) % 2


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


def masked_oracle(model: Transformer, prompt: list[int]) -> list[int]:
    tokens, mask = list(prompt), Alternating()
    for _ in range(NUM_TOKENS):
        allowed = torch.from_numpy(mask.allowed(tokens[len(prompt) :]))
        tokens.append(int(full_logits(model, tokens)[-1].masked_fill(~allowed, -torch.inf).argmax()))
    return tokens[len(prompt) :]


def masked(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    """Outputs to all prompts, every other request masked."""
    for number, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(number), prompt, own)
        if number % 2 == 0:
            engine.set_token_mask(str(number), Alternating())
    joined = drain(engine)
    return [joined[(str(number), 0)].new_token_ids for number in range(len(PROMPTS))]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("draft", [None, "twin", "ngram"])
def test_greedy_output_is_the_best_of_what_is_allowed(model: Transformer, draft: str | None, overlapped: bool) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 3} if draft else {}
    engine = make_engine(
        model, noisy_twin(model) if draft == "twin" else draft, num_pages=14, max_model_len=128, **options
    )
    engine.max_pending = int(overlapped)
    outputs = masked(engine, [greedy(NUM_TOKENS)] * len(PROMPTS))
    plain = generate(make_engine(model), PROMPTS, greedy(NUM_TOKENS))
    assert outputs == [
        plain[number] if number % 2 else masked_oracle(model, prompt) for number, prompt in enumerate(PROMPTS)
    ]
    if draft:
        assert engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("draft", ["twin", "ngram"])
def test_seeded_output_does_not_depend_on_drafts(model: Transformer, draft: str) -> None:
    params = [
        SamplingParams(seed=number, max_tokens=NUM_TOKENS, top_p=0.9, repetition_penalty=1.0 + 0.1 * number)
        for number in range(len(PROMPTS))
    ]
    engine = make_engine(model, noisy_twin(model) if draft == "twin" else draft, num_speculative_tokens=3)
    assert masked(engine, params) == masked(make_engine(model), params)
    assert draft == "ngram" or engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("draft", [None, "partial", "odd"])
def test_the_distribution_is_the_targets_over_what_is_allowed(draft: str | None) -> None:
    options = {"max_num_seqs": 50, "max_num_batched_tokens": 1000, "num_pages": 200, "max_model_len": 16}
    model = tables()
    # Half of the time nothing that this one ever says is allowed.
    model["odd"] = model["partial"] * (torch.arange(V) % 2 == 1)
    source = TableModel(model[draft]) if draft else None
    engine = make_engine(TableModel(model["target"]), source, num_speculative_tokens=2 if draft else None, **options)
    for number in range(NUM_SEQUENCES // 50):
        engine.add_request(str(number), [FIRST], SamplingParams(max_tokens=3, n=50, ignore_eos=True))
        engine.set_token_mask(str(number), Alternating(V))
    counts = Counter(tuple(output.new_token_ids) for output in drain(engine).values())
    exact = {}
    for run in product(range(V), repeat=3):
        probability, last = 1.0, FIRST
        for at, token in enumerate(run):
            allowed = model["target"][last].double() * (torch.arange(V) % 2 == at % 2)
            probability *= float(allowed[token] / allowed.sum())
            last = token
        exact[run] = probability
    assert p_value(counts, exact) > 1e-4
    assert p_value(counts, exact_joint(1.0, 0, 3)) < 1e-6
