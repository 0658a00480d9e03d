"""What one request wants of tools: which may be called, whether one must be, and how the model is told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serve.http.errors import ApiError, invalid
from serve.http.protocol import shown, without_nulls
from serve.http.requests import ChatRequest, Message, NamedToolChoice, Tool
from serve.http.structured_outputs import Grammar
from serve.http.tools.calls import ToolParser
from serve.http.tools.forced import calls_grammar, either
from serve.http.tools.formats import Formats
from serve.http.tools.hermes import HermesParser


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request."""

    tools: Sequence[Tool]
    """What the model sees."""
    parser: type[ToolParser]
    """Reads the calls."""
    named: str | None
    """The one function that is to be called."""
    is_forced: bool
    """There must be a call."""
    is_described: bool
    """The template shows no tools: a system message does."""
    several: bool
    """An answer may hold more than one call."""

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.named in (None, tool.function.name)]

    @property
    def shown(self) -> Sequence[Tool] | None:
        """What the template is given."""
        return None if self.is_described else self.tools

    def conversation(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with the tools described where the template does not show them."""
        if not self.is_described:
            return messages
        first, text = messages[0], self._description()
        if first.role not in ("system", "developer"):
            return [Message("system", text), *messages]
        parts = [first.content] if isinstance(first.content, str) else [part.text for part in first.content or ()]
        return [msgspec.structs.replace(first, content="\n\n".join([*parts, text])), *messages[1:]]

    def _description(self) -> str:
        functions = [json.dumps(tool_object(tool)["function"], ensure_ascii=False) for tool in self.tools]
        example = self.parser.example("its name", "{its arguments by name}")
        return "\n".join(["You can call these functions:", *functions, f"A call is written like this:\n{example}"])

    @property
    def signatures(self) -> dict[str, list[str]]:
        """The names of each callable function's parameters."""
        schemas = {tool.function.name: (tool.function.parameters or {}).get("properties") for tool in self.callable}
        return {name: list(properties) if isinstance(properties, dict) else [] for name, properties in schemas.items()}

    def grammar(self, control_token_ids: Mapping[str, int], content: Grammar | None) -> Grammar | None:
        """What the answer must be, where its content must be `content`. ApiError 400 for what cannot be a grammar."""
        if content is None and not self.is_forced:
            return None
        if content is not None and self.is_forced:
            raise invalid(f"{content.field} and tool_choice both say what the output must be", content.field)
        if self.parser.form is None:
            raise invalid("tools: calls in this model's format cannot be checked beside an output's grammar", "tools")
        functions = [(tool.function.name, tool.function.parameters) for tool in self.callable]
        for name, schema in functions:
            if schema is not None and schema.get("type", "object") != "object":
                raise invalid(f"tools: the parameters of {shown(name)} are not described as an object", "tools")
        calls = calls_grammar(self.parser.form, functions, control_token_ids, several=self.several)
        return Grammar("tools", calls if content is None else either(content.text, calls))


def tool_object(tool: Tool) -> dict[str, Any]:
    """A tool as its client sent it, which is how templates show it."""
    plain: dict[str, Any] = without_nulls(msgspec.to_builtins(tool), 2)
    return plain


def tool_use(request: ChatRequest, formats: Formats) -> ToolUse:
    """What a request with tools wants of them. ApiError 400 for what is contradictory, or beyond this model."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools has two functions of one name", "tools")
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None and named not in names:
        raise invalid(f"tool_choice names {shown(named)}, which is none of the tools", "tool_choice")
    is_forced = named is not None or choice == "required"
    parser = formats.tools
    if is_forced and (parser is None or parser.form is None):
        parser = HermesParser
    if parser is None or not (is_forced or formats.shows_tools):
        raise _beyond_this_model(formats)
    return ToolUse(
        tools,
        parser,
        named,
        is_forced,
        is_described=not formats.shows_tools,
        several=named is None and request.parallel_tool_calls is not False,
    )


def _beyond_this_model(formats: Formats) -> ApiError:
    reason = "this model's chat template shows it none"
    if formats.shows_tools:
        reason = "in which format this model calls them is not known (the server's operator can say --tool-call-parser)"
    text = f'tools is not supported here: {reason}; leave it out, or give tool_choice "none" or "required"'
    return ApiError(400, text, code="unsupported_parameter", param="tools")
