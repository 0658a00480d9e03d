"""API keys by name over HTTP: limits by the minute, classes of requests, and what the engine is told of whom."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve.config import EngineConfig
from serve.http.accounts import Account, Bucket, RequestClass, accounts_of
from serve.http.errors import ApiError
from serve.http.options import ServerOptions
from tests.serve.http_server import SCRIPTED, RunningServer, running_server, save_tiny_folder

FILE: dict[str, Any] = {
    "classes": {"interactive": {"priority": -1}, "batch": {"priority": 5, "deadline_s": 0.5}},
    "keys": [
        {"name": "shop", "key": "s1", "weight": 2.5, "classes": ["interactive", "batch"]},
        {"name": "few", "key": "s2", "requests_per_minute": 2},
        {"name": "small", "key": "s3", "tokens_per_minute": 40},
        {"name": "quiet", "key": "s4"},
    ],
}
SLOW = [200]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    at = tmp_path_factory.mktemp("accounts")
    (at / "keys.json").write_text(json.dumps(FILE))
    options = ["--api-keys-file", str(at / "keys.json"), "--api-key", "plain", "--served-model-name", "m"]
    options += ["--label-folder", str(at / "labels"), "--label-consent", "shop", "key1"]
    with running_server(save_tiny_folder(at / "m"), at / "log", *options, program=SCRIPTED) as running:
        yield running


def ask(server: RunningServer, key: str, prompt: list[int], max_tokens: int = 1, **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens} | more
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=20)


def limits(answer: httpx.Response) -> dict[str, str]:
    found = {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit-")}
    return {name.removeprefix("x-ratelimit-"): value for name, value in found.items()}


@pytest.mark.parametrize(
    ("key", "tier", "origin"),
    [
        ("s1", None, "shop 2.5 -1"),
        ("s1", "auto", "shop 2.5 -1"),
        ("s1", "batch", "shop 2.5 5"),
        ("plain", None, "key1 1.0 0"),
    ],
)
def test_the_engine_hears_whose_a_request_is_and_how_urgent(
    server: RunningServer, key: str, tier: str | None, origin: str
) -> None:
    answer = ask(server, key, [9], service_tier=tier)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == origin
    assert not limits(answer)


def test_keys_without_a_file_may_say_a_priority_themselves(server: RunningServer) -> None:
    assert ask(server, "plain", [9], priority=3).json()["choices"][0]["text"] == "key1 1.0 3"
    refused = ask(server, "s1", [9], priority=3)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


def test_a_class_has_a_deadline_which_a_request_can_only_shorten(server: RunningServer) -> None:
    assert ask(server, "s1", SLOW, 5).status_code == 200
    for more in ({}, {"deadline_s": 60}):
        assert ask(server, "s1", SLOW, 100, service_tier="batch", **more).status_code == 504
    assert ask(server, "s1", SLOW, 100, deadline_s=0.3).status_code == 504


HELLO = [{"role": "user", "content": "hello"}]
TRANSLATED = {
    "messages": {"messages": HELLO, "max_tokens": 50_000},
    "responses": {"input": "hello", "max_output_tokens": 50_000},
    "../api/chat": {"messages": HELLO, "options": {"num_predict": 50_000}},
    "../api/generate": {"prompt": "hello", "options": {"num_predict": 50_000}},
}


@pytest.mark.parametrize("route", TRANSLATED)
def test_other_protocols_name_classes_and_priorities_too(server: RunningServer, route: str) -> None:
    def post(key: str, **more: Any) -> httpx.Response:
        body = TRANSLATED[route] | {"model": "m", "stream": False} | more
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{server.url}/v1/{route}", json=body, headers=headers, timeout=20)

    assert post("s1", service_tier="batch").status_code == 504
    assert post("plain", priority=3, deadline_s=0.3).status_code == 504
    for refused in ({"service_tier": "flex"}, {"priority": 3}):
        answer = post("s1", **refused)
        assert answer.status_code == 400 and next(iter(refused)) in answer.text


def test_a_class_that_a_key_does_not_have_is_400(server: RunningServer) -> None:
    for key, known in (("s1", "auto, default, interactive, batch"), ("s2", "auto, default")):
        refused = ask(server, key, [9], service_tier="flex").json()["error"]
        assert (refused["param"], refused["message"]) == ("service_tier", f"service_tier can be {known} here")


def test_requests_of_a_minute_are_counted_for_each_key(server: RunningServer) -> None:
    first, second, third = (ask(server, "s2", [1, 1, 0]) for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert limits(first)["limit-requests"] == "2" and limits(first)["remaining-requests"] == "1"
    assert limits(third)["remaining-requests"] == "0" and 30 < float(limits(third)["reset-requests"][:-1]) <= 60
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    with pytest.raises(openai.RateLimitError):
        server.client(api_key="s2").completions.create(model="m", prompt=[1], max_tokens=1)
    assert ask(server, "s1", [9]).status_code == 200


def test_tokens_of_prompts_and_output_are_counted(server: RunningServer) -> None:
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"prompt": [4] * 10, "max_tokens": 25, "stream": True},
        headers={"authorization": "Bearer s3"},
    ) as stream:
        assert limits(stream)["limit-tokens"] == "40" and limits(stream)["remaining-tokens"] == "30"  # type: ignore[arg-type]
        stream.read()
    refused = ask(server, "s3", [4] * 30)
    assert refused.status_code == 429 and 5 <= int(limits(refused)["remaining-tokens"]) < 30
    assert 1 <= int(refused.headers["retry-after"]) <= 38


def test_log_lines_name_keys_and_never_show_them(server: RunningServer) -> None:
    ask(server, "s1", [9])
    ask(server, "plain", [9])
    log = server.log.read_text()
    assert " key=shop " in log and " key=key1 " in log and "s1" not in log.replace("tokens1", "")


def test_accounts_consent_to_being_stored_and_requests_can_only_withdraw_that(server: RunningServer) -> None:
    for key in ("s1", "plain"):
        answers = [ask(server, key, [8], **said) for said in ({}, {"store": None}, {"store": True}, {"store": False})]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["True", "True", "True", "False"]
    for said in ({}, {"store": None}, {"store": False}):
        assert ask(server, "s4", [8], **said).json()["choices"][0]["text"] == "False"
    refused = ask(server, "s4", [8], store=True)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "store", "unsupported_parameter")


def consenting(file: Path, *names: str) -> list[str]:
    """The accounts that consent where these are named."""
    engine = EngineConfig("m", label_folder="labels")
    options = ServerOptions(engine, ("m",), api_keys=("k",), api_keys_file=str(file), label_consent=names)
    return [account.name for account in accounts_of(options) if account.consents]


def test_consent_names_accounts(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": "1"}, {"name": "b", "key": "2"}]}))
    assert consenting(file, "a") == ["a"]
    assert consenting(file, "key1", "b") == ["key1", "b"]
    assert consenting(file, "all") == ["key1", "a", "b"]
    with pytest.raises(ValueError, match="names key2; it can name all, key1, a, b"):
        consenting(file, "key2")
    file.write_text(json.dumps({"keys": [{"name": "all", "key": "1"}]}))
    with pytest.raises(ValueError, match="means everybody, but a key has this name"):
        consenting(file, "all")


@pytest.mark.parametrize(("engine", "names"), [({"label_folder": "f"}, ()), ({}, ("all",))])
def test_labels_need_both_a_folder_and_consent(engine: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--label-folder and --label-consent belong together"):
        ServerOptions(EngineConfig("m", **engine), ("m",), label_consent=names)


def test_a_bucket_holds_a_minute_and_fills_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bucket = Bucket(60)
    assert bucket.wait_s(60) == 0
    bucket.take(90)  # output is counted when it is there
    assert (bucket.wait_s(1), bucket.full_s) == (31, 90)
    assert bucket.wait_s(1000) == 90, "a request larger than the limit waits for all of it"
    now += 40
    assert (bucket.level, bucket.wait_s(10)) == (10, 0)
    now += 1000
    assert bucket.level == 60


def test_the_terms_of_a_request() -> None:
    account = Account("a", b"", classes={"x": RequestClass(3, 10.0)}, is_ordered=True)
    assert account.terms(None, None, None) == account.terms("x", 0, 20.0) == (3, 10.0)
    assert account.terms("default", None, 5.0) == (3, 5.0)
    assert Account("a", b"").terms(None, 7, 5.0) == (7, 5.0)
    with pytest.raises(ApiError):
        account.terms("y", None, None)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file"),
        ("{", "truncated"),
        ({"keys": []}, "length >= 1"),
        ({"keys": [{"name": "a", "key": "SECRET", "weight": 0}]}, r"keys\[0\].weight"),
        ({"keys": [{"name": "a", "key": "SECRET", "requests": 1}]}, "unknown field `requests`"),
        ({"keys": [{"name": "a b", "key": "SECRET"}]}, "'a b' is no name"),
        ({"keys": [{"name": "a", "key": "SECRET"}, {"name": "b", "key": "SECRET"}]}, "is there twice"),
        ({"keys": [{"name": "a", "key": "SECRET"}, {"name": "a", "key": "2"}]}, "is there twice"),
        ({"keys": [{"name": "key1", "key": "SECRET"}]}, "is there twice"),
        ({"keys": [{"name": "a", "key": "SECRET", "classes": ["x"]}]}, "class 'x', which is not there"),
    ],
)
def test_a_wrong_file_is_one_sentence_without_keys(content: Any, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    options = ServerOptions(EngineConfig("m"), ("m",), api_keys=("k",), api_keys_file=str(file))
    with pytest.raises(ValueError, match=sentence) as caught:
        accounts_of(options)
    assert "SECRET" not in str(caught.value) and "\n" not in str(caught.value)
