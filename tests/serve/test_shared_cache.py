"""A draft on its target's pages: the target says what it would say alone, and no prompt is read twice."""

from typing import Any

import pytest
import torch
from torch import nn

from model.formats.registry import format_named
from model.quantized import set_quantized
from model.transformer import Transformer
from serve.engine.drafts.shared_cache import can_share_cache
from serve.sampling_params import SamplingParams
from tests.serve.test_routed import routed_model
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import CountingModel, drain, generate, greedy, greedy_oracle, make_engine, random_prompts
from tests.tiny import tiny_model

PROMPTS = random_prompts(8, seed=1)
NUM_TOKENS, NUM_MORE = 24, 8


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


@pytest.fixture(scope="module")
def expected(model: Transformer) -> list[list[int]]:
    return [greedy_oracle(model, prompt, NUM_TOKENS + NUM_MORE) for prompt in PROMPTS]


def in_four_bits(model: Transformer) -> Transformer:
    rounded = tiny_model(seed=3)
    rounded.load_state_dict(model.state_dict())
    form: Any = format_named("int4", group=32)
    for name, module in list(rounded.model.named_modules(prefix="model")):
        if isinstance(module, nn.Linear):
            set_quantized(rounded, name, form.quantize(module.weight.detach()), form)
    return rounded


@pytest.mark.parametrize(
    ("draft", "num_drafts"), [("four bits", 3), ("four bits", None), ("twin", 1), ("stranger", 3), ("stranger", None)]
)
def test_greedy_output_is_the_targets(
    model: Transformer, expected: list[list[int]], draft: str, num_drafts: int | None
) -> None:
    """Whatever the draft writes into the pages."""
    made = {"four bits": in_four_bits, "twin": noisy_twin, "stranger": lambda _: tiny_model(seed=8)}[draft](model)
    engine = make_engine(model, made, share_cache=True, num_speculative_tokens=num_drafts)
    written = generate(engine, PROMPTS, greedy(NUM_TOKENS))
    assert written == [tokens[:NUM_TOKENS] for tokens in expected]
    assert engine.stats().num_draft_tokens > 0
    longer = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, written, strict=True)]
    again = generate(engine, longer, greedy(NUM_MORE))  # on what was published of the pages
    assert again == [tokens[NUM_TOKENS:] for tokens in expected]
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (1.0, {}),
        (0.0, {"num_pages": 10, "max_model_len": None}),
        pytest.param(1.0, {"enable_prefix_caching": False}, marks=pytest.mark.eager),  # graphs know of no prefix
    ],
)
def test_an_equal_draft_is_always_right(model: Transformer, temperature: float, options: dict[str, Any]) -> None:
    """Were it fed at a wrong position, or from pages of others, it would be wrong somewhere."""
    prompts = random_prompts(10, seed=4, high=40)
    prompts += [prompts[0] + [9], prompts[0] + [8]]
    options = {"num_speculative_tokens": 4, "max_num_batched_tokens": 40} | options
    engine = make_engine(model, model, share_cache=True, **options)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=31, ignore_eos=True, n=1 + number % 2)
        engine.add_request(str(number), prompt, params)
    outputs = drain(engine)
    assert engine.stats().num_draft_tokens > 200
    assert all(output.num_accepted == output.num_drafted > 0 for output in outputs.values())


def test_the_draft_reads_nothing_but_its_guesses(model: Transformer) -> None:
    counting = CountingModel(model)
    engine = make_engine(model, counting, share_cache=True, num_speculative_tokens=2)
    generate(engine, random_prompts(1, low=50, high=51), greedy(31))
    assert counting.num_tokens == engine.stats().num_draft_tokens == 20  # ten rounds of three tokens after the first
    own = make_engine(model, model)
    assert 2 * engine.kv_bytes_per_token == own.kv_bytes_per_token


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_pages_of_8_bits(model: Transformer, kv_cache_dtype: str) -> None:
    alone = make_engine(model, kv_cache_dtype=kv_cache_dtype)
    pair = make_engine(model, noisy_twin(model), share_cache=True, kv_cache_dtype=kv_cache_dtype)
    assert generate(pair, PROMPTS, greedy(NUM_TOKENS)) == generate(alone, PROMPTS, greedy(NUM_TOKENS))


def test_who_may_share(model: Transformer) -> None:
    def may(draft: Transformer) -> bool:
        return can_share_cache(model, draft, torch.float32, torch.device("cpu"))

    assert may(model) and may(in_four_bits(model))
    assert not may(tiny_model(seed=8)), "other keys"
    assert not may(tiny_model(seed=3, num_layers=1)) and not may(tiny_model(seed=3, num_kv_heads=1)), "other shapes"
    routed = routed_model("mlp")
    assert not can_share_cache(routed, routed, torch.float32, torch.device("cpu")), "keys of other tokens"
