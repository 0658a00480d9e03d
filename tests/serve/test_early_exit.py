"""The target's first layers as its draft: the target says what it would say alone, and nothing is kept twice."""

from typing import Any

import pytest
import torch

from model.config import MixtureOfDepths
from model.transformer import Transformer
from serve.config import EngineConfig
from serve.engine.drafts.early_exit import EarlyExitDraft, choose_num_layers
from serve.engine.engine import Engine
from serve.engine.loading import load_models
from serve.sampling_params import SamplingParams
from tests.serve.http_server import save_tiny_folder
from tests.serve.test_options import parsed
from tests.serve.toys import drain, generate, greedy, greedy_oracle, make_engine, random_prompts
from tests.tiny import tiny_model

PROMPTS = random_prompts(6, seed=1)
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3, num_layers=3)


def idle_behind(num_layers: int, *, seed: int = 3, depth: int = 3) -> Transformer:
    """A model whose layers from this one on add nothing: to exit before them is always right."""
    model = tiny_model(seed=seed, num_layers=depth, head_dim=64)  # of heads that C attends to: passes are captured
    with torch.no_grad():
        for layer in list(model.model.layers)[num_layers:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize(("num_layers", "num_drafts"), [(1, 3), (2, 1), (None, None)])
def test_output_is_the_targets(model: Transformer, num_layers: int | None, num_drafts: int | None) -> None:
    engine = make_engine(model, "early_exit", draft_layers=num_layers, num_speculative_tokens=num_drafts)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == [greedy_oracle(model, p, NUM_TOKENS) for p in PROMPTS]
    assert engine.stats().num_draft_tokens > 0
    longer = [[*prompt, *greedy_oracle(model, prompt, NUM_TOKENS)] for prompt in PROMPTS]
    assert generate(engine, longer, greedy(8)) == [greedy_oracle(model, prompt, 8) for prompt in longer]
    assert engine.stats().prefix_cache_hits > 0
    params = [SamplingParams(seed=number, max_tokens=NUM_TOKENS) for number in range(len(PROMPTS))]
    assert generate(engine, PROMPTS, params) == generate(make_engine(model), PROMPTS, params)
    assert engine.kv_bytes_per_token == make_engine(model).kv_bytes_per_token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_exit_before_idle_layers_is_always_right(temperature: float) -> None:
    """Were it fed at a wrong position, or from pages of others, or with weights of before, it would be wrong."""
    engine = make_engine(
        idle_behind(1), "early_exit", draft_layers=1, num_speculative_tokens=4, num_pages=12, max_model_len=None
    )

    def are_all_accepted() -> bool:
        for number, prompt in enumerate(random_prompts(6, seed=4, high=40)):
            params = SamplingParams(temperature=temperature, max_tokens=21, ignore_eos=True, n=1 + number % 2)
            engine.add_request(str(number), prompt, params)
        return all(output.num_accepted == output.num_drafted > 0 for output in drain(engine).values())

    assert are_all_accepted() and engine.stats().num_preemptions > 0
    engine.update_weights(dict(idle_behind(1, seed=8).named_parameters()))
    assert are_all_accepted()


def test_it_exits_where_the_rest_changes_nothing() -> None:
    assert choose_num_layers(idle_behind(3, depth=8)) == 3
    assert choose_num_layers(tiny_model(num_layers=2)) == 1
    draft = make_engine(idle_behind(1).fuse(), "early_exit").draft
    assert isinstance(draft, EarlyExitDraft) and draft.num_layers == 1


@pytest.mark.parametrize(
    ("changes", "num_layers", "message"),
    [
        ({}, 3, "num_layers from 1 to 2, not 3: the model has 3"),
        ({"num_layers": 1}, None, "the model has 1"),
        ({"mixture_of_depths": MixtureOfDepths("block", (1,), 0.5)}, 1, "routers"),
    ],
)
def test_what_cannot_exit_is_refused(changes: dict[str, Any], num_layers: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(tiny_model(**{"num_layers": 3} | changes), "early_exit", draft_layers=num_layers)


def test_it_is_asked_for_by_name(tmp_path: Any) -> None:
    folder = str(save_tiny_folder(tmp_path / "model"))
    asked = parsed(folder, "--speculative-config", '{"method": "early_exit", "num_layers": 1}').engine
    assert (asked.draft, asked.draft_layers) == ("early_exit", 1)
    config = EngineConfig(folder, "early_exit", draft_layers=1, dtype="float32", num_pages=32)
    assert len(generate(Engine(config, load_models(config)), [[5, 6, 7]], greedy(8))[0]) == 8
    with pytest.raises(ValueError, match="draft_layers is for drafts of the target's own layers, not for ngram"):
        load_models(EngineConfig(folder, "ngram", draft_layers=1))
    with pytest.raises(ValueError, match="draft model cannot be used beside the draft early_exit"):
        load_models(EngineConfig(folder, "early_exit", folder))
