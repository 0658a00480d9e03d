"""Drafts of several paths, verified in one pass: output stays, pages come back, and only what pays is tried."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.transformer import Transformer
from serve.engine import sampling
from serve.engine.drafts.model import ModelDraft
from serve.engine.drafts.tree import DraftTree, OtherWay, Wanted
from serve.engine.engine import Engine
from serve.engine.kv_cache import PAGE_SIZE, BlockTable, KVCache
from serve.engine.sampling import follow
from serve.sampling_params import SamplingParams
from tests.serve.test_draft_length import trained
from tests.serve.test_speculation import FIRST, NUM_SEQUENCES, exact_joint, noisy_twin, p_value, tables
from tests.serve.toys import TableModel, drain, generate, greedy, greedy_oracle, make_engine, random_prompts
from tests.tiny import tiny_model

NUM_TOKENS = 40
PROMPTS = random_prompts(5, seed=1, low=3, high=40)
Paths = Callable[[list[int]], list[list[int]]]
"""What follows some tokens, in several ways."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(seed=3)


@pytest.fixture(scope="module")
def expected(model: Transformer) -> list[list[int]]:
    return [greedy_oracle(model, prompt, NUM_TOKENS + 8) for prompt in PROMPTS]


def tree_engine(monkeypatch: pytest.MonkeyPatch, target: Any, draft: Any, paths: Paths, **options: Any) -> Engine:
    """`draft` guesses the first path, of `num_speculative_tokens` tokens."""
    engine = make_engine(target, draft, **options)
    assert isinstance(engine.draft, ModelDraft)
    propose = engine.draft.propose

    def with_paths(wanted: list[Wanted]) -> dict[int, DraftTree]:
        tokens = {one.sequence.id: one.sequence.tokens for one in wanted}
        return {
            id: replace(tree, others=tuple(OtherWay(tuple(path), 0.5, 0.5) for path in paths(tokens[id])))
            for id, tree in propose(wanted).items()
        }

    monkeypatch.setattr(engine.draft, "propose", with_paths)
    return engine


def test_the_targets_own_token_goes_on_along_a_path() -> None:
    """Token by token, as it is said."""
    drawn = random.Random(1)
    for _ in range(300):
        n, k = drawn.randrange(1, 5), drawn.randrange(0, 4)
        m = drawn.randrange(k + 1)
        emitted, path, target = ([drawn.randrange(2) for _ in range(size)] for size in (m + 1, n, n))
        followed = list(emitted)
        if goes_on := path[: m + 1] == emitted:
            while len(followed) <= n and followed == path[: len(followed)]:
                followed.append(target[len(followed) - 1])
        tokens, accepted, found = follow(
            torch.tensor([emitted + [-1] * (k - m)]), torch.tensor([m]), torch.tensor([path]), torch.tensor([target])
        )
        assert found.item() == goes_on
        assert tokens[0].tolist()[: len(followed)] == followed and accepted.item() == len(followed) - 1
        assert set(tokens[0].tolist()[len(followed) :]) <= {-1}


