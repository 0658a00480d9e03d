"""LangChain's own classes, unmodified: structured output in its three methods, and an agent that calls a tool."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.http_server import SCRIPTED, RunningServer, running_server
from tests.serve.test_tools_http import HERMES, save_family

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
SCHEMA: dict[str, Any] = {
    "title": "Forecast",
    "description": "What the weather will be",
    "type": "object",
    "properties": {"sky": {"enum": ["sunny", "grey"]}, "days": {"enum": [1, 2]}},
    "required": ["sky", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def quoting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_family(tmp_path_factory.mktemp("langchain") / "model", HERMES, {"Weather?": CALL})
    with running_server(folder, folder.parent / "log", "--served-model-name", "tiny", program=SCRIPTED) as server:
        yield server


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model with random weights, which only a grammar makes answer in JSON."""
    folder = save_family(tmp_path_factory.mktemp("langchain") / "model", HERMES, {})
    with running_server(folder, folder.parent / "log", "--served-model-name", "tiny") as server:
        yield server


def model(server: RunningServer, **settings: Any) -> Any:
    base = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "tiny", "max_retries": 0}
    return langchain_openai.ChatOpenAI(**base | settings)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_calls_a_tool_and_answers(quoting: RunningServer, streaming: bool) -> None:
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    asked: list[tuple[str, int]] = []

    def weather(city: str, days: int) -> str:
        """What the weather will be in a city."""
        asked.append((city, days))
        return "sunny"

    agent = agents.create_agent(model(quoting, streaming=streaming), [weather])
    messages = agent.invoke({"messages": [{"role": "user", "content": "Weather?"}]})["messages"]
    assert asked == [("Zürich", 2)]
    assert messages[-1].content == "It will be sunny."


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output(random: RunningServer, method: str) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    chat = model(random, extra_body=extra, max_tokens=1500, seed=1)
    answer = chat.with_structured_output(SCHEMA, method=method, include_raw=method == "json_mode").invoke(
        "JSON, please"
    )
    if method == "json_mode":  # any object
        assert isinstance(json.loads(answer["raw"].content), dict)
        return
    assert answer["sky"] in ("sunny", "grey") and answer["days"] in (1, 2)
