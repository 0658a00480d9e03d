"""/v1/responses through the official `openai` client: the text is that of chat, in items and events."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serve.http_server import RunningServer, running_server, save_tiny_folder

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
INSTRUCTIONS, QUESTION = "Be brief.", "What is a token?"
MESSAGES: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
OPTIONS = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "512", "--served-model-name", "tiny"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("responses")
    with running_server(save_tiny_folder(root / "model"), root / "log", *OPTIONS) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def chat_text(client: openai.OpenAI, messages: list[Any], max_tokens: int) -> str:
    answer = client.chat.completions.create(messages=messages, max_tokens=max_tokens, **GREEDY)
    return answer.choices[0].message.content or ""


def test_a_response_says_what_chat_says(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        input=QUESTION, instructions=INSTRUCTIONS, max_output_tokens=12, metadata={"a": "b"}, store=False, **GREEDY
    )
    assert answer.output_text == chat_text(client, MESSAGES, 12) != ""
    assert (answer.object, answer.model, answer.status) == ("response", "tiny", "incomplete")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.instructions == INSTRUCTIONS and answer.metadata == {"a": "b"} and answer.error is None
    [item] = answer.output
    assert item.type == "message" and (item.role, item.status) == ("assistant", "incomplete")
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=12, **GREEDY)
    assert chat.usage is not None and answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12


def test_a_conversation_goes_on_by_sending_its_items_back(client: openai.OpenAI) -> None:
    """The answer's own items, as the client dumps them, and new ones in each of their spellings."""
    first = client.responses.create(input=[{"role": "user", "content": QUESTION}], max_output_tokens=6, **GREEDY)
    parts = [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "why?"}]
    items: list[Any] = [
        {"role": "user", "content": QUESTION},
        *(item.model_dump() for item in first.output),
        {"type": "message", "role": "user", "content": parts},
    ]
    second = client.responses.create(input=items, max_output_tokens=6, **GREEDY)
    texts = [{"type": "text", "text": part["text"]} for part in parts]
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": texts},
    ]
    assert second.output_text == chat_text(client, messages, 6)


def test_calls_and_their_outputs_are_messages(client: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}', "status": "completed"}
    items: list[Any] = [
        {"role": "user", "content": QUESTION},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
    ]
    function = {"name": "f", "arguments": '{"x": 1}'}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    answer = client.responses.create(input=items, max_output_tokens=6, **GREEDY)
    assert answer.output_text == chat_text(client, messages, 6)


def test_a_stream_has_openais_events_in_their_order(client: openai.OpenAI) -> None:
    events: list[Any] = list(client.responses.create(input=QUESTION, max_output_tokens=8, stream=True, **GREEDY))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(["output_text.delta"] * len(deltas)),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len(deltas) > 1
    whole = client.responses.create(input=QUESTION, max_output_tokens=8, **GREEDY)
    last = events[-1].response
    assert "".join(deltas) == events[-4].text == events[-3].part.text == last.output_text == whole.output_text
    assert last.usage == whole.usage.model_copy(update={"input_tokens_details": last.usage.input_tokens_details})
    assert events[0].response.id == last.id and events[0].response.status == "in_progress"
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}


def test_the_clients_own_accumulation_agrees(client: openai.OpenAI) -> None:
    """`responses.stream` builds the response from events; it wants one that completes."""
    stop = chat_text(client, [{"role": "user", "content": QUESTION}], 8)[3:5]
    settings = GREEDY | {"extra_body": {"ignore_eos": True, "stop": [stop]}}
    with client.responses.stream(input=QUESTION, max_output_tokens=40, **settings) as stream:
        final = stream.get_final_response()
    whole = client.responses.create(input=QUESTION, max_output_tokens=40, **settings)
    assert final.status == whole.status == "completed"
    assert final.output_text == whole.output_text and stop not in whole.output_text


def test_the_async_client(server: RunningServer) -> None:
    async def ask() -> tuple[str, str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        whole = await client.responses.create(input=QUESTION, max_output_tokens=5, **GREEDY)
        stream = await client.responses.create(input=QUESTION, max_output_tokens=5, stream=True, **GREEDY)
        return whole.output_text, "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_chat(client: openai.OpenAI, stream: bool) -> None:
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], max_tokens=5, logprobs=True, top_logprobs=2, **GREEDY
    )
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5} | GREEDY
    answer: Any = client.responses.create(input=QUESTION, stream=stream, **asked)
    if stream:
        found = [entry for event in answer if event.type == "response.output_text.delta" for entry in event.logprobs]
    else:
        found = answer.output[0].content[0].logprobs
    expected = chat.choices[0].logprobs
    assert expected is not None and expected.content is not None
    assert [(entry.token, entry.logprob) for entry in found] == [(one.token, one.logprob) for one in expected.content]
    tops = [[(top.token, top.logprob) for top in entry.top_logprobs] for entry in found]
    assert tops == [[(top.token, top.logprob) for top in one.top_logprobs] for one in expected.content]


@pytest.mark.parametrize(
    ("body", "param", "complaint"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no response is stored"),
        ({"conversation": "c"}, "conversation", "no conversation is stored"),
        ({"store": True}, "store", "store"),
        ({"background": True}, "background", "background"),
        ({"truncation": "auto"}, "truncation", "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": 3}, "temperature", "temperature"),
        ({"messages": []}, "messages", "unknown or unsupported field"),
        ({"n": 2}, "n", "unknown or unsupported field"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "user"}]}, "input[0]", "input[0].content is required"),
        ({"input": [{"role": "user", "content": "a", "output": "b"}]}, "input[0]", "does not belong"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "image"),
        ({"input": []}, "input", "input"),
        ({"stop": [""]}, "stop[0]", "stop"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: RunningServer, body: dict[str, Any], param: str, complaint: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"model": "tiny", "input": "hi"} | body, timeout=20)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert complaint in error["message"] and error["param"] == param, error


def test_what_means_the_default_is_taken(server: RunningServer) -> None:
    nulls = ["instructions", "tools", "tool_choice", "text", "reasoning", "previous_response_id", "metadata", "stream"]
    defaults = {"background": False, "store": False, "truncation": "disabled", "service_tier": "auto", "include": []}
    body = {"input": "hi", "tools": [], "text": {"format": {"type": "text"}}, "reasoning": {"effort": None}}
    for more in (dict.fromkeys(nulls), defaults):
        answer = httpx.post(f"{server.url}/v1/responses", json=body | {"max_output_tokens": 1} | more, timeout=20)
        assert answer.status_code == 200, answer.text


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="hi")
    assert caught.value.code == "model_not_found"


def test_a_stream_that_fails_ends_with_an_event_that_says_so(server: RunningServer) -> None:
    """The engine is killed while it answers."""
    events: Any = server.client().responses.create(input=QUESTION, max_output_tokens=400, stream=True, **GREEDY)
    kinds = []
    for event in events:
        kinds.append(event.type)
        if event.type == "response.output_text.delta" and kinds.count(event.type) == 2:
            [engine] = server.engine_pids()
            os.kill(engine, signal.SIGKILL)
    assert kinds[-1] == "response.failed"
    assert "engine" in event.response.error.message and event.response.status == "failed"
    server.wait_healthy()
