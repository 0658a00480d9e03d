"""Tools and thoughts in the other protocols, through their own clients: what chat finds, in their words."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from model.text.tokenizer import Tokenizer
from tests.serve.http_server import SCRIPTED, RunningServer, running_server
from tests.serve.test_tools_http import FAMILIES, HERMES, JSON_CALL, PARAMETERS, TWO, save_family

ANSWERS = {
    "Weather?": FAMILIES["hermes"][1],
    "Think": f"<think>\nIs it so?\n</think>\n\nYes.\n<tool_call>{JSON_CALL}</tool_call>",
}
TOOLS: list[Any] = [
    {"name": "weather", "description": "What the weather will be", "parameters": PARAMETERS},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
OLLAMA_TOOLS = [{"type": "function", "function": tool} for tool in TOOLS]
ANTHROPIC_TOOLS = [
    {name if name != "parameters" else "input_schema": value for name, value in tool.items()} for tool in TOOLS
]
RESPONSES_TOOLS: Any = [{"type": "function", "strict": False} | tool for tool in TOOLS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_family(tmp_path_factory.mktemp("translated") / "model", HERMES, ANSWERS)
    with running_server(folder, folder.parent / "log", "--served-model-name", "tiny", program=SCRIPTED) as running:
        yield running


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# OpenAI's responses


def test_calls_of_a_response_whole_streamed_and_sent_back(server: RunningServer) -> None:
    client = server.client()
    whole = client.responses.create(model="tiny", input="Weather?", tools=RESPONSES_TOOLS)
    message, *calls = whole.output
    assert message.type == "message" and whole.output_text == "I look it up." and whole.status == "completed"
    assert [(call.name, json.loads(call.arguments)) for call in calls if call.type == "function_call"] == TWO
    with client.responses.stream(model="tiny", input="Weather?", tools=RESPONSES_TOOLS) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    streamed: Any = final.output[1:]
    assert [(call.name, json.loads(call.arguments)) for call in streamed] == TWO
    items: list[Any] = [*asked("Weather?"), *(item.model_dump() for item in whole.output)]
    for call in calls:
        assert call.type == "function_call"
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    second = client.responses.create(model="tiny", input=items, tools=RESPONSES_TOOLS)
    assert second.output_text == "It will be sunny."


def test_thoughts_of_a_response_are_items(server: RunningServer) -> None:
    client = server.client()
    whole: Any = client.responses.create(model="tiny", input="Think", tools=RESPONSES_TOOLS)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "Is it so?" and whole.output_text == "Yes."
    events: list[Any] = list(client.responses.create(model="tiny", input="Think", tools=RESPONSES_TOOLS, stream=True))
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Is it so?"
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call"]
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1, 2]
    assert [item.type for item in events[-1].response.output] == added
    items: list[Any] = [*asked("Think"), *(item.model_dump() for item in whole.output), *asked("Thanks")]
    assert client.responses.create(model="tiny", input=items).output_text == "You are welcome."


def test_one_call_where_parallel_calls_are_not_wanted(server: RunningServer) -> None:
    settings: Any = {"model": "tiny", "input": "Weather?", "tools": RESPONSES_TOOLS, "parallel_tool_calls": False}
    answer = server.client().responses.create(**settings)
    assert [item.type for item in answer.output] == ["message", "function_call"] and not answer.parallel_tool_calls


def test_without_a_choice_of_tools_there_are_none(server: RunningServer) -> None:
    answer = server.client().responses.create(model="tiny", input="Weather?", tools=RESPONSES_TOOLS, tool_choice="none")
    assert [item.type for item in answer.output] == ["message"] and "weather" in answer.output_text


# Anthropic


@pytest.fixture
def anthropic_client(server: RunningServer) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_calls_of_a_message_whole_streamed_and_sent_back(anthropic_client: Any) -> None:
    settings: Any = {"model": "tiny", "max_tokens": 400, "tools": ANTHROPIC_TOOLS}
    whole = anthropic_client.messages.create(messages=asked("Weather?"), **settings)
    with anthropic_client.messages.stream(messages=asked("Weather?"), **settings) as stream:
        final = stream.get_final_message()
    for answer in (whole, final):
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
        assert answer.content[0].text == "I look it up."
        assert [(block.name, block.input) for block in answer.content[1:]] == TWO
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"} for block in whole.content[1:]]
    messages = [
        *asked("Weather?"),
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    second = anthropic_client.messages.create(messages=messages, **settings)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It will be sunny.")


def test_thoughts_of_a_message_are_blocks(anthropic_client: Any, server: RunningServer) -> None:
    settings: Any = {"model": "tiny", "max_tokens": 400, "tools": ANTHROPIC_TOOLS}
    whole = anthropic_client.messages.create(messages=asked("Think"), **settings)
    with anthropic_client.messages.stream(messages=asked("Think"), **settings) as stream:
        final = stream.get_final_message()
    for answer in (whole, final):
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert (answer.content[0].thinking, answer.content[1].text) == ("Is it so?", "Yes.")
    messages = [*asked("Think"), {"role": "assistant", "content": whole.content}, *asked("Thanks")]
    answer = anthropic_client.messages.create(messages=messages, model="tiny", max_tokens=400)
    assert answer.content[0].text == "You are welcome."


def test_arguments_that_are_null_stay_so(anthropic_client: Any, server: RunningServer) -> None:
    """Counted as the model would read them: nulls in a call's input are values."""
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": None, "days": 2}}
    messages = [*asked("Weather?"), {"role": "assistant", "content": [call]}]
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=[*messages, *asked("Thanks")])
    function = {"name": "weather", "arguments": '{"city":null,"days":2}'}
    chat = [
        *asked("Weather?"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]},
        *asked("Thanks"),
    ]
    count = httpx.post(f"{server.url}/tokenize", json={"messages": chat}, timeout=20).json()["count"]
    assert counted.input_tokens == count


