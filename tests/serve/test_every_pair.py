"""Every pair of the engine's features: what a busy engine says with both is what a plain one says to a request alone.

A row is an engine; which features it has is a pairwise design over all of them (pairs.py), of which a run of the tests
takes as many rows as have every feature, and `--all-trials` all. On each, requests of all
kinds (a pairwise design too) run at once; labels of some are stored, and a draft whose weights can be replaced is given
others meanwhile. A plain engine has the same weights, cache format, routers and adapters, since those decide what is
said, and nothing else: no draft, no shared prefixes, whole prompts, pages enough, nothing stored.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.quantize.round_to_nearest import quantize_model
from model.config import MixtureOfDepths
from model.files.adapter import load_adapters
from model.files.label_shards import label_shards
from model.files.labels import read_labels
from model.formats.registry import format_named
from model.lora import LoraConfig
from model.transformer import Transformer
from serve.config import DRAFT_MODEL, DRAFTS
from serve.engine.drafts.base import draft_kind
from serve.engine.engine import Engine
from serve.engine.kv_cache import BlockTable
from serve.grammar import json_grammar
from serve.http.tools.answer import Answer, message_of
from serve.http.tools.forced import calls_grammar
from serve.http.tools.llama3 import Llama3Parser
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from tests.model.test_fused_adapters import save_adapters
from tests.serve.pairs import Row, pairs_of, pairwise
from tests.serve.test_speculation import noisy_twin, p_value
from tests.serve.toys import drain, make_engine, random_prompts, toy_tokenizer
from tests.tiny import tiny_model
from tests.trials import covering

SHARED, OWN_LAYERS = "shared cache", "early_exit"
BESIDE = "+model"


def draft_names() -> list[str]:
    """All ways to draft: each kind, those that may have a model also with one, and a model on the target's pages."""
    uses = {name: kind.model_use for name in DRAFTS if (kind := draft_kind(name)) is not None}
    return [*uses, *(name + BESIDE for name, use in uses.items() if use == "optional"), SHARED]


ENGINES: dict[str, tuple[Any, ...]] = {
    "draft": (None, *draft_names()),
    "weights": ("none", "int4", "nf4"),
    "kv": ("auto", "int8", "fp8"),
    "route": (None, "block", "mlp"),
    "adapters": (False, True),
    "prefixes": (False, True),
    "chunks": (False, True),
    "preempts": (False, True),
    "overlapped": (False, True),
}
REQUESTS: dict[str, tuple[Any, ...]] = {
    "output": ("text", "json", "tool call"),
    "n": (1, 3),
    "seed": (None, 11),
    "adapted": (False, True),
    "stored": (False, True),
}
"""No seed: greedy."""
PREFIX, *TAILS = random_prompts(12, seed=5, low=33, high=34)
ANSWER = {"type": "array", "items": {"enum": [True, None, "ab"]}, "minItems": 2, "maxItems": 4}
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"enum": [1, 23]}},
    "required": ["x"],
    "additionalProperties": False,
}
GRAMMARS = {
    "text": None,
    "json": json_grammar(ANSWER, whitespace=None),
    "tool call": calls_grammar(Llama3Parser.form, [("f", PARAMETERS)], {}, several=False),
}
NO_SPACE = dict.fromkeys(toy_tokenizer().encode("\t\n\r "), -100.0)
"""JSON may hold much of it, and random models write it."""
TOP_K, RUN = 4, 2
"""Sampled without a seed: runs of two tokens, each of the four most likely."""
SWAP_STEP = 10
NUM_FAST = 6


def can_be(row: Row) -> bool:
    """A draft of a routed target has pages of its own (test_shared_cache.py, test_early_exit.py)."""
    return not (row["draft"] in (SHARED, OWN_LAYERS) and row["route"])


