"""/v1/messages through the official `anthropic` client: the text is that of chat, in blocks and events."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from model.text.tokenizer import Tokenizer
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder

GREEDY: dict[str, Any] = {"model": "tiny", "extra_body": {"temperature": 0, "ignore_eos": True}}
SYSTEM, QUESTION = "Be brief.", "What is a token?"
ASKED: Any = {"messages": [{"role": "user", "content": QUESTION}]}
OPTIONS = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "512", "--served-model-name", "tiny"]
KEY = "a-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("messages") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, folder.parent / "log", *OPTIONS, "--api-key", KEY) as running:
        running.api_key = KEY
        yield running


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The package, which takes seconds to import: only the process that runs these tests does."""
    return pytest.importorskip("anthropic", reason="the anthropic client is not installed")


@pytest.fixture
def client(anthropic: Any, server: RunningServer) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


def chat(server: RunningServer, messages: list[Any], max_tokens: int, **more: Any) -> Any:
    settings = GREEDY | {"extra_body": GREEDY["extra_body"] | more}
    return server.client().chat.completions.create(messages=messages, max_tokens=max_tokens, **settings)


def test_a_message_says_what_chat_says(client: Any, server: RunningServer) -> None:
    answer = client.messages.create(system=SYSTEM, max_tokens=12, **ASKED, **GREEDY)
    expected = chat(server, [{"role": "system", "content": SYSTEM}, *ASKED["messages"]], 12)
    [block] = answer.content
    assert (block.type, block.text) == ("text", expected.choices[0].message.content)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    read = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert (read, answer.usage.output_tokens) == (expected.usage.prompt_tokens, 12)


def test_cached_tokens_are_counted_apart(client: Any) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "A model turns tokens into tokens. " * 8}]}
    first, second = (client.messages.create(max_tokens=2, **asked, **GREEDY).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0 and second.cache_read_input_tokens >= 16
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_blocks_are_messages(client: Any, server: RunningServer) -> None:
    marked = {"type": "text", "text": "And why?", "cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    results = [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]}, marked]
    asked: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
        {"role": "user", "content": results},
    ]
    answer = client.messages.create(
        system=[{"type": "text", "text": SYSTEM}], messages=asked, max_tokens=6, metadata={"user_id": "u"}, **GREEDY
    )
    function = {"name": "f", "arguments": '{"x":1}'}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": "And why?"},
    ]
    assert answer.content[0].text == chat(server, messages, 6).choices[0].message.content


def test_an_answer_goes_on_from_its_beginning(client: Any, server: RunningServer) -> None:
    messages: list[Any] = [*ASKED["messages"], {"role": "assistant", "content": "A token is"}]
    answer = client.messages.create(messages=messages, max_tokens=6, **GREEDY)
    expected = chat(server, messages, 6, continue_final_message=True, add_generation_prompt=False)
    assert answer.content[0].text == expected.choices[0].message.content


def test_a_stop_sequence_is_named(client: Any) -> None:
    text = client.messages.create(max_tokens=12, **ASKED, **GREEDY).content[0].text
    stop = text[4:6]
    answer = client.messages.create(max_tokens=12, stop_sequences=[stop], **ASKED, **GREEDY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    with client.messages.stream(max_tokens=12, stop_sequences=[stop], **ASKED, **GREEDY) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_a_stream_has_anthropics_events_in_their_order(client: Any) -> None:
    events = list(client.messages.create(max_tokens=8, stream=True, **ASKED, **GREEDY))
    kinds = [event.type for event in events]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert kinds == [
        *("message_start", "content_block_start"),
        *(["content_block_delta"] * len(deltas)),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert len(deltas) > 1
    whole = client.messages.create(max_tokens=8, **ASKED, **GREEDY)
    assert "".join(deltas) == whole.content[0].text
    assert events[0].message.content == [] and events[0].message.usage.input_tokens > 0
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("max_tokens", 8)


def test_the_clients_own_accumulation_agrees(client: Any) -> None:
    with client.messages.stream(max_tokens=8, **ASKED, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text == client.messages.create(max_tokens=8, **ASKED, **GREEDY).content[0].text


def test_the_async_client(anthropic: Any, server: RunningServer) -> None:
    async def ask() -> tuple[str, str]:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY)
        whole = await client.messages.create(max_tokens=5, **ASKED, **GREEDY)
        async with client.messages.stream(max_tokens=5, **ASKED, **GREEDY) as stream:
            return whole.content[0].text, "".join([text async for text in stream.text_stream])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


def test_tokens_are_counted(client: Any, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": "system", "content": SYSTEM}, *ASKED["messages"]]
    expected = len(tokenizer.chat_token_ids(messages, add_generation_prompt=True))
    counted = client.messages.count_tokens(model="tiny", system=SYSTEM, **ASKED)
    assert counted.input_tokens == expected


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_keys_come_in_either_header_and_errors_in_anthropics_shape(server: RunningServer, path: str) -> None:
    body = {"max_tokens": 1} if path == "/v1/messages" else {}
    body |= ASKED
    for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
        assert httpx.post(server.url + path, json=body, headers=headers, timeout=20).status_code == 200
    wrong: list[dict[str, str]] = [
        {},
        {"x-api-key": "no"},
        {"x-api-key": KEY, "authorization": f"Bearer {KEY}"},
        {"authorization": KEY},
    ]
    for headers in wrong:
        answer = httpx.post(server.url + path, json=body, headers=headers, timeout=20)
        assert answer.status_code == 401
        assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "authentication_error"
        assert "x-api-key" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "messages[0]: only an assistant's message holds tool_use"),
        ({"stop_sequences": ["a"] * 9}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "unknown or unsupported field: n"),
        ({"max_tokens": 600}, "maximum context length"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    anthropic: Any, client: Any, body: dict[str, Any], complaint: str
) -> None:
    asked = {"max_tokens": 4} | ASKED | body
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.post("/v1/messages", body=asked, cast_to=object)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert complaint in caught.value.body["error"]["message"]


def test_another_model_is_not_found(anthropic: Any, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=1, **ASKED)


def test_openais_client_still_gets_openais_errors(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().responses.create(model="other", input="hi")
    assert caught.value.code == "model_not_found"


def test_a_stream_that_fails_raises_in_the_client(anthropic: Any, client: Any, server: RunningServer) -> None:
    """The engine is killed while it answers."""
    with pytest.raises(anthropic.APIStatusError, match="engine"):
        for number, _ in enumerate(client.messages.create(max_tokens=400, stream=True, **ASKED, **GREEDY)):
            if number == 4:
                [engine] = server.engine_pids()
                os.kill(engine, signal.SIGKILL)
    server.wait_healthy()
