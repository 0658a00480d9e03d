"""Mixture of depths in the engine: chunks, decoding, speculation, shared prefixes and preemption change nothing."""

from typing import Any

import pytest
import torch

from kernels.attention.visible_slots import SlotPlan, VisibleSlots, list_visible_slots
from model import attention as attention_module
from model.config import MixtureOfDepths
from model.kv_format import choose_kv_format
from model.transformer import Transformer
from serve.engine.kv_cache import PAGE_SIZE
from serve.engine.runner import Runner
from serve.sampling_params import SamplingParams
from tests.serve.test_feature_pairs import essence, random_requests, scores
from tests.serve.toys import drain, generate, greedy, greedy_oracle, make_engine, random_prompts
from tests.tiny import full_logits, tiny_model

# A CPU's kernels take as many rows as tokens are selected; test_graphs.py has a GPU's form, through the interpreter.
pytestmark = pytest.mark.eager
ROUTES = ("attention", "mlp", "block")
PROMPTS = random_prompts(8, seed=1)
NUM_TOKENS = 20


def routed_model(route: str, *, seed: int = 3, noise: float = 0.0, **sizes: int) -> Transformer:
    """Its random routers let about half of the tokens pass."""
    mixture = MixtureOfDepths(route, (1, 2), 0.5, gate_range=0.5)  # type: ignore[arg-type]
    model = tiny_model(seed=seed, num_layers=4, mixture_of_depths=mixture, **sizes)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module", params=ROUTES)
def model(request: pytest.FixtureRequest) -> Transformer:
    return routed_model(request.param)


