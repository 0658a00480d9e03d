"""An engine over several ranks says what one process says, and ends when a rank does."""

import os
import re
import signal
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bench.serve.ranks_host import measure
from model import collectives
from model.collectives import RankError
from model.config import MixtureOfDepths
from model.lora_config import LoraConfig
from model.routed import routed_layers
from model.transformer import Transformer
from serve.config import EngineConfig
from serve.engine import ranks
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from tests.model.test_tensor_parallel import SHAPE, tiny_model_in, write_adapter
from tests.ranks import IdleFollower
from tests.serve.http_server import children_of, running_server, save_tiny_folder
from tests.serve.toys import drain, greedy
from tests.tiny import tiny_model
from tests.trials import covering

PROMPTS = [list(range(20, 60)), [*range(20, 50), 7], [5, 6, 7, 5, 6, 7, 5, 6], [9]]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_pages": 6}
"""Prompts are computed in chunks, and there are too few pages for all."""


def serve(folder: Path, count: int = 1, stages: int = 1, **options: Any) -> LLM:
    return LLM(str(folder), **OPTIONS | options, tensor_parallel_size=count, pipeline_parallel_size=stages)


def said(llm: LLM, params: SamplingParams, adapters: list[str | None] | None = None) -> list[list[int]]:
    answers = llm.generate(PROMPTS, params, adapter=adapters)
    return [choice.token_ids for answer in answers for choice in answer.choices]