ROWS = pairwise(ENGINES, can_be)
TRIED = covering(ROWS, dict.items)
REQUEST_ROWS = pairwise(REQUESTS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    configs = (LoraConfig(rank=4, alpha=8), LoraConfig(rank=2, dora=True, targets=("q_proj", "down_proj")))
    paths = save_adapters(tmp_path_factory.mktemp("adapters"), dense(None), configs)
    return dict(zip(("a", "b"), map(str, paths), strict=True))


def dense(route: str | None) -> Transformer:
    mixture = route and MixtureOfDepths(route, (1,), 0.5, gate_range=0.5)
    return tiny_model(seed=3, mixture_of_depths=mixture or None)


def target_of(row: Row, folders: dict[str, str]) -> Transformer:
    model, form = dense(row["route"]), format_named(row["weights"])
    model = model if form is None else quantize_model(model, form)
    return model.fuse(load_adapters(model, list(folders.values()) if row["adapters"] else []))


def engine_of(row: Row, folders: dict[str, str], labels: Path | None = None) -> Engine:
    draft, beside = row["draft"], (row["draft"] or "").endswith(BESIDE)
    twin = noisy_twin(dense(row["route"]))
    name = twin if draft in (DRAFT_MODEL, SHARED) else draft and draft.removesuffix(BESIDE)
    engine = make_engine(
        target_of(row, folders),
        name,
        twin if beside else None,
        share_cache=draft == SHARED,
        num_speculative_tokens=3 if draft else None,
        kv_cache_dtype=row["kv"],
        adapters=folders if row["adapters"] else {},
        enable_prefix_caching=row["prefixes"],
        max_num_batched_tokens=20 if row["chunks"] else 512,
        num_pages=13 if row["preempts"] else 300,
        max_model_len=120,
        label_folder=labels and str(labels),
    )
    engine.max_pending = int(row["overlapped"])
    return engine


def plain_engine(row: Row, folders: dict[str, str]) -> Engine:
    plain = {"draft": None, "prefixes": False, "chunks": False, "preempts": False, "overlapped": False}
    return engine_of({**row, **plain}, folders)


def requests_of(row: Row) -> Iterator[tuple[list[int], SamplingParams, str | None]]:
    for number, (tail, wanted) in enumerate(zip(TAILS, REQUEST_ROWS, strict=False)):
        grammar = GRAMMARS[wanted["output"]]
        params = SamplingParams(
            temperature=0.0 if wanted["seed"] is None else 0.9,
            seed=wanted["seed"],
            n=wanted["n"],
            max_tokens=20 if grammar is None else 40,
            logit_bias={} if grammar is None else NO_SPACE,
            ignore_eos=grammar is None,
            grammar=grammar,
            store=wanted["stored"],
        )
        yield PREFIX + tail[:13], params, "ab"[number % 2] if row["adapters"] and wanted["adapted"] else None


def essence(output: RequestOutput) -> tuple[Any, ...]:
    return (output.new_token_ids, output.new_text, output.finish_reason)


def answers_alone(row: Row, folders: dict[str, str]) -> dict[tuple[str, int], tuple[Any, ...]]:
    engine, alone = plain_engine(row, folders), {}
    for number, (prompt, params, adapter) in enumerate(requests_of(row)):
        engine.add_request(str(number), prompt, params, adapter=adapter)
        alone |= drain(engine)
    return {key: essence(output) for key, output in alone.items()}


class Swap:
    """In the place of a watch of the draft: gives it other weights once, where it can take some."""

    def __init__(self, engine: Engine, row: Row) -> None:
        draft, self.engine, self.steps = engine.draft, engine, 0
        self.weights: dict[str, torch.Tensor] | None = None
        if draft is not None and draft.replaceable is not None:
            self.weights = dict(noisy_twin(dense(row["route"]), 0.02).named_parameters())

    def between_steps(self) -> None:
        self.steps += 1
        if self.steps == SWAP_STEP and self.weights is not None:
            self.engine.update_draft_weights(self.weights)

    def counts(self) -> dict[str, int]:
        return {"num_draft_swaps": int(self.steps >= SWAP_STEP)}


def answers_together(engine: Engine, row: Row) -> dict[tuple[str, int], tuple[Any, ...]]:
    for number, (prompt, params, adapter) in enumerate(requests_of(row)):
        engine.add_request(str(number), prompt, params, adapter=adapter)
    return {key: essence(output) for key, output in drain(engine).items()}


def check_tool_calls(row: Row, answers: dict[tuple[str, int], tuple[Any, ...]]) -> None:
    """Each is read as one whole call of `f`."""
    kinds = [wanted["output"] for wanted, _ in zip(REQUEST_ROWS, TAILS, strict=False)]
    for (number, _), (_, text, finish_reason) in answers.items():
        if kinds[int(number)] == "tool call":
            message = message_of(Answer(None, Llama3Parser({"f": ["x"]})).deltas(text, ended=True))
            (call,) = message.tool_calls
            assert finish_reason == "stop" and message.content is None
            assert call.function.name == "f" and json.loads(call.function.arguments)["x"] in (1, 23)


def exact_runs(engine: Engine, prompt: list[int], adapter: str | None) -> Counter[tuple[int, ...]]:
    """Probabilities of all runs, from log-probabilities that a plain engine reports, position by position."""
    runs: dict[tuple[int, ...], float] = {(): 1.0}
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=TOP_K)
    for _ in range(RUN):
        for run in runs:
            engine.add_request(repr(run), prompt + list(run), params, adapter=adapter)
        outputs, longer = drain(engine), {}
        for run, probability in runs.items():
            (entry,) = outputs[repr(run), 0].logprobs
            likely = {token: exp(logprob) for token, logprob in entry.top}
            longer |= {(*run, token): probability * own / sum(likely.values()) for token, own in likely.items()}
        runs = longer
    return Counter(runs)  # 0 for all others