@pytest.mark.parametrize("draft", ["stranger", "twin"])
def test_a_right_path_beside_a_wrong_one_is_taken(
    model: Transformer, expected: list[list[int]], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of the path that was taken are those of the sequence, over many borders of pages."""
    known = {tuple(prompt): prompt + said for prompt, said in zip(PROMPTS, expected, strict=True)}

    def paths(tokens: list[int]) -> list[list[int]]:
        """Four right ones, behind a path that parts from them after two."""
        whole = next(said for prompt, said in known.items() if tuple(tokens[: len(prompt)]) == prompt)
        right = whole[len(tokens) :][:4]
        return [[*right[:2], (right[2] + 1) % 500, 3], right] if len(right) == 4 else []

    source = tiny_model(seed=8, num_layers=1) if draft == "stranger" else noisy_twin(model)
    engine = tree_engine(
        monkeypatch, model, source, paths, num_speculative_tokens=4, max_num_batched_tokens=96, max_num_seqs=5
    )
    assert generate(engine, PROMPTS, greedy(NUM_TOKENS)) == [said[:NUM_TOKENS] for said in expected]
    assert engine.stats().num_steps <= NUM_TOKENS / 4
    again = make_engine(model, source, num_speculative_tokens=4)
    generate(again, PROMPTS, greedy(NUM_TOKENS))
    assert again.stats().num_steps > NUM_TOKENS / 4


def junk(tokens: list[int]) -> list[list[int]]:
    """Paths that are right now and then, since a tiny model says few tokens."""
    drawn = random.Random(len(tokens))
    return [[drawn.choice(tokens) for _ in range(1 + drawn.randrange(3))] for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"num_pages": 10, "max_model_len": None, "max_num_batched_tokens": 24}])
def test_seeded_and_penalised_requests_say_what_they_say_alone(
    model: Transformer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where pages or rows run out; pages that were lent to paths are all given back (`drain`)."""
    prompts = [prompt[:8] * 3 for prompt in random_prompts(8, seed=4, low=8)]
    common: dict[str, Any] = {"max_tokens": 24, "logit_bias": {5: 4.0, 6: 4.0}}
    params = [
        SamplingParams(seed=n, temperature=0.3 * (n % 3), repetition_penalty=1 + n % 2 / 5, **common) for n in range(8)
    ]
    plain = generate(make_engine(model), prompts, params)
    engine = tree_engine(monkeypatch, model, noisy_twin(model), junk, num_speculative_tokens=3, **options)
    assert generate(engine, prompts, params) == plain
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0 and stats.num_draft_tokens > 0


TREE = [[1], [2, 1], [2, 3, 0], [3, 2]]
"""Paths behind any token; some begin alike, and the model's own may begin like them too."""


def tree_counts(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter, Engine]:
    tables_of = tables()
    options = {"max_num_seqs": 50, "max_num_batched_tokens": 1000, "num_pages": 400, "max_model_len": 16}
    engine = tree_engine(
        monkeypatch, TableModel(tables_of["target"]), TableModel(tables_of["partial"]), lambda tokens: TREE,
        num_speculative_tokens=3, **options,
    )  # fmt: skip
    for number in range(NUM_SEQUENCES // 50):
        engine.add_request(str(number), [FIRST], SamplingParams(max_tokens=3, n=50, ignore_eos=True))
    return Counter(tuple(output.new_token_ids) for output in drain(engine).values()), engine


def test_sampled_tokens_of_a_tree_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, engine = tree_counts(monkeypatch)
    assert p_value(counts, exact_joint(1.0, 0, 3)) > 1e-4
    assert engine.stats().num_accepted_tokens > NUM_SEQUENCES


@pytest.mark.eager
def test_the_test_notices_a_path_that_is_taken_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting another path by p itself, after the first one was rejected: a second chance that p does not have."""
    right = sampling.follow

    def wrong(tokens: torch.Tensor, accepted: torch.Tensor, path: torch.Tensor, drawn: torch.Tensor) -> tuple:
        second = tokens.clone()
        again = (accepted == 0) & (torch.rand(len(path)) < 0.5)
        second[:, 0] = torch.where(again, path[:, 0], tokens[:, 0])
        return right(second, accepted, path, drawn)

    monkeypatch.setattr(sampling, "follow", wrong)
    assert p_value(tree_counts(monkeypatch)[0], exact_joint(1.0, 0, 3)) < 1e-6


def test_pages_of_a_branch_are_adopted_or_dropped() -> None:
    cache = KVCache(12)
    table = BlockTable(12)
    cache.admit(table, list(range(PAGE_SIZE + 3)))
    before = cache.num_used
    taken, copies = cache.branch(table, PAGE_SIZE + 2, 3 * PAGE_SIZE + 1) or pytest.fail("no pages")
    other, none = cache.branch(table, PAGE_SIZE, PAGE_SIZE + 4) or pytest.fail("no pages")
    assert copies == ((table.ids[1], taken.table.ids[1]),) and none == ()
    assert taken.table.ids[0] == other.table.ids[0] == table.ids[0]
    pages = taken.table.ids[:4].tolist()
    cache.adopt(table, taken)
    cache.drop_branches()
    assert table.ids[: table.num_pages].tolist() == pages and cache.num_used == before + 2
    assert cache.branch(table, 0, 12 * PAGE_SIZE) is None
    cache.free(table)
    assert cache.num_used == 0


@pytest.mark.parametrize(("row_s", "tried"), [(0.0, 4), (0.02, 4), (1.0, 0)])
def test_another_path_is_verified_where_that_pays(row_s: float, tried: int) -> None:
    """Where rows are free, or cost less than the path should bring, and not where they are dear."""
    adaptive = trained(0.5, draft_s=0.01, row_s=row_s)
    assert adaptive.tokens_of(OtherWay((1, 2, 3, 4), taken=0.4, acceptance=0.9), 1) == tried
    assert adaptive.tokens_of(OtherWay((1, 2, 3, 4), taken=0.001, acceptance=0.1), 1) == (4 if row_s == 0.0 else 0)
