"""Structured output over HTTP: OpenAI's and vLLM's spellings for real clients, and what strangers can do."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.trials import trials

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
EXPLODING = {"allOf": [{"type": "string", "pattern": f"a.{{{n},{n + 30}}}b"} for n in range(20)]}
"""llguidance takes seconds to find out whether any text is of it."""
CRASHING = "\n".join(["start: r0", *(f'r{n}: "a{n}" r{(n + 1) % 4000}?' for n in range(4000))])
"""llguidance overflows its stack over it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_folder(tmp_path_factory.mktemp("structured") / "model")
    with running_server(folder, folder.parent / "log", "--served-model-name", "tiny") as running:
        yield running


def answer(server: RunningServer, route: str = "chat/completions", **fields: Any) -> httpx.Response:
    what: dict[str, Any] = {"messages": MESSAGES} if route == "chat/completions" else {"prompt": "hi"}
    return httpx.post(f"{server.url}/v1/{route}", json=what | {"max_tokens": 150, "seed": 1} | fields, timeout=30)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return choice["message"]["content"] if "message" in choice else choice["text"]


TIGHT = {"disable_any_whitespace": True}


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA} | TIGHT},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": " "}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ", "guided_regex": None},
    ],
)
def test_every_spelling_of_a_schema_gives_json_of_it(server: RunningServer, route: str, fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text_of(answer(server, route, **fields, max_tokens=1500))), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "possible"),
    [
        ({"guided_choice": ["yes", 'say "no"']}, {"yes", 'say "no"'}),
        ({"structured_outputs": {"choice": ["yes", "é"]}}, {"yes", "é"}),
        ({"guided_regex": "[ab]c"}, {"ac", "bc"}),
        ({"structured_outputs": {"regex": "a|b"}}, {"a", "b"}),
        ({"guided_grammar": 'root ::= "x" | "y" "z"'}, {"x", "yz"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "y" "z"'}}, {"x", "yz"}),
    ],
)
def test_choices_expressions_and_grammars(server: RunningServer, fields: dict[str, Any], possible: set[str]) -> None:
    assert {text_of(answer(server, seed=seed, **fields)) for seed in range(6)} <= possible


def test_a_json_object_is_one(server: RunningServer) -> None:
    found = answer(server, structured_outputs={"json_object": True} | TIGHT, max_tokens=1000)
    text = found.json()["choices"][0]["message"]["content"]
    assert text.startswith("{")
    if found.json()["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_an_answer_without_room_is_incomplete_and_says_so(server: RunningServer) -> None:
    found = answer(server, response_format=FORMAT, max_tokens=3).json()["choices"][0]
    assert found["finish_reason"] == "length" and found["message"]["content"].startswith("{")


class Thing(pydantic.BaseModel):
    """What `parse` is asked for; OpenAI's client makes the schema."""

    flag: bool
    kind: Literal["red", "green"]
    inner: "Inner | None"


class Inner(pydantic.BaseModel):
    """A part that is referred to."""

    number: Literal[1, 2, 3]


def test_openai_parses_a_pydantic_model(server: RunningServer) -> None:
    for seed in range(3):
        parsed = server.client().chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Thing, seed=seed, max_tokens=1500
        )
        assert isinstance(parsed.choices[0].message.parsed, Thing), parsed.choices[0]


def test_a_stream_with_several_choices_gives_the_schema_in_each(server: RunningServer) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "stream": True, "n": 3, "seed": 4, "max_tokens": 200}
    texts = ["", "", ""]
    guided = {"guided_json": SCHEMA, "guided_whitespace_pattern": " "}
    for chunk in server.client().chat.completions.create(**body, extra_body=guided):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain_reads_structured_output(server: RunningServer, method: Any) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="tiny", max_tokens=1900, seed=2, max_retries=0
    )
    kind = Thing if method == "json_schema" else None
    found = model.with_structured_output(kind, method=method, include_raw=True).invoke("Answer in JSON")
    if method == "json_schema":
        assert isinstance(found["parsed"], Thing)
    else:
        assert found["raw"].content.startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_choice": []}, "guided_choice", "length >= 1"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "foo"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "cannot be read"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "both say"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unsupported"),
        ({"guided_json": {}, "response_format": FORMAT}, "guided_json", "both say"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"guided_json": {}, "min_tokens": 2}, "min_tokens", "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, None, "schema is required"),
        ({"response_format": FORMAT | {"json_schema": {"name": "x", "schema": {"not": {}}}}}, None, "not"),
        ({"guided_regex": "x" * 300_000}, "guided_regex", "at most"),
    ],
)
def test_what_cannot_be_promised_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str | None, told: str
) -> None:
    found = answer(server, **fields)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert told in error["message"] and "\n" not in error["message"] and len(error["message"]) < 450
    assert error["param"] == param or (param is None and error["param"].startswith("response_format.json_schema"))