@pytest.fixture(scope="module")
def expected(model: Transformer) -> list[list[int]]:
    return [greedy_oracle(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.covering
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 2048, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_greedy_output_is_that_of_full_passes(model: Transformer, expected: list[list[int]], options: dict) -> None:
    assert generate(make_engine(model, **options), PROMPTS, greedy(NUM_TOKENS)) == expected


def test_the_fused_form_too(model: Transformer, expected: list[list[int]]) -> None:
    fused = routed_model(model.config.mixture_of_depths.route).fuse()
    assert generate(make_engine(fused), PROMPTS, greedy(NUM_TOKENS)) == expected


@pytest.mark.covering
@pytest.mark.parametrize("draft", ["equal", "twin", "dense", "ngram"])
def test_a_routed_target_verifies(model: Transformer, expected: list[list[int]], draft: str) -> None:
    route = model.config.mixture_of_depths.route
    drafts = {"equal": model, "twin": routed_model(route, noise=0.02), "dense": tiny_model(seed=8), "ngram": "ngram"}
    engine = make_engine(model, drafts[draft], num_speculative_tokens=3)
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == expected
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    if draft == "equal":  # also says that the draft's own roll-back and catching up are exact
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens
    if draft == "twin":
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_routed_student_drafts_for_a_dense_target(model: Transformer) -> None:
    target = tiny_model(seed=3, num_layers=4)
    expected = [greedy_oracle(target, prompt, NUM_TOKENS) for prompt in PROMPTS[:4]]
    engine = make_engine(target, model, num_speculative_tokens=2)
    assert generate(engine, PROMPTS[:4], greedy(NUM_TOKENS)) == expected
    assert engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize(
    ("model", "draft_too"), [("attention", False), ("attention", True), ("block", True)], indirect=["model"]
)
def test_running_out_of_pages_changes_nothing(model: Transformer, draft_too: bool) -> None:
    prompts = random_prompts(8, seed=4, high=14)
    expected = generate(make_engine(model), prompts, greedy(34))
    options: dict[str, Any] = {"num_pages": 6, "max_model_len": None, "max_num_batched_tokens": 24}
    draft = routed_model(model.config.mixture_of_depths.route, noise=0.02) if draft_too else None
    engine = make_engine(model, draft, num_speculative_tokens=3 if draft else None, **options)
    assert generate(engine, prompts, greedy(34)) == expected
    assert engine.stats().num_preemptions >= 2


def test_a_cached_prefix_changes_nothing(model: Transformer) -> None:
    shared = random_prompts(1, low=60, high=61)[0]
    prompts = [shared + tail for tail in random_prompts(4, seed=2, low=1, high=20)]
    engine = make_engine(model)
    generate(engine, [shared], greedy(1))
    assert generate(engine, prompts, greedy(8)) == [greedy_oracle(model, prompt, 8) for prompt in prompts]
    assert engine.stats().prefix_cache_hits >= 4 * 48


def test_prompts_score_as_in_a_full_pass(model: Transformer) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    engine = make_engine(model, max_num_seqs=4, max_num_batched_tokens=7)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    outputs = drain(engine)
    for number, prompt in enumerate(PROMPTS):
        expected = torch.log_softmax(full_logits(model, prompt), dim=-1)
        for position, entry in enumerate(outputs[(str(number), 0)].prompt_logprobs):
            if entry is not None:
                assert entry.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)


def test_requests_do_not_notice_each_other(model: Transformer) -> None:
    """Forks that copy pages, shared prefixes, penalties, stops and preemption, all at once, with a draft."""
    requests = random_requests(2)[:7]
    alone = {}
    for number, (prompt, params) in enumerate(requests):
        engine = make_engine(model, max_num_batched_tokens=256, enable_prefix_caching=False)
        engine.add_request(str(number), prompt, params)
        alone |= drain(engine)
    draft = routed_model(model.config.mixture_of_depths.route, noise=0.02)
    for options in ({}, {"draft": draft, "num_speculative_tokens": 3}):
        engine = make_engine(model, **options, num_pages=14, max_model_len=110, max_num_batched_tokens=33)
        for number, (prompt, params) in enumerate(requests):
            engine.add_request(str(number), prompt, params)
        together = drain(engine)
        assert together.keys() == alone.keys()
        for key, output in together.items():
            assert essence(output) == essence(alone[key])
            assert scores(output) == pytest.approx(scores(alone[key]), abs=1e-3)


def watch_lists(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """Has each call of `list_visible_slots` compared with a walk through the history.

    Returns how many slots each has touched, and lists with what they should have been: the engine lives with errors.
    """
    touched: list[int] = []
    wrong: list[tuple[list[int], list[int]]] = []

    def checked(visible: VisibleSlots, before: torch.Tensor, plan: SlotPlan) -> torch.Tensor:
        found = list_visible_slots(visible, before, plan)
        touched.append(len(plan.positions.past) + len(plan.positions.written))
        for table, length, number, row in zip(
            plan.block_tables, plan.kv_lengths.tolist(), found.tolist(), plan.rows.tolist(), strict=True
        ):
            slots = (table[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[:length]
            counts = visible.counts[slots]
            pairs = [(visible.lists[row, :number].tolist(), slots[counts > 0].tolist())]
            pairs.append((counts.abs().tolist(), (counts > 0).cumsum(0).tolist()))
            wrong.extend((ours, walked) for ours, walked in pairs if ours != walked)
        return found

    monkeypatch.setattr(attention_module, "list_visible_slots", checked)
    return touched, wrong


@pytest.mark.parametrize("draft", [False, True])
def test_lists_are_those_that_a_walk_through_the_history_finds(draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through forks, shared prefixes, rejected drafts, preemption, rows and pages that others have had, new weights."""
    touched, wrong = watch_lists(monkeypatch)
    model, options = routed_model("attention"), {"num_pages": 14, "max_model_len": 110, "max_num_batched_tokens": 33}
    drafter = {"draft": routed_model("attention", noise=0.02), "num_speculative_tokens": 3} if draft else {}
    engine = make_engine(model, **drafter, **options)
    for number, (prompt, params) in enumerate(random_requests(3)):
        engine.add_request(str(number), prompt, params)
    for _ in range(30):
        engine.step()
    engine.update_weights(dict(routed_model("attention", noise=0.01).named_parameters()))
    drain(engine)
    stats = engine.stats()
    assert wrong == [] and len(touched) > 60 and stats.num_preemptions and stats.prefix_cache_hits


def test_a_decoding_step_touches_as_many_slots_as_it_computes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the context is."""
    touched, _ = watch_lists(monkeypatch)
    engine = make_engine(routed_model("attention"), max_num_batched_tokens=512)
    for prompt in random_prompts(3, low=10, high=190):
        touched.clear()
        generate(engine, [prompt], greedy(NUM_TOKENS))
        assert touched == [len(prompt)] * 2 + [1] * 2 * (NUM_TOKENS - 1)


def make_runner(route: str) -> Runner:
    model = routed_model(route)
    pages = choose_kv_format("auto", torch.float32).allocate(model.config, 4, PAGE_SIZE, torch.device("cpu"))
    return Runner(model, pages, feed=torch.zeros(1, 1, dtype=torch.int64))


def test_copies_of_pages_take_along_who_is_there() -> None:
    runner = make_runner("block")
    visible = runner.pages.visible
    visible[1].counts[:PAGE_SIZE] = torch.arange(PAGE_SIZE) - 4
    runner.copy_pages(((0, 3),))
    assert torch.equal(visible[1].counts[3 * PAGE_SIZE : 4 * PAGE_SIZE], visible[1].counts[:PAGE_SIZE])
    assert not visible[1].counts[PAGE_SIZE : 3 * PAGE_SIZE].any() and not visible[2].counts.any()
    assert visible.keys() == {1, 2} and not make_runner("mlp").pages.visible
