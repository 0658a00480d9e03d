"""SmolLM3: calls between <tool_call> tags as Hermes has them, or Python between <code> tags that only calls tools."""

import ast

from serve.http.tools.calls import NoCall
from serve.http.tools.hermes import OPEN, HermesParser
from serve.http.tools.pieces import Arguments, Steps
from serve.http.tools.python_calls import arguments_of, parsed_calls

OPEN_CODE, CLOSE_CODE = "<code>", "</code>"


class SmolLM3Parser(HermesParser):
    """JSON or Python between tags. Code that does anything but call tools with plain values is content."""

    name = "smollm3"
    template_signs = ("python_tools",)

    def _read(self) -> Steps[None]:
        while opened := (yield from self._until(OPEN, OPEN_CODE)):
            yield from self._attempt(self._read_tagged() if opened == OPEN else self._read_code())

    def _read_code(self) -> Steps[None]:
        begin = self._at - self._kept
        while (found := self._text.find(CLOSE_CODE, self._at)) < 0:
            self._at = max(self._at, len(self._text) - len(CLOSE_CODE))
            if not (yield from self._more()):
                self._at = len(self._text)
                raise NoCall
        code = self._text[self._kept + begin : found]
        self._at = found + len(CLOSE_CODE)
        for name, arguments in self._calls_of(code):
            self._announce(name)
            self._pieces.append(Arguments(arguments))

    def _calls_of(self, code: str) -> list[tuple[str, str]]:
        """The calls that a piece of code consists of, with their arguments."""
        calls = [(ast.unparse(call.func), call) for call in parsed_calls(code.strip())]
        if not calls or not all(name in self._tools for name, _ in calls):
            raise NoCall
        return [(name, arguments_of(call, self._tools[name])) for name, call in calls]