BOMBS: dict[str, Callable[[int], tuple[dict[str, Any], str]]] = {
    "takes for ever": lambda number: (
        {"guided_json": EXPLODING | {"title": str(number)}},
        "more than 1 s to compile",
    ),
    "crashes": lambda number: ({"guided_grammar": f"{CRASHING}\n// {number}"}, "too large or too deep"),
    "long GBNF": lambda number: (
        {"guided_grammar": f"# {number}\nroot ::= " + " | ".join(['"a"'] * 300_000)},
        "at most 262144 bytes",
    ),
    "GBNF that Lark says longer": lambda number: (
        {"guided_grammar": f"# {number}\nroot ::= " + " | ".join(['"a"'] * 40_000)},
        "at most 262144 bytes",
    ),
    "many choices": lambda number: ({"guided_choice": [f"{number}"] * 150_000}, "at most 262144 bytes"),
    "empty choices": lambda number: ({"guided_choice": [""] * 150_000 + [f"{number}"]}, "at most 262144 bytes"),
    "deep text": lambda number: ({"guided_json": '{"items":' * 10_000 + f"{number}" + "}" * 10_000}, "too deep"),
}
"""Grammars made to hurt, by number so that none is remembered, and what is said of them."""


LAG = "potstill:event_loop_lag_seconds"


@contextlib.contextmanager
def beside(work: Callable[[], float]) -> Iterator[list[float]]:
    """Meanwhile do this again and again in another thread; what it gave each time."""
    given: list[float] = []
    stop = threading.Event()

    def again() -> None:
        while not stop.is_set():
            given.append(work())

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield given
    finally:
        stop.set()
        thread.join()


def seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def test_bombs_cost_one_400_each_while_others_are_served(server: RunningServer) -> None:
    """They take the checker's processor time, never a step, and hold up no stream; none takes anything down.

    Of a busy machine, what a timer of this process is late is allowed on top.
    """
    client = server.client()
    pids, restarts, before = (
        server.engine_pids(),
        server.metric("potstill:engine_restarts_total"),
        server.histogram(LAG),
    )
    with (
        beside(lambda: seconds(lambda: client.completions.create(model="tiny", prompt="hi", max_tokens=1))) as others,
        beside(lambda: seconds(lambda: time.sleep(0.05)) - 0.05) as overslept_s,
    ):
        began = time.monotonic()
        for number in range(trials(1, 12)):
            for name, bomb in BOMBS.items():
                fields, told = bomb(number)
                found = answer(server, **fields)
                assert found.status_code == 400 and told in found.text, (name, found.text[:300])
        assert time.monotonic() - began < 20 * trials(1, 12)
    counts = {edge: count - before[edge] for edge, count in server.histogram(LAG).items()}
    allowed_s = min(edge for edge in counts if edge >= 0.05 + max(overslept_s))
    assert counts[math.inf] > 10 and counts[allowed_s] >= 0.99 * counts[math.inf] - 1, counts
    assert len(others) > 20 and sorted(others)[len(others) * 9 // 10] < 0.5
    assert text_of(answer(server, guided_choice=["fine"])) == "fine"
    assert server.metric("potstill:engine_restarts_total") == restarts and set(pids) <= set(server.engine_pids())


def test_a_grammar_is_tried_once(server: RunningServer) -> None:
    fields = {"guided_json": EXPLODING | {"title": "again"}}
    took = []
    for _ in range(2):
        began = time.monotonic()
        assert answer(server, **fields).status_code == 400
        took.append(time.monotonic() - began)
    assert took[0] > 0.9 and took[1] < 0.5


def test_text_asks_for_nothing(server: RunningServer) -> None:
    free = answer(server, max_tokens=20).json()["choices"]
    assert answer(server, max_tokens=20, response_format={"type": "text"}).json()["choices"] == free


def test_a_late_check_ends_with_the_deadline(server: RunningServer) -> None:
    began = time.monotonic()
    found = answer(server, guided_json=EXPLODING | {"title": "late"}, deadline_s=0.3)
    assert found.status_code == 504 and time.monotonic() - began < 1.5


def test_the_checker_ends_with_the_server(tmp_path: Path) -> None:
    with running_server(save_tiny_folder(tmp_path / "model"), tmp_path / "log") as running:
        assert answer(running, guided_choice=["a"]).status_code == 200
        children = running.engine_pids()
        assert len(children) == 2
        assert running.terminate() == 0
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in children):
            return
        time.sleep(0.05)
    raise AssertionError("a process has outlived its server")


def test_a_checker_that_dies_is_replaced(server: RunningServer) -> None:
    text_of(answer(server, guided_choice=["a"]))
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.engine_pids()}
    (checker,) = [pid for pid, name in names.items() if b"grammar_process" in name]
    os.kill(checker, signal.SIGKILL)
    response, ends = answer(server, guided_choice=["b"]), time.monotonic() + 30
    while response.status_code == 503 and time.monotonic() < ends:  # until the server knows
        time.sleep(0.1)
        response = answer(server, guided_choice=["b"])
    assert text_of(response) == "b"


def test_an_openai_error_is_a_bad_request(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="guided_regex"):
        server.client().completions.create(model="tiny", prompt="hi", extra_body={"guided_regex": "["})
