"""Answers taken apart: any cut of a text gives what the whole gives, calls are what json reads, and no text is lost."""

import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.http.tools.answer import merged
from serve.http.tools.calls import ToolParser
from serve.http.tools.hermes import HermesParser
from serve.http.tools.llama3 import Llama3Parser
from serve.http.tools.mistral import MistralParser
from serve.http.tools.pieces import Arguments, Call, Content, Parser, Piece, Reasoning
from serve.http.tools.python_calls import PythonParser
from serve.http.tools.reasoning import ReasoningParser
from serve.http.tools.registry import REASONING_FORMATS, TOOL_PARSERS
from serve.http.tools.smollm3 import SmolLM3Parser
from tests.trials import trials

TOOLS = {"look_up": ["city", "days"], "f": ["a"], "no-arguments": []}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
HARD_TEXT = st.sampled_from(
    ["</tool_call>", "<tool_call>", '"}}', "\\", "[TOOL_CALLS]", "{", "]", "'", "é\n", "[ARGS]", ")"]
)
ARGUMENTS = st.dictionaries(st.text(max_size=5) | HARD_TEXT, JSON | HARD_TEXT, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3)
PROSE = st.text(st.characters(exclude_characters='<[{;,"|', exclude_categories=["Cs"]), max_size=20)
CUTS = st.lists(st.integers(0, 10**6), max_size=12)


def parse(parser: Parser, pieces: Iterable[str]) -> list[Piece]:
    found = [piece for text in pieces for piece in parser.push(text)]
    return merged(found + parser.finish())


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:stop] for start, stop in zip([0, *ends], [*ends, len(text)], strict=True)]


def dumped(value: Any, style: int) -> str:
    """One of the spellings that models have for a JSON value."""
    styles: list[dict[str, Any]] = [{}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}]
    return json.dumps(value, **styles[style % len(styles)])


def expected(before: str, calls: list[tuple[str, dict[str, Any]]], after: str) -> list[Any]:
    """Content without the white space around calls, and calls with their arguments as json reads them."""
    content = [text for text in (before.rstrip(), after.lstrip()) if text]
    return [*content[: bool(before.rstrip())], *calls, *content[bool(before.rstrip()) :]]


def read(pieces: list[Piece]) -> list[Any]:
    """The pieces of an answer in the form of `expected`."""
    result: list[Any] = []
    for piece in pieces:
        match piece:
            case Content(text):
                result.append(text)
            case Call(name):
                result.append((name, None))
            case Arguments(text):
                result[-1] = (result[-1][0], json.loads(text))
    return result


def call_object(name: str, arguments: dict[str, Any], style: int, key: str = "arguments") -> str:
    return dumped({"name": name, key: arguments}, style)


def hermes(calls: list[tuple[str, dict[str, Any]]], style: int) -> str:
    if style % 3 == 2:  # SmolLM2 writes a list
        return f"<tool_call>{json.dumps([{'name': name, 'arguments': given} for name, given in calls])}</tool_call>"
    order = reversed if style % 3 else list
    objects = [dumped(dict(order([("name", name), ("arguments", given)])), style) for name, given in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def llama3(calls: list[tuple[str, dict[str, Any]]], style: int) -> str:
    text = "; ".join(call_object(name, given, style, "parameters") for name, given in calls)
    return "<|python_tag|>" + text


def mistral(calls: list[tuple[str, dict[str, Any]]], style: int) -> str:
    if style % 3 == 0:
        listed = [{"name": name, "arguments": given, "id": "a1b2c3d4e"} for name, given in calls]
        return "[TOOL_CALLS] " + dumped(listed, style)
    between = "[CALL_ID]a1b2c3d4e[ARGS]" if style % 3 == 1 else "[ARGS]"
    return "".join(f"[TOOL_CALLS]{name}{between}{dumped(given, style)}" for name, given in calls)


WRITERS: list[tuple[type[ToolParser], Callable[..., str]]] = [
    (HermesParser, hermes), (SmolLM3Parser, hermes), (Llama3Parser, llama3), (MistralParser, mistral),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "write"), WRITERS, ids=lambda item: getattr(item, "name", ""))
@settings(max_examples=150, deadline=None, derandomize=True)
@given(before=PROSE, calls=CALLS, after=PROSE, style=st.integers(0, 11), cuts=CUTS)
def test_calls_are_those_that_json_reads_however_the_text_is_cut(
    parser: type[ToolParser], write: Any, before: str, calls: Any, after: str, style: int, cuts: list[int]
) -> None:
    text = before + write(calls, style) + after
    assert read(parse(parser(TOOLS), cut(text, cuts))) == expected(before, calls, after)
    assert read(parse(parser(TOOLS), text)) == expected(before, calls, after)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls=CALLS, after=PROSE, style=st.integers(0, 3), cuts=CUTS)
