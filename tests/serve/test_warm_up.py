"""Before the first client waits, everything is compiled that any client may need."""

import gc
import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from model.config import MixtureOfDepths
from serve.engine import engine as engine_module
from serve.engine.process import leave_to_stay
from serve.engine.warm_up import warm_up
from tests.serve.recorded_graphs import recorded_graphs
from tests.serve.toys import generate, greedy, greedy_oracle, make_engine, random_prompts
from tests.tiny import tiny_model
from tests.trials import covering

pytestmark = pytest.mark.eager
KINDS = 15


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_request_of_a_day_compiles_a_kernel() -> None:
    """Batches of 1 to 48, prompts up to the longest, all that sampling can be asked for, preemption, on all engines."""
    command = [sys.executable, "-m", "tests.serve.serving_day"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert len(found) == KINDS and all(num_warmed >= 18 for num_warmed, _ in found.values())
    assert {kind: late for kind, (_, late) in found.items() if late} == {}


ENGINES: list[dict[str, int]] = [
    {},
    {"max_model_len": 2},
    {"max_num_batched_tokens": 8},
    {"num_pages": 2, "max_model_len": 20},
]


@pytest.mark.parametrize(("options", "drafts"), covering(product(ENGINES, [False, True])), ids=str)
def test_it_fits_every_engine_and_leaves_no_trace(options: dict, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "graphs_on", lambda device: recorded_graphs())
    model = tiny_model(seed=3)
    engine = make_engine(model, tiny_model(seed=4, num_layers=1) if drafts else None, **options)
    warm_up(engine)
    assert engine.cache.num_used == 0 and engine.stats().prefix_cache_hits == 0
    if drafts:
        assert not engine.draft_length.target_costs.has_measured(1)
    num_tokens = min(9, engine.max_model_len - 1)
    prompts = [prompt[: engine.max_model_len - num_tokens] for prompt in random_prompts(4, seed=2, low=2, high=7)]
    assert generate(engine, prompts, greedy(num_tokens)) == [greedy_oracle(model, p, num_tokens) for p in prompts]


@pytest.mark.parametrize("early_exit", [False, True])
def test_on_a_cpu_no_draft_waits_for_a_pass_that_prepares(early_exit: bool) -> None:
    """Each length of a draft has been run and measured, and nobody's pages were written."""
    model = tiny_model(seed=3)
    options = {"draft_layers": 1} if early_exit else {}
    engine = make_engine(model, "early_exit" if early_exit else tiny_model(seed=4, num_layers=1), **options)
    for page in engine.runner.pages.tensors():
        page.fill_(7)
    draft: Any = engine.draft
    engine.runner.rehearse(range(1, 2 + engine.state.max_drafts), engine.target_timer)
    draft.rehearse()
    assert all((page == 7).all() for page in engine.runner.pages.tensors())
    costs = engine.draft_length.target_costs, engine.draft_length.draft_costs
    assert all(costs[0].has_measured(rows) for rows in range(1, 2 + engine.state.max_drafts))
    assert all(costs[1].has_measured(rows) for rows in range(1, 1 + draft.first_tokens))
    prepared = []
    engine.on_schedule = lambda: prepared.append(engine.runner.has_prepared or draft.runner.has_prepared)
    (prompt,) = random_prompts(1, seed=2, low=5, high=6)
    assert generate(engine, [prompt], greedy(20)) == [greedy_oracle(model, prompt, 20)]
    assert engine.stats().num_draft_tokens and not any(prepared[2:])  # the first two read the prompt


CACHES: list[dict[str, Any]] = [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"max_model_len": 2}]
KINDS_OF_DRAFT = ("model", "ngram", "suffix", "early_exit")
KINDS_OF_MODEL = ("llama", "mixtral", "block", "mlp")


@pytest.mark.parametrize(
    ("options", "draft", "kind"), covering(product(CACHES, KINDS_OF_DRAFT, KINDS_OF_MODEL)), ids=str
)
def test_it_fits_every_draft_on_a_cpu(options: dict, draft: str, kind: str) -> None:
    """Of dense models, experts, and such as route tokens past attention or not."""
    model: Any = tiny_model("mixtral" if kind == "mixtral" else "llama", seed=3)
    if kind in ("block", "mlp"):
        model = tiny_model(seed=3, mixture_of_depths=MixtureOfDepths(kind, (1,), 0.5, gate_range=0.5))
        draft = "suffix" if draft == "early_exit" else draft  # which refuses them
    engine = make_engine(model, tiny_model(seed=4, num_layers=1) if draft == "model" else draft, **options)
    warm_up(engine)
    assert engine.cache.num_used == 0
    assert not engine.draft_length.target_costs.has_served(1)  # drafts are compared with what serves, from now on
    (prompt,) = random_prompts(1, seed=2, low=1, high=2)
    alone = make_engine(model, **options)
    params = greedy(min(9, engine.max_model_len - 1))
    assert generate(engine, [prompt], params) == generate(alone, [prompt], params)


def test_the_collector_looks_at_nothing_that_the_engine_has_loaded() -> None:
    gc.unfreeze()
    before = len(gc.get_objects())
    engine = make_engine(tiny_model(seed=3))
    leave_to_stay()
    looked_at = len(gc.get_objects())
    generate(engine, random_prompts(4, seed=2, low=2, high=7), greedy(9))
    assert looked_at < 1_000 < 100_000 < before
