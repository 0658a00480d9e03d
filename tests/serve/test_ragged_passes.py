"""Passes over different numbers of tokens that are captured and replayed, on a stand-in for CUDA graphs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.common.cuda_graph import Graphs
from model.config import MixtureOfDepths
from serve.engine import engine as engine_module
from serve.engine.engine import Engine
from serve.engine.graph_shapes import MOST_TOKENS, captured_token_counts, captured_tokens
from serve.outputs import RequestOutput
from tests.serve.recorded_graphs import recorded_graphs
from tests.serve.toys import drain, greedy, greedy_oracle, join, make_engine, random_prompts
from tests.tiny import tiny_model

pytestmark = pytest.mark.eager


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "graphs_on", lambda device: recorded_graphs())


def graphs_of(engine: Engine) -> Graphs:
    assert engine.graphs is not None
    return engine.graphs


def num_ragged(engine: Engine) -> int:
    """Captures of passes, by their keys: an engine's part, tokens, whether they name adapters."""
    captured = graphs_of(engine)._captured
    return sum(isinstance(key, tuple) and len(key) == 3 and captured[key] is not None for key in captured)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_few_tokens_are_added(num_tokens: int, more: int) -> None:
    size = captured_tokens(num_tokens)
    assert num_tokens <= size < max(1.25 * num_tokens, num_tokens + 32)
    assert captured_tokens(size) == size <= captured_tokens(num_tokens + more)


def test_all_sizes_are_known_before_the_first_request() -> None:
    sizes = [1024, 896, 768, 640, 512, 448, 384, 320, 256, 224, 192, 160, 128, 96, 64, 32, 16]
    assert captured_token_counts(8192) == sizes and sizes[0] == MOST_TOKENS
    assert captured_token_counts(100) == [96, 64, 32, 16]
    for n in range(1, MOST_TOKENS + 1):
        assert captured_tokens(n) in sizes


def test_prompts_beside_those_who_decode_are_replayed() -> None:
    """In chunks and whole, several and one, by whoever is there: two sizes, so two captures. Some are preempted."""
    model = tiny_model(seed=3)
    prompts = random_prompts(14, seed=5, high=90)
    engine = make_engine(model, max_num_batched_tokens=32, max_model_len=128)
    outputs: dict[tuple[str, int], RequestOutput] = {}
    num_preempted = 0
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy(24))
        preempted = engine.scheduler.running[1:] if number % 5 == 4 else []
        for sequence in preempted:
            engine.scheduler.preempt(sequence)
        num_preempted += len(preempted)
        for _ in range(3):
            for output in engine.step():
                join(outputs, output)
    while engine.has_work():
        for output in engine.step():
            join(outputs, output)
    for number, prompt in enumerate(prompts):
        assert outputs[(str(number), 0)].new_token_ids == greedy_oracle(model, prompt, 24)
    assert num_ragged(engine) == 2 and num_preempted > 3
    assert graphs_of(engine)._pool["replays"] > 60


def test_longer_passes_are_launched_kernel_by_kernel() -> None:
    model, prompt = tiny_model(seed=3), random_prompts(1, seed=2, low=1040, high=1041)[0]
    options = {"max_num_batched_tokens": 1100, "num_pages": 100, "max_model_len": 1100}
    engine = make_engine(model, enable_prefix_caching=False, **options)
    for name in "abc":
        engine.add_request(name, prompt, greedy(1))
        assert drain(engine)[(name, 0)].new_token_ids == greedy_oracle(model, prompt, 1)
    assert num_ragged(engine) == 0


def test_where_attention_is_routed_no_pass_is_captured() -> None:
    mixture = MixtureOfDepths("attention", (1,), 0.5, gate_range=0.5)
    assert make_engine(tiny_model(seed=3, mixture_of_depths=mixture)).runner.captured is None


def test_prompts_are_scored_in_replayed_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = tiny_model(seed=3), random_prompts(6, seed=4, low=3)

    def scored() -> list[RequestOutput]:
        engine, found = make_engine(model, max_num_batched_tokens=32), []
        for prompt in prompts * 2:
            engine.add_request("r", prompt, greedy(3, prompt_logprobs=2))
            found.append(drain(engine)[("r", 0)])
        assert engine.graphs is None or num_ragged(engine) == 2
        return found

    replayed = scored()
    monkeypatch.setattr(engine_module, "graphs_on", lambda device: None)
    for one, other in zip(replayed, scored(), strict=True):
        assert one.new_token_ids == other.new_token_ids
        torch.testing.assert_close(logprobs_of(one), logprobs_of(other))


def logprobs_of(output: RequestOutput) -> torch.Tensor:
    """Of the prompt's tokens and of the likeliest in their places."""
    places = [place for place in output.prompt_logprobs or () if place is not None]
    return torch.tensor([[place.logprob, *(logprob for _, logprob in place.top)] for place in places])
