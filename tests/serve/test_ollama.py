"""Ollama's routes through the official `ollama` client: the text is that of chat, in lines of JSON."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernels import __version__
from model.text.tokenizer import Tokenizer
from tests.serve.http_server import TEMPLATE, RunningServer, running_server, save_tiny_folder

ollama = pytest.importorskip("ollama", reason="the ollama client is not installed")

SYSTEM, QUESTION = "Be brief.", "What is a token?"
MESSAGES: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
OPTIONS = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "512", "--served-model-name", "tiny"]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("ollama") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, folder.parent / "log", *OPTIONS) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Any:
    return ollama.Client(host=server.url)


def chat(server: RunningServer, messages: list[Any], **settings: Any) -> Any:
    settings = {"max_tokens": 8, "temperature": 0} | settings
    return server.client().chat.completions.create(model="tiny", messages=messages, **settings)


def test_chat_says_what_chat_says(client: Any, server: RunningServer) -> None:
    answer = client.chat("tiny", MESSAGES, options=GREEDY)
    expected = chat(server, MESSAGES)
    assert answer.message.content == expected.choices[0].message.content != ""
    assert (answer.model, answer.message.role, answer.done) == ("tiny", "assistant", True)
    assert answer.done_reason == expected.choices[0].finish_reason
    counts = (expected.usage.prompt_tokens, expected.usage.completion_tokens)
    assert (answer.prompt_eval_count, answer.eval_count) == counts
    assert answer.total_duration == answer.prompt_eval_duration + answer.eval_duration
    assert 0 < answer.eval_duration < 60e9


def test_generate_is_a_chat_of_one_message(client: Any, server: RunningServer) -> None:
    answer = client.generate("tiny", QUESTION, system=SYSTEM, options=GREEDY)
    assert answer.response == chat(server, MESSAGES).choices[0].message.content
    alone = client.generate("tiny", QUESTION, options=GREEDY)
    assert alone.response == chat(server, MESSAGES[1:]).choices[0].message.content


@pytest.mark.parametrize("route", ["chat", "generate"])
def test_streams_are_lines_that_end_with_counts(client: Any, server: RunningServer, route: str) -> None:
    asked = {"messages": MESSAGES} if route == "chat" else {"prompt": QUESTION, "system": SYSTEM}
    lines = list(getattr(client, route)("tiny", stream=True, options=GREEDY, **asked))
    texts = [line.message.content if route == "chat" else line.response for line in lines]
    assert "".join(texts) == chat(server, MESSAGES).choices[0].message.content
    assert len(lines) > 2
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (texts[-1], lines[-1].eval_count, lines[-1].done_reason) == ("", 8, "length")


def test_requests_stream_unless_told_otherwise(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "options": GREEDY}
    answer = httpx.post(f"{server.url}/api/chat", json=body, timeout=60)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert len(lines) > 2 and lines[-1]["done"] is True


def test_the_async_client(server: RunningServer) -> None:
    async def ask() -> tuple[str, str]:
        client = ollama.AsyncClient(host=server.url)
        whole = await client.chat("tiny", MESSAGES, options=GREEDY)
        stream = await client.chat("tiny", MESSAGES, stream=True, options=GREEDY)
        return whole.message.content, "".join([line.message.content async for line in stream])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"temperature": 0.7, "seed": 5}, {"temperature": 0.7, "seed": 5}),
        ({"seed": 5, "top_k": 3}, {"seed": 5, "temperature": 1, "extra_body": {"top_k": 3}}),
        ({"seed": 5, "top_p": 0.4}, {"seed": 5, "temperature": 1, "top_p": 0.4}),
        ({"seed": 5, "min_p": 0.2}, {"seed": 5, "temperature": 1, "extra_body": {"min_p": 0.2}}),
        ({"temperature": 0, "repeat_penalty": 1.8}, {"extra_body": {"repetition_penalty": 1.8}}),
        ({"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2},
         {"presence_penalty": 2, "frequency_penalty": 2}),
        ({"temperature": 0, "num_predict": 3}, {"max_tokens": 3}),
    ],
    ids=lambda value: "-".join(value),
)  # fmt: skip
def test_options_are_those_of_chat(
    client: Any, server: RunningServer, options: dict[str, Any], same: dict[str, Any]
) -> None:
    answer = client.chat("tiny", MESSAGES, options={"num_predict": 8} | options)
    assert answer.message.content == chat(server, MESSAGES, **same).choices[0].message.content


def test_options_that_only_say_how_it_runs_change_nothing(client: Any) -> None:
    plain = client.chat("tiny", MESSAGES, options=GREEDY).message.content
    running = {"num_ctx": 256, "num_thread": 2, "num_gpu": 0, "num_batch": 8, "use_mmap": True, "num_keep": 4}
    neutral = {"repeat_last_n": -1, "typical_p": 1.0, "mirostat": 0, "tfs_z": 1.0, "penalize_newline": True}
    answer = client.chat("tiny", MESSAGES, options=GREEDY | running | neutral, keep_alive="5m", tools=[], format="")
    assert answer.message.content == plain


def test_an_answer_ends_at_a_stop_string(client: Any) -> None:
    text = client.chat("tiny", MESSAGES, options=GREEDY).message.content
    answer = client.chat("tiny", MESSAGES, options=GREEDY | {"stop": [text[3:5]]})
    assert (answer.message.content, answer.done_reason) == (text[: text.index(text[3:5])], "stop")


def test_logprobs_are_those_of_chat(client: Any, server: RunningServer) -> None:
    content = chat(server, MESSAGES, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    whole = client.chat("tiny", MESSAGES, options=GREEDY, logprobs=True, top_logprobs=2).logprobs
    lines = client.chat("tiny", MESSAGES, options=GREEDY, logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry for line in lines for entry in line.logprobs or ()]
    for found in (whole, streamed):
        assert [(one.token, one.logprob) for one in found] == [(one.token, one.logprob) for one in content]
        assert [len(one.top_logprobs) for one in found] == [2] * len(content)


def test_calls_and_their_results_are_messages(client: Any, server: RunningServer) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    asked = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "f", "content": "sunny"},
    ]
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "sunny"},
    ]
    answer = client.chat("tiny", asked, options=GREEDY)
    assert answer.message.content == chat(server, messages).choices[0].message.content


def test_thinking_is_the_templates(client: Any, folder: Path) -> None:
    """The tiny template writes a mark where enable_thinking is false."""
    arguments = {"enable_thinking": False}
    ids = Tokenizer.load(folder).chat_token_ids(MESSAGES, add_generation_prompt=True, **arguments)
    assert client.chat("tiny", MESSAGES, think=False, options=GREEDY).prompt_eval_count == len(ids)
    assert client.chat("tiny", MESSAGES, think=True, options=GREEDY).prompt_eval_count < len(ids)


def test_the_model_is_listed_and_shown(client: Any, server: RunningServer, folder: Path) -> None:
    [model] = client.list().models
    assert model.model == "tiny"
    assert model.size == sum(path.stat().st_size for path in folder.iterdir())
    assert model.details.family == json.loads((folder / "config.json").read_text())["model_type"]
    shown = client.show("tiny")
    assert shown.template == TEMPLATE and shown.details == model.details
    assert shown.modelinfo[f"{model.details.family}.context_length"] == 512
    assert "completion" in shown.capabilities
    assert httpx.get(f"{server.url}/api/version", timeout=20).json() == {"version": __version__}


def test_embeddings_are_those_of_openais_route(client: Any, server: RunningServer) -> None:
    texts = [QUESTION, SYSTEM]
    answer = client.embed("tiny", texts, options={"num_ctx": 256})
    expected = server.client().embeddings.create(model="tiny", input=texts)
    for found, one in zip(answer.embeddings, expected.data, strict=True):
        assert list(found) == pytest.approx(one.embedding, rel=1e-5, abs=1e-6)
    assert answer.prompt_eval_count == expected.usage.prompt_tokens and answer.total_duration > 0
    long = "A model turns tokens into tokens. " * 200
    assert client.embed("tiny", long).prompt_eval_count == 511
    for refused in ({"input": long, "truncate": False}, {"input": "a", "dimensions": 8}):
        with pytest.raises(ollama.ResponseError) as caught:
            client.embed("tiny", **refused)
        assert caught.value.status_code == 400


def test_an_empty_request_only_loads(client: Any) -> None:
    for answer in (client.chat("tiny", []), client.generate("tiny")):
        assert (answer.done, answer.done_reason) == (True, "load")


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        ("chat", {"options": {"mirostat": 2}}, "options.mirostat can only be 0"),
        ("chat", {"options": {"tfs_z": 0.5}}, "options.tfs_z can only be 1.0"),
        ("chat", {"options": {"repeat_last_n": 64}}, "options.repeat_last_n can only be -1"),
        ("chat", {"options": {"sorcery": 1}}, "unknown or unsupported field: options.sorcery"),
        ("chat", {"options": {"temperature": 9}}, "options.temperature"),
        ("chat", {"options": {"num_predict": 0}}, "options.num_predict must be at least 1"),
        ("chat", {"options": {"num_ctx": 4096}}, "options.num_ctx is 4096"),
        ("chat", {"options": {"stop": ["a"] * 9}}, "options.stop has 9"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ("chat", {"think": "high"}, "think"),
        ("generate", {"raw": True}, "raw can only be false"),
        ("generate", {"context": [1]}, "context can only be []"),
        ("generate", {"suffix": "a"}, "suffix can only be"),
        ("generate", {"template": "a"}, "template can only be"),
        ("generate", {"images": ["aGk="]}, "images can only be"),
        ("generate", {"messages": []}, "unknown or unsupported field: messages"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: RunningServer, path: str, body: dict[str, Any], complaint: str
) -> None:
    base = {"model": "tiny", "stream": False} | ({"messages": MESSAGES} if path == "chat" else {"prompt": QUESTION})
    answer = httpx.post(f"{server.url}/api/{path}", json=base | body, timeout=20)
    assert answer.status_code == 400 and list(answer.json()) == ["error"]
    assert complaint in answer.json()["error"]


def test_another_model_is_not_found(client: Any) -> None:
    for ask in (lambda: client.chat("other", MESSAGES), lambda: client.show("other")):
        with pytest.raises(ollama.ResponseError) as caught:
            ask()
        assert caught.value.status_code == 404 and "not served here" in caught.value.error


def test_a_stream_that_fails_raises_in_the_client(client: Any, server: RunningServer) -> None:
    """The engine is killed while it answers."""
    lines = client.chat("tiny", MESSAGES, stream=True, options={"num_predict": 400, "temperature": 0})
    with pytest.raises(ollama.ResponseError, match="engine"):
        for number, _ in enumerate(lines):
            if number == 2:
                [engine] = server.engine_pids()
                os.kill(engine, signal.SIGKILL)
    server.wait_healthy()