def test_two_processes_say_what_one_says_until_one_of_them_is_killed(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model", tiny_model(seed=3))
    params, sampled = greedy(24), SamplingParams(seed=3, n=2, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    others = children_of(os.getpid())
    one, two = serve(folder), serve(folder, 2)
    (follower,) = set(children_of(os.getpid())) - set(others)
    assert said(two, params) == said(one, params)
    assert said(two, sampled) == said(one, sampled)
    os.kill(follower, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 has ended with code -9"):
        said(two, params)


@pytest.mark.slow
def test_so_do_processes_in_stages(tmp_path: Path) -> None:
    """Two stages of two, with a draft; ranks in other numbers are threads below."""
    folder = save_tiny_folder(tmp_path / "model", tiny_model(seed=3))
    others = children_of(os.getpid())
    llm = serve(folder, 2, 2, draft="ngram", num_speculative_tokens=3)
    followers = sorted(set(children_of(os.getpid())) - set(others))
    assert said(llm, greedy(24)) == said(serve(folder), greedy(24))
    for number in range(2):
        llm.engine.add_request(str(number), PROMPTS[number], greedy(24))
    for _ in range(5):
        llm.engine.step()
    os.kill(followers[-1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 3 has ended with code -9"):
        drain(llm.engine)


@pytest.mark.parametrize("kind", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_server_whose_rank_dies_starts_fresh_ones(tmp_path: Path, kind: str) -> None:
    folder = save_tiny_folder(tmp_path / "model", tiny_model(seed=3))
    body = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    options = (f"--{kind}-parallel-size", "2", "--dtype", "float32")
    with running_server(folder, tmp_path / "log", *options) as server:

        def text() -> str:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        expected = serve(folder).generate(PROMPTS[0], greedy(24))[0].text
        assert text() == expected
        (engine,) = server.engine_pids()
        (follower,) = children_of(engine)
        os.kill(follower, signal.SIGKILL)
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
        assert refused.status_code == 503, refused.text
        server.wait_healthy()
        assert text() == expected
        assert "rank 1 has ended with code -9" in server.log.read_text()


def randomly_routed(route: Any) -> Transformer:
    model = tiny_model(seed=4, mixture_of_depths=MixtureOfDepths(route, (0, 1), 0.5), **SHAPE)
    for layer in routed_layers(model):
        torch.nn.init.normal_(layer.router.weight, std=1.0)
    return model


MODELS = {
    "dense": lambda: tiny_model_in("none"),
    "nf4": lambda: tiny_model_in("nf4"),
    "int4": lambda: tiny_model_in("int4"),
    "routed attention": lambda: randomly_routed("attention"),
    "routed block": lambda: randomly_routed("block"),
}


@pytest.mark.usefixtures("follower_threads")
@pytest.mark.parametrize(("name", "sizes"), covering(product(MODELS, [(2, 1), (4, 1), (1, 2), (2, 2)])))
def test_any_model_and_draft_says_what_one_process_says(tmp_path: Path, name: str, sizes: tuple[int, int]) -> None:
    """In chunks, with shared prefixes and preemption; four ranks share two KV heads."""
    count, stages = sizes
    folder = save_tiny_folder(tmp_path / "model", MODELS[name]())
    expected = said(serve(folder), greedy(30))
    drafts = {None, "ngram", str(folder)} if name == "nf4" else {"ngram", None if stages > 1 else "ngram"}
    for draft in drafts:
        llm = serve(folder, count, stages, draft=draft, num_speculative_tokens=None if draft is None else 3)
        assert said(llm, greedy(30)) == expected
        stats = llm.engine.stats()
        assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
        assert (draft is None) == (stats.num_draft_tokens == 0)
        assert draft != str(folder) or stats.num_accepted_tokens > 0
        llm.engine.close()


@pytest.mark.usefixtures("follower_threads")
def test_adapters_are_those_of_one_process(tmp_path: Path) -> None:
    folder, adapters = save_tiny_folder(tmp_path / "model", tiny_model_in("int4")), {}
    for seed, name in enumerate("ab"):
        write_adapter(folder, tmp_path / name, LoraConfig(rank=2 + seed), seed)
        adapters[name] = str(tmp_path / name)
    asked = ["a", "b", None, "b"]
    one = serve(folder, adapters=adapters)
    expected = said(one, greedy(16), asked)
    assert expected != said(one, greedy(16))
    for sizes in ((2, 1), (1, 2)):
        llm = serve(folder, *sizes, adapters=adapters)
        assert said(llm, greedy(16), asked) == expected
        llm.engine.close()


class Started(Exception):
    """A follower was."""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size 3 does not divide the 4 attention heads; sizes that do are 2,",
        ),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size 3 is more than the 2 layers of the model"),
        ({"enable_lora": True}, "--enable-lora cannot be used with several ranks; name the adapters when the engine "),
        ({"draft": "early_exit"}, "the draft early_exit uses layers of the target, which several ranks share"),
        ({"device": "cuda:1"}, "device 'cuda:1' is one GPU; ranks take the first ones, so say cuda"),
    ],
)
def test_what_ranks_cannot_do_is_one_sentence_before_any_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    def start(*arguments: Any) -> None:
        raise Started

    monkeypatch.setattr(ranks, "FollowerProcess", start)
    folder = save_tiny_folder(tmp_path / "model")
    with pytest.raises(Started):
        LLM(str(folder), tensor_parallel_size=2)
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        LLM(str(folder), **{"tensor_parallel_size": 2} | options)


@pytest.mark.usefixtures("follower_threads")
def test_what_only_a_rank_finds_is_one_sentence(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model", tiny_model_in("int4", intermediate_size=160))
    with pytest.raises(ValueError, match="groups of 32 weights do not divide the 80 that a rank takes of a row"):
        serve(folder, 2)


def test_a_rank_that_does_not_meet_the_others_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun, and is killed before it connects."""

    class Killed(IdleFollower):
        def answer(self, expected: type[Any]) -> Any:
            self._process.kill()
            return super().answer(expected)

    monkeypatch.setattr(ranks, "FollowerProcess", Killed)
    monkeypatch.setattr(collectives, "_MEETING", timedelta(seconds=1))
    with pytest.raises(RankError, match="rank 1 has ended with code -9"):
        ranks.Ranks(EngineConfig("none", tensor_parallel_size=2), torch.device("cpu"))


@pytest.mark.usefixtures("follower_threads")
def test_weights_are_not_replaced_and_a_closed_engine_says_so(tmp_path: Path) -> None:
    llm = serve(save_tiny_folder(tmp_path / "model"), 2)
    with pytest.raises(ValueError, match="weights cannot be replaced where several ranks share a model"):
        llm.engine.update_weights({})
    llm.engine.close()
    with pytest.raises(RankError, match="the engine is closed"):
        said(llm, greedy(2))


def test_telling_the_others_takes_at_most_100_microseconds() -> None:
    """Of the processor, in the least of many steps: of more, while other work on the machine disturbs."""
    alone = together = float("inf")
    for _ in range(12):
        measured = measure(16, 2, steps=50)
        alone, together = min(alone, measured[0][0]), min(together, measured[1][0])
        if together - alone < 100:
            return
    pytest.fail(f"{together - alone:.0f} microseconds")


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "choose_device", torch.device)
    monkeypatch.setattr(ranks, "gpus", lambda: [None] * 3)
    options = EngineConfig("model", device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"^4 ranks need a GPU each, but this machine has 3 for torch$"):
        ranks.rank_device(options, 0)
    assert ranks.rank_device(replace(options, pipeline_parallel_size=1), 1) == torch.device("cuda:1")
