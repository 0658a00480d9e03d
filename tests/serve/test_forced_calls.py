"""Calls that must be made: every answer is one that the schemas allow, in the model's own format, whoever writes it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from model.text.tokenizer import Tokenizer
from serve.grammar import GrammarCompiler, Vocabulary, json_grammar, regex_grammar
from serve.http.errors import ApiError
from serve.http.protocol import read
from serve.http.requests import ChatRequest
from serve.http.tools.answer import Answer, message_of
from serve.http.tools.forced import after_thoughts, calls_grammar, either
from serve.http.tools.formats import formats_of
from serve.http.tools.registry import REASONING_FORMATS, TOOL_PARSERS
from serve.http.tools.use import tool_use
from tests.serve.http_server import RunningServer, running_server
from tests.serve.test_tools_http import HERMES, LLAMA3, MISTRAL, PYTHONIC, SMOLLM3, save_family

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Zürich", 'a "b"', "</tool_call>"]}},
}
SCHEMAS: dict[str, Any] = {"weather": CITY, "now": None}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL, "smollm3": SMOLLM3, "pythonic": PYTHONIC}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_family(tmp_path_factory.mktemp("forced") / "model", HERMES, {}))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    vocabulary = Vocabulary.of(tokenizer, num_scores=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    return GrammarCompiler(vocabulary)


@pytest.fixture(scope="module")
def control(tokenizer: Tokenizer) -> dict[str, int]:
    return {spelling: token for token, spelling in tokenizer.control_tokens.items()}


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    matcher, ids = compiler.compile(grammar), tokenizer.encode(text, allow_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


WEATHER = '{"city": "Zürich", "days": 2}'
ACCEPTED = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": (f'{{"name": "weather", "parameters": {WEATHER}}}', '; {"name": "now", "parameters": {}}'),
    "mistral": (
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}}}', ', {"name": "now", "arguments": {}}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", ACCEPTED)
@pytest.mark.parametrize("spelled", [True, False], ids=["control", "text"])
def test_forced_calls_are_what_the_parser_reads(
    family: str, spelled: bool, compiler: GrammarCompiler, tokenizer: Tokenizer, control: dict[str, int]
) -> None:
    parser = TOOL_PARSERS[family]
    assert parser.form is not None
    end = "]" if family == "mistral" else ""
    one, more = ACCEPTED[family]
    grammars = {
        several: calls_grammar(parser.form, list(SCHEMAS.items()), control if spelled else {}, several=several)
        for several in (True, False)
    }

    def fits(grammar: str, text: str) -> bool:
        ids = tokenizer.encode(text, allow_special=spelled)
        matcher = compiler.compile(grammar)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert fits(grammars[False], one + end) and fits(grammars[True], one + end)
    assert fits(grammars[True], one + more + more + end) and not fits(grammars[False], one + more + end)
    for wrong in ("", "Sure.", one.replace("2", "4") + end, one.replace("weather", "other") + end, one + end + "!"):
        assert not fits(grammars[True], wrong)
    signatures = {"weather": ["city", "days"], "now": []}
    message = message_of(Answer(None, parser(signatures)).deltas(one + more + end, ended=True))
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()] == [
        ("weather", {"city": "Zürich", "days": 2}), ("now", {}),
    ]  # fmt: skip


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_grammars_begin_behind_thoughts(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    tags, inner = REASONING_FORMATS[name], regex_grammar("[0-9]+")
    optional, opened = (after_thoughts(inner, tags, {}, is_open=is_open) for is_open in (False, True))

    def fits(grammar: str, text: str) -> bool:
        return accepts(compiler, tokenizer, grammar, text)

    assert fits(optional, "42") and fits(optional, f"{tags.open}\n4 or 2?{tags.close}\n\n42")
    assert fits(opened, f"4 or 2?{tags.close}\n\n42")
    for wrong in (f"4 or 2?{tags.close}42", f"{tags.open}42", f"{tags.open}4{tags.close}5{tags.close}42"):
        assert not fits(optional, wrong)
    assert not fits(opened, "42")


def test_thoughts_end_with_a_control_token_where_that_is_one(
    compiler: GrammarCompiler, tokenizer: Tokenizer, control: dict[str, int]
) -> None:
    from serve.http.tools.reasoning import ReasoningFormat

    tags = ReasoningFormat("<tool_call>", "</tool_call>")  # which are control tokens of this vocabulary
    optional, opened = (after_thoughts('start: "42"', tags, control, is_open=is_open) for is_open in (False, True))
    assert accepts(compiler, tokenizer, optional, "<tool_call>so</tool_call>42")
    assert accepts(compiler, tokenizer, optional, "42")
    assert accepts(compiler, tokenizer, opened, "so</tool_call>\n42")
    assert not accepts(compiler, tokenizer, opened, "so42")


def test_content_of_a_grammar_or_calls(
    compiler: GrammarCompiler, tokenizer: Tokenizer, control: dict[str, int]
) -> None:
    form = TOOL_PARSERS["hermes"].form
    assert form is not None
    grammar = either(json_grammar(CITY), calls_grammar(form, [("now", None)], control, several=True))
    assert accepts(compiler, tokenizer, grammar, WEATHER)
    assert accepts(compiler, tokenizer, grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not accepts(compiler, tokenizer, grammar, '{"name": "now", "arguments": {}}')


CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
WRONG = [
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "none of the tools"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two functions of one name"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice", "needs tools"),
    ({"tool_choice": "always"}, "tool_choice", "always"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "reason"), WRONG)
def test_a_choice_that_cannot_be_made_is_refused(
    fields: dict[str, Any], param: str, reason: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        tool_use(read(CHAT | fields, ChatRequest), formats_of(tokenizer))
    assert (caught.value.status, str(caught.value.param).split(".")[0]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "both say what the output must be"),
        (
            {"tool_choice": NAMED, "tools": [{"function": {"name": "weather", "parameters": {"type": "array"}}}]},
            "object",
        ),
    ],
)
def test_grammars_that_contradict_are_refused(fields: dict[str, Any], reason: str, tokenizer: Tokenizer) -> None:
    from serve.http.structured_outputs import grammar_of

    request = read(CHAT | fields, ChatRequest)
    with pytest.raises(ApiError, match=reason):
        tool_use(request, formats_of(tokenizer)).grammar({}, grammar_of(request))


# Over HTTP, from a model with random weights


@pytest.fixture(scope="module", params=[*TEMPLATES, "no tools"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = TEMPLATES.get(request.param, HERMES.replace("tools", "cools"))
    folder = save_family(tmp_path_factory.mktemp("forced") / "model", template, {})
    with running_server(folder, folder.parent / "log", "--served-model-name", "tiny") as running:
        yield running


def ask(server: RunningServer, **fields: Any) -> Any:
    """Without thoughts, which this model would never end, nor the white space that it would put everywhere."""
    given: Any = {"messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, "max_tokens": 300} | fields
    given["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    given["logit_bias"] = dict.fromkeys(blank_tokens(server), -100)
    return server.client().chat.completions.create(model="tiny", **given)


def blank_tokens(server: RunningServer) -> list[str]:
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": " \n\r\t  \n\n"}).json()["tokens"]
    return [str(token) for token in ids]


def check(message: Any, names: set[str]) -> None:
    assert message.content is None
    for call in message.tool_calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name] or {"maxProperties": 0})


def test_a_required_call_is_made(server: RunningServer) -> None:
    """In eight choices, seeded, some with several calls, cut only by max_tokens."""
    choices = ask(server, tool_choice="required", n=8, seed=1, parallel_tool_calls=False).choices
    assert {choice.finish_reason for choice in choices} == {"tool_calls"}
    for choice in choices:
        check(choice.message, {"weather", "now"})
        assert len(choice.message.tool_calls) == 1
    for choice in ask(server, tool_choice="required", n=4, seed=1).choices:
        assert choice.message.tool_calls
        if choice.finish_reason != "length":
            check(choice.message, {"weather", "now"})


def test_a_named_call_is_the_answer(server: RunningServer) -> None:
    choice = ask(server, tool_choice=NAMED, temperature=0).choices[0]
    assert choice.finish_reason == "stop" and len(choice.message.tool_calls) == 1
    check(choice.message, {"weather"})
    events = list(ask(server, tool_choice=NAMED, temperature=0, stream=True))
    deltas = [call for event in events for call in event.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "weather"
    text = "".join(call.function.arguments or "" for call in deltas)
    assert text == choice.message.tool_calls[0].function.arguments


def test_tools_beside_an_output_that_must_be_json(server: RunningServer) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    try:
        choices = ask(server, response_format=wanted, n=8, seed=2, parallel_tool_calls=False).choices
    except openai.BadRequestError as error:
        assert error.param == "tools"  # a template without tools, or a format without a grammar
        return
    for choice in choices:
        if choice.message.tool_calls:
            check(choice.message, {"weather", "now"})
        else:
            jsonschema.validate(json.loads(choice.message.content), CITY)


def test_anthropics_clients_are_told_of_a_tool_whoever_chose_it(server: RunningServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = client.messages.create(
        model="tiny",
        max_tokens=1500,
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[{"name": "weather", "input_schema": CITY}],
        tool_choice={"type": "tool", "name": "weather"},
        extra_body={"seed": 1, "chat_template_kwargs": {"enable_thinking": False}},
    )
    [block] = message.content
    assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
    jsonschema.validate(block.input, CITY)