def test_llama_calls_need_no_tag_when_they_name_a_tool(calls: Any, after: str, style: int, cuts: list[int]) -> None:
    text = llama3(calls, style).removeprefix("<|python_tag|>") + after
    assert read(parse(Llama3Parser(TOOLS), cut(text, cuts))) == expected("", calls, after)
    other = text.replace('"look_up"', '"Lyon"').replace('"f"', '"Fes"').replace('"no-arguments"', '"Nice"')
    found = parse(Llama3Parser(TOOLS), cut(other, cuts))
    assert found == [Content(other)]


PYTHON_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | HARD_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
PYTHON_CALLS = st.lists(
    st.tuples(st.sampled_from(["look_up", "f"]), st.dictionaries(st.sampled_from("abcd"), PYTHON_VALUE, max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip


def python_call(name: str, given: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls=PYTHON_CALLS, after=PROSE, tagged=st.booleans(), cuts=CUTS)
def test_python_calls_are_those_that_python_would_make(calls: Any, after: str, tagged: bool, cuts: list[int]) -> None:
    text = f"[{', '.join(python_call(*call) for call in calls)}]"
    text = f"<|python_start|>{text}<|python_end|>" if tagged else text
    assert read(parse(PythonParser(TOOLS), cut(text + after, cuts))) == expected("", calls, after)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(before=PROSE, calls=PYTHON_CALLS, after=PROSE, printed=st.booleans(), cuts=CUTS)
def test_code_that_only_calls_tools_is_calls(
    before: str, calls: Any, after: str, printed: bool, cuts: list[int]
) -> None:
    lines = [python_call(*call) for call in calls]
    code = "\n".join(f"print({line})" if printed else line for line in lines)
    found = parse(SmolLM3Parser(TOOLS), cut(f"{before}<code>\n{code}\n</code>{after}", cuts))
    if "</code>" not in code:
        assert read(found) == expected(before, calls, after)


# What is no call

FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<code>", "</code>"),
        *(
            "<|python_start|>",
            "word",
            "é",
            "<",
            "<tool_",
            "f",
            "-1",
            "=",
            "\\",
            " ",
            "\n",
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
        ),
        *(",", ":", ";", '"', "'", '"name"', '"arguments"', '"parameters"', '{"name": "f", "arguments": {', '"f"'),
        *("f(a=1)", "null", "}}"),
    ]
)
FORMAT = r"</?tool_call>|\[TOOL_CALLS\]|\[ARGS\]|<\|python_(tag|start|end)\|>|</?code>|name|arguments|parameters|null"


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=trials(400, 10_000), deadline=None, derandomize=True)
@given(fragments=st.lists(FRAGMENTS, max_size=25), cuts=CUTS)
def test_any_text_gives_the_same_in_pieces_and_loses_nothing(name: str, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    whole = parse(TOOL_PARSERS[name](TOOLS), [text])
    assert parse(TOOL_PARSERS[name](TOOLS), cut(text, cuts)) == whole
    assert parse(TOOL_PARSERS[name](TOOLS), text) == whole
    if not any(isinstance(piece, Call) for piece in whole):
        assert whole == merged([Content(text)])
    shown = [piece.name if isinstance(piece, Call) else piece.text for piece in whole]
    left = words_of(re.sub(FORMAT, " ", text))
    for word in words_of(re.sub(FORMAT, " ", "\n".join(shown))):
        if word in left:
            left.remove(word)
    assert not left, f"lost: {left} of {text!r}, given {whole}"


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+|<\w*", text)


BROKEN = [
    (HermesParser, '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
    (HermesParser, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "argum'),
    (HermesParser, "<tool_call>"),
    (HermesParser, "<tool_call>[]</tool_call>"),
    (HermesParser, "a <tool_call"),
    (Llama3Parser, '{"name": "f"}'),
    (Llama3Parser, '{"answer": 42, "name": "f", "parameters": {}}'),
    (Llama3Parser, "<|python_tag|>print(1)"),
    (Llama3Parser, ' {"name": "f", "parameters"'),
    (MistralParser, "[TOOL_CALLS]f[ARGS]"),
    (MistralParser, "[TOOL_CALLS] [1]"),
    (MistralParser, "[TOOL_CALLS]"),
    (PythonParser, "[f(a=open('x'))]"),
    (PythonParser, "[f(**{})]"),
    (PythonParser, "[f(1, 2)]"),
    (PythonParser, "[f(1, a=1)]"),
    (PythonParser, "[f(a=1e999)]"),
    (PythonParser, "[f(a={1})]"),
    (PythonParser, "[f(a='\\ud800')]"),
    (PythonParser, "[unknown(a=1)]"),
    (PythonParser, "[f(a=" + "(" * 5000 + ")" * 5000 + ")]"),
    (PythonParser, "[f(a=" + "-" * 9000 + "1)]"),
    (PythonParser, "[f(a=" + "9" * 5000 + ")]"),
    (PythonParser, "[f(a=[" + "1, " * 6000 + "1])]"),
    (SmolLM3Parser, "<code>import os</code>"),
    (SmolLM3Parser, "<code>x = f(a=1)</code>"),
    (SmolLM3Parser, "<code>f(a=1); unknown(2)</code>"),
    (SmolLM3Parser, "<code></code>"),
    (SmolLM3Parser, "<code>f(a=1)"),
]


@pytest.mark.parametrize(("parser", "text"), BROKEN, ids=lambda item: str(item)[:40])
def test_what_does_not_parse_stays_content(parser: type[ToolParser], text: str) -> None:
    assert parse(parser(TOOLS), [text]) == parse(parser(TOOLS), text) == [Content(text)]


def test_a_call_that_was_cut_keeps_what_came_of_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    assert parse(HermesParser(TOOLS), [text]) == [Call("f"), Arguments('{"a": "b')]
    for end in ("}", "}\n", "}}", "}}\n", "}}\n</tool", "}}\n</tool_call>\n"):
        assert parse(HermesParser(TOOLS), [text + '"' + end]) == [Call("f"), Arguments('{"a": "b"}')]


def test_arguments_come_as_they_are_written() -> None:
    parser = HermesParser(TOOLS)
    found = [
        parser.push(piece) for piece in ("Sure. ", '<tool_call>{"name": "f", ', '"arguments": ', '{"a"', ": 1", "}}")
    ]
    assert found == [
        [Content("Sure.")], [], [], [Call("f"), Arguments('{"a"')], [Arguments(": 1")], [Arguments("}")],
    ]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize(
    "fragment",
    [
        *("<tool_call>", '<tool_call>{"name": "', '{"name": "f", "arguments": {"a": [', "[TOOL_CALLS]f", "[f(a=("),
        *('<tool_call>{"arguments": {"x": ', "<code>f(a=1)\n", '{"name": "f", "id": "', "<|python_tag|>{", "\\", " \n"),
    ],
)
def test_long_texts_take_linear_time(name: str, fragment: str) -> None:
    """64 KiB in pieces of 16 characters."""
    text = fragment * (65_536 // len(fragment))
    began = time.process_time()
    parse(TOOL_PARSERS[name](TOOLS), [text[at : at + 16] for at in range(0, len(text), 16)])
    assert time.process_time() - began < 1.0


# Thoughts


@pytest.mark.parametrize("name", REASONING_FORMATS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(thoughts=PROSE, answer=PROSE, opened=st.booleans(), cuts=CUTS)
def test_thoughts_are_split_off(name: str, thoughts: str, answer: str, opened: bool, cuts: list[int]) -> None:
    tags = REASONING_FORMATS[name]
    text = f"{'' if opened else tags.open}\n{thoughts}\n{tags.close}\n\n{answer}"
    found = parse(ReasoningParser(tags, inside=opened), cut(text, cuts))
    assert found == merged([Reasoning(thoughts.strip()), Content(answer.lstrip())])


@settings(max_examples=trials(300, 2000), deadline=None, derandomize=True)
@given(
    fragments=st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", " ", "\n", "word", "<"]), max_size=10),
    inside=st.booleans(), cuts=CUTS,
)  # fmt: skip
def test_any_thoughts_give_the_same_in_pieces(fragments: list[str], inside: bool, cuts: list[int]) -> None:
    text, tags = "".join(fragments), REASONING_FORMATS["qwen3"]
    whole = parse(ReasoningParser(tags, inside=inside), [text])
    assert parse(ReasoningParser(tags, inside=inside), cut(text, cuts)) == whole
    if not inside and not text.lstrip().startswith("<think>"):
        assert whole == merged([Content(text)])


def test_thoughts_that_never_end_are_thoughts() -> None:
    tags = REASONING_FORMATS["deepseek_r1"]
    assert parse(ReasoningParser(tags, inside=bool(tags.is_open_after(""))), ["so it ", "goes on"]) == [
        Reasoning("so it goes on")
    ]
    assert parse(ReasoningParser(REASONING_FORMATS["qwen3"], inside=False), ["an ", "answer"]) == [Content("an answer")]
