"""Calls written as Python: [f(a=1), g(b='x')], as Llama 3.2 and 4 have it. They are parsed, never run."""

import ast
import json
import re
import warnings
from collections.abc import Sequence

from serve.http.tools.calls import NoCall, ToolParser, ValueEnd
from serve.http.tools.pieces import Arguments, Steps

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
PYTHON_MARKS = {
    "": re.compile(r"[\"'()\[\]{}]"),
    "'": re.compile(r"['\\]"),
    '"': re.compile(r'["\\]'),
}
"""What matters outside strings, and in those with either quote."""
MAX_SOURCE = 16_384
"""Characters; longer source is no call, so that parsing stays cheap."""


class PythonEnd(ValueEnd):
    """The end of a value in brackets, as Python has it: strings have quotes of two kinds."""

    marks = PYTHON_MARKS


class PythonParser(ToolParser):
    """A list of calls in place of an answer."""

    name = "pythonic"
    template_signs = (OPEN, "func_name1(params_name1=params_value1")
    control_tokens = (OPEN, CLOSE)

    def _read(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._try(OPEN)
        if (yield from self._skip_space()) == "[":
            yield from self._attempt(self._read_list())
        yield from self._give_rest()

    def _read_list(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._read_call()
            self._drop()
            if (yield from self._skip_space()) != ",":
                break
            self._at += 1
        yield from self._expect("]")
        yield from self._read_end(CLOSE)

    def _read_call(self) -> Steps[None]:
        self._announced = False
        yield from self._skip_space()
        name = yield from self._read_word()
        if name not in self._tools or (yield from self._next()) != "(":
            raise NoCall
        source = yield from self._read_raw(PythonEnd())
        [call] = parsed_calls("f" + source)
        arguments = arguments_of(call, self._tools[name])
        self._announce(name)
        self._pieces.append(Arguments(arguments))


def parsed_calls(source: str) -> list[ast.Call]:
    """The calls that make up `source`, one a statement, bare or printed. NoCall when it is anything else."""
    if len(source) > MAX_SOURCE:
        raise NoCall
    try:
        with warnings.catch_warnings():  # about spellings in strings, which would show them in the log
            warnings.simplefilter("ignore")
            statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoCall from None
    return [_call(statement) for statement in statements]


def _call(statement: ast.stmt) -> ast.Call:
    match statement:
        case ast.Expr(ast.Call(ast.Name("print"), [ast.Call(ast.Name()) as call], [])) | ast.Expr(
            ast.Call(ast.Name()) as call
        ):
            return call
    raise NoCall


def arguments_of(call: ast.Call, parameters: Sequence[str]) -> str:
    """The arguments of a call as a JSON object. NoCall unless all are plain values of `parameters`, or have names."""
    if len(call.args) > len(parameters):
        raise NoCall
    given = [*zip(parameters, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    if None in (names := [name for name, _ in given]) or len(set(names)) < len(names):
        raise NoCall
    try:
        text = json.dumps({name: ast.literal_eval(node) for name, node in given}, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair is no text
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise NoCall from None
    return text