def test_tools_are_counted(anthropic_client: Any, server: RunningServer) -> None:
    folder = server.lines[0].rsplit(" ", 1)[-1].strip()
    ids = Tokenizer.load(folder).chat_token_ids(asked("hi"), add_generation_prompt=True, tools=OLLAMA_TOOLS)
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=asked("hi"), tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens == len(ids)


# Ollama


@pytest.fixture
def ollama_client(server: RunningServer) -> Any:
    ollama = pytest.importorskip("ollama", reason="the ollama client is not installed")
    return ollama.Client(host=server.url)


def test_calls_of_ollamas_chat_whole_streamed_and_sent_back(ollama_client: Any) -> None:
    whole = ollama_client.chat("tiny", asked("Weather?"), tools=OLLAMA_TOOLS)
    assert whole.message.content == "I look it up." and whole.done_reason == "stop"
    lines = list(ollama_client.chat("tiny", asked("Weather?"), tools=OLLAMA_TOOLS, stream=True))
    assert "".join(line.message.content for line in lines) == "I look it up."
    streamed = [call for line in lines for call in line.message.tool_calls or ()]
    for calls in (whole.message.tool_calls, streamed):
        assert [(call.function.name, call.function.arguments) for call in calls] == TWO
    results = [{"role": "tool", "tool_name": name, "content": "sunny"} for name, _ in TWO]
    second = ollama_client.chat("tiny", [*asked("Weather?"), whole.message, *results], tools=OLLAMA_TOOLS)
    assert second.message.content == "It will be sunny."


def test_thoughts_of_ollamas_chat_are_a_field(ollama_client: Any) -> None:
    whole = ollama_client.chat("tiny", asked("Think"), tools=OLLAMA_TOOLS).message
    assert (whole.thinking, whole.content) == ("Is it so?", "Yes.")
    lines = list(ollama_client.chat("tiny", asked("Think"), tools=OLLAMA_TOOLS, stream=True))
    assert "".join(line.message.thinking or "" for line in lines) == "Is it so?"
    generated = ollama_client.generate("tiny", "Think")
    assert generated.thinking == "Is it so?" and generated.response.startswith("Yes.")
    second = ollama_client.chat("tiny", [*asked("Think"), whole, *asked("Thanks")])
    assert second.message.content == "You are welcome."
    assert {"completion", "tools", "thinking"} == set(ollama_client.show("tiny").capabilities)


def test_what_chat_refuses_is_refused_in_each_protocol(server: RunningServer) -> None:
    """A tool without a name, in the words and the error shape of each."""
    bodies: dict[str, Any] = {
        "/v1/responses": {"input": "hi", "tools": [{"type": "function"}]},
        "/v1/messages": {"max_tokens": 1, "messages": asked("hi"), "tools": [{"input_schema": {}}]},
        "/api/chat": {"model": "tiny", "messages": asked("hi"), "tools": [{"type": "function", "function": {}}]},
    }
    for path, body in bodies.items():
        answer = httpx.post(server.url + path, json=body, timeout=20)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert "name is required" in (error if isinstance(error, str) else error["message"])
    with pytest.raises(openai.BadRequestError):
        server.client().responses.create(model="tiny", input="hi", tools=[{"type": "web_search"}])