def sampled_runs(engine: Engine, prompt: list[int], adapter: str | None) -> Counter[tuple[int, ...]]:
    params = SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=RUN, ignore_eos=True, n=8, store=True)
    for number in range(20):
        engine.add_request(f"sampled {number}", prompt, params, adapter=adapter)
    return Counter(tuple(output.new_token_ids) for output in drain(engine).values())


def check_idle(engine: Engine) -> None:
    """Pages, batch rows and requests are where they were before the first request."""
    stats = engine.stats()
    assert (stats.num_pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert engine.cache.pool.num_free == engine.num_pages and not any(engine.cache.pool.holders)
    assert sorted(engine.scheduler._free_batch_rows) == list(range(engine.config.max_num_seqs))
    assert not engine.requests._sequences and not engine.requests._requests and not engine.requests.have_masks
    assert (stats.num_dropped_labels, stats.draft_on_trial) == (0, 0)


def check_labels(labels: Path, row: Row, answers: dict[tuple[str, int], tuple[Any, ...]], num_sampled: int) -> None:
    """Stored is what was said by those who agree, without an adapter, and not a token of anybody else."""
    agreed = [
        prompt + answers[str(number), choice][0]
        for number, (prompt, params, adapter) in enumerate(requests_of(row))
        for choice in range(params.n)
        if params.store and adapter is None
    ]
    stored = [document.tokens.tolist() for shard in label_shards(labels) for document in read_labels(shard)]
    sampled = [tokens for tokens in stored if len(tokens) == len(PREFIX) + RUN]
    assert len(sampled) == num_sampled and all(tokens[:-RUN] == PREFIX for tokens in sampled)
    assert sorted(tokens for tokens in stored if len(tokens) != len(PREFIX) + RUN) == sorted(agreed)


def check_features(engine: Engine, row: Row) -> None:
    """Everything that the row promises has happened, or equal answers would say nothing."""
    stats = engine.stats()
    assert (stats.prefix_cache_hits > 0) == row["prefixes"]
    assert (stats.num_preemptions > 0) == row["preempts"]
    assert (stats.num_accepted_tokens > 0) == (row["draft"] is not None)
    assert stats.num_draft_tokens > stats.num_accepted_tokens or row["draft"] is None


def check_row(row: Row, folders: dict[str, str], labels: Path) -> None:
    engine, alone = engine_of(row, folders, labels), answers_alone(row, folders)
    swap: Any = Swap(engine, row)
    engine.draft_watch = swap
    assert answers_together(engine, row) == alone
    check_tool_calls(row, alone)
    check_idle(engine)
    adapter = "a" if row["adapters"] else None
    counts = sampled_runs(engine, PREFIX, adapter)
    assert p_value(counts, exact_runs(plain_engine(row, folders), PREFIX, adapter)) > 1e-4
    check_idle(engine)
    check_features(engine, row)
    assert swap.steps > SWAP_STEP
    engine.close()
    check_labels(labels, row, alone, 0 if row["adapters"] else counts.total())


def marked(number: int, row: Row) -> Any:
    """The first rows have most of the pairs; with routed layers steps are not captured (test_routed.py)."""
    is_late = number >= NUM_FAST
    marks = [pytest.mark.slow] * is_late + [pytest.mark.eager] * (is_late or row["route"] is not None)
    return pytest.param(row, marks=marks, id="-".join(map(str, row.values())))


@pytest.mark.parametrize("row", [marked(number, row) for number, row in enumerate(TRIED)])
def test_both_change_nothing(row: Row, folders: dict[str, str], tmp_path: Path) -> None:
    check_row(row, folders, tmp_path / "labels")


def wanted_pairs(factors: dict[str, tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    return {
        (one, value, other, second)
        for one, other in combinations(factors, 2)
        for value, second in product(factors[one], factors[other])
    }


def test_every_pair_occurs() -> None:
    seen = {pair for row in ROWS for pair in pairs_of(row)}
    refused = product((SHARED, OWN_LAYERS), filter(None, ENGINES["route"]))
    assert wanted_pairs(ENGINES) - seen == {("draft", draft, "route", route) for draft, route in refused}
    assert (
        sum(len(set(pairs_of(row))) for row in REQUEST_ROWS)
        >= len({pair for row in REQUEST_ROWS for pair in pairs_of(row)})
        == sum(len(REQUESTS[one]) * len(REQUESTS[other]) for one, other in combinations(REQUESTS, 2))
    )
    assert len(REQUEST_ROWS) <= len(TAILS), "every kind of request is made on every engine"


def test_a_fast_row_has_five_at_once() -> None:
    """A grammar through an adapter, several choices, keys and values in 8 bits, and routed layers."""
    assert any(row["adapters"] and row["kv"] != "auto" and row["route"] for row in TRIED[:NUM_FAST])
    assert any(wanted["output"] != "text" and wanted["n"] > 1 and wanted["adapted"] for wanted in REQUEST_ROWS)


def row_with(**wanted: Any) -> Row:
    return next(row for row in ROWS if wanted.items() <= row.items())


MISTAKES: dict[str, tuple[Row, str, Any]] = {
    "adapters share prefixes": (
        row_with(adapters=True, prefixes=True),
        "serve.engine.requests.BlockTable",
        lambda max_pages, salt: BlockTable(max_pages),
    ),
    "choices write into each other's pages": (
        row_with(draft=None, route="block"),
        "serve.engine.runner.Runner.copy_pages",
        lambda runner, copies: None,
    ),
    "whatever is drafted is said": (
        row_with(draft=DRAFT_MODEL, weights="nf4"),
        "kernels.sampling.verification._Left.accepts",
        lambda left, tokens, u: torch.ones_like(tokens, dtype=torch.bool),
    ),
}


@pytest.mark.eager
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_between_two_features_are_noticed(
    mistake: str, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, place, wrong = MISTAKES[mistake]
    monkeypatch.setattr(place, wrong)
    with pytest.raises(AssertionError):
        check_row(row, folders, tmp_path / "labels")
