"""Answers that are given again: the same, to whom they were given, and only where another run would say the same."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from serve.http.metrics import Metrics
from serve.http.response_cache import ResponseCache, size_of
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant
from tests.serve.http_server import SCRIPTED, RunningServer, running_server, save_tiny_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
SALTED = Tenant("a", cache_salt="s")


def output(text: str, finish_reason: Any = None, index: int = 0) -> RequestOutput:
    return RequestOutput("id", index, [5], text, finish_reason, num_prompt_tokens=3, num_output_tokens=1)


def answered(cache: ResponseCache, *said: RequestOutput, prompt: int = 1, **changes: Any) -> list[str]:
    """What a request is told without the engine; if nothing, the engine says this."""
    asked = {"params": GREEDY, "tenant": None, "adapter": None} | changes
    answer = cache.open([[prompt, 2, 3]], asked["params"], asked["tenant"], asked["adapter"])
    known = [found.new_text for _, found in answer.replay()]
    for one in () if known else said:
        answer.record(0, one)
    return known


@pytest.fixture
def cache() -> ResponseCache:
    return ResponseCache(10_000, Metrics("m"))


WHOLE = (output("a"), output("b", "length"))


def test_an_answer_is_given_again_and_says_that_no_prompt_was_computed(cache: ResponseCache) -> None:
    assert answered(cache, *WHOLE) == [] and answered(cache) == ["a", "b"]
    [(_, first), (_, last)] = cache.open([[1, 2, 3]], GREEDY, None, None).replay()
    assert replace(first, num_cached_tokens=0) == WHOLE[0] and replace(last, num_cached_tokens=0) == WHOLE[1]
    assert first.num_cached_tokens == first.num_prompt_tokens == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": 7},
        {"params": replace(GREEDY, max_tokens=3)},
        {"params": replace(GREEDY, logprobs=1)},
        {"params": replace(GREEDY, temperature=0.5, seed=1)},
        {"tenant": Tenant("a")},
        {"tenant": SALTED},
        {"adapter": "a"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_an_answer_follows_from_is_in_its_key(cache: ResponseCache, changes: dict[str, Any]) -> None:
    answered(cache, *WHOLE)
    assert answered(cache, *WHOLE, **changes) == []
    assert answered(cache, **changes) == answered(cache) == ["a", "b"]


def test_accounts_and_salts_do_not_share(cache: ResponseCache) -> None:
    answered(cache, *WHOLE, tenant=SALTED)
    assert (
        answered(cache, tenant=Tenant("b", cache_salt="s")) == answered(cache, tenant=Tenant("a", cache_salt="t")) == []
    )
    assert answered(cache, tenant=replace(SALTED, weight=3.0)) == ["a", "b"]


def test_what_is_random_failed_or_unfinished_is_not_kept(cache: ResponseCache) -> None:
    drawn = SamplingParams(temperature=1.0)
    assert answered(cache, *WHOLE, params=drawn) == answered(cache, *WHOLE, params=drawn) == []
    for end in ("abort", "error", "deadline", None):
        assert answered(cache, output("a"), output("b", end)) == []
    two = replace(GREEDY, n=2)
    assert answered(cache, output("a", "stop"), params=two) == []
    assert answered(cache, output("a", "stop"), output("b", "stop", 1), params=two) == []
    assert answered(cache, params=two) == ["a", "b"]


def test_the_one_used_longest_ago_goes_and_bytes_are_counted(cache: ResponseCache) -> None:
    most = 0
    for prompt in range(20):
        answered(cache, output("x" * 1000, "stop"), prompt=prompt)
        answered(cache, prompt=0)
        most = max(most, cache.num_bytes)
    kept = [prompt for prompt in range(20) if answered(cache, prompt=prompt)]
    assert 5 <= len(kept) <= 8 and kept == [0, *range(21 - len(kept), 20)]
    assert cache.num_bytes == sum(map(size_of, cache._answers.values())) and most <= cache.max_bytes
    assert answered(cache, output("y" * 20_000, "stop"), prompt=99) == answered(cache, prompt=99) == []
    assert [prompt for prompt in range(20) if answered(cache, prompt=prompt)] == kept


def test_what_was_under_way_when_all_was_forgotten_is_not_found(cache: ResponseCache) -> None:
    answer = cache.open([[1, 2, 3]], GREEDY, None, None)
    cache.forget()
    for one in WHOLE:
        answer.record(0, one)
    assert answered(cache) == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    at = tmp_path_factory.mktemp("cache")
    options = ["--api-key", "one", "--api-key", "two", "--served-model-name", "m", "--response-cache-bytes", "1M"]
    with running_server(save_tiny_folder(at / "m"), at / "log", *options, program=SCRIPTED) as running:
        yield running


def generated(server: RunningServer) -> float:
    return server.metric("vllm:generation_tokens_total")


def ask(server: RunningServer, key: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0} | more
    headers = {"authorization": f"Bearer {key}"}
    answer: dict[str, Any] = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=20).json()
    return answer


def test_over_http_whole_streamed_by_account_and_by_engine(server: RunningServer) -> None:
    """The prompt [9] is answered by whose it is."""
    first, before = ask(server, "one", [9]), generated(server)
    again = ask(server, "one", [9])
    assert first["choices"][0]["text"] == "key1 1.0 0" * 4 and again["choices"] == first["choices"]
    assert again["id"] != first["id"] and again["usage"]["completion_tokens"] == 4
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] == 1
    stream = server.client(api_key="one").completions.create(
        model="m", prompt=[9], max_tokens=4, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in stream if part.choices) == first["choices"][0]["text"]
    assert generated(server) == before, "the engine has not been asked"
    assert server.metric("potstill:response_cache_hits_total") == 2
    assert server.metric("potstill:response_cache_queries_total") == 3
    assert server.metric("potstill:response_cache_bytes") > 0
    for name in ("vllm:time_to_first_token", "vllm:e2e_request_latency", "vllm:request_time_per_output_token"):
        assert server.metric(f"{name}_seconds_count") == 1, "what is given again says nothing of the engine's times"
    assert ask(server, "two", [9])["choices"][0]["text"] == "key2 1.0 0" * 4
    assert server.metric("vllm:request_success_total") == 4, "answers that are given again are counted"
    with pytest.raises(openai.InternalServerError):
        server.client(api_key="one").completions.create(model="m", prompt=[1, 1, 1], max_tokens=4)
    server.wait_for("potstill:engine_restarts_total", 1, timeout_s=30)
    server.wait_healthy()
    assert ask(server, "one", [9])["choices"] == first["choices"]
    assert server.metric("potstill:response_cache_hits_total") == 2, "of another engine nothing is known"
