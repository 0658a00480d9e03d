"""One choice of a chat on its way to the client: text in, content, thoughts and tool calls out."""

import itertools
import secrets
import string
from collections.abc import Iterable

from msgspec import UNSET

from serve.http.requests import FunctionCall, ToolCall
from serve.http.responses import AssistantMessage, Delta, FunctionDelta, ToolCallDelta
from serve.http.tools.calls import ToolParser
from serve.http.tools.pieces import Arguments, Call, Content, Parser, Piece, Reasoning
from serve.http.tools.reasoning import ReasoningParser

ID_LENGTH = 24
ALPHABET = string.ascii_letters + string.digits


class Answer:
    """Takes one choice apart. Without parsers all of it is content."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, several: bool = True) -> None:
        """Without `several` all calls but the first are left out."""
        self._reasoning, self._tools = reasoning, tools
        self._several = several
        self.num_calls = 0

    def deltas(self, text: str, *, ended: bool) -> list[Delta]:
        """What the next text brings, in OpenAI's form; `ended`: it is the last."""
        found = [self._delta(piece) for piece in merged(self._pieces(text, ended=ended))]
        return [delta for delta in found if delta is not None]

    def _pieces(self, text: str, *, ended: bool) -> list[Piece]:
        split: list[Piece] = [Content(text)] if self._reasoning is None else taken(self._reasoning, text, ended=ended)
        if self._tools is None:
            return split
        content = [piece for piece in split if isinstance(piece, Content)]
        thoughts = [piece for piece in split if not isinstance(piece, Content)]
        return thoughts + taken(self._tools, "".join(piece.text for piece in content), ended=ended)

    def _delta(self, piece: Piece) -> Delta | None:
        match piece:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning=text, reasoning_content=text)
            case Call(name):
                self.num_calls += 1
                function, call_id = FunctionDelta(name=name, arguments=""), self._new_id()
                call = ToolCallDelta(self.num_calls - 1, id=call_id, type="function", function=function)
            case Arguments(text):
                call = ToolCallDelta(self.num_calls - 1, function=FunctionDelta(arguments=text))
        return None if self.num_calls > 1 and not self._several else Delta(tool_calls=[call])

    def _new_id(self) -> str:
        length = None if self._tools is None else self._tools.call_id_length
        token = "".join(secrets.choice(ALPHABET) for _ in range(length or ID_LENGTH))
        return token if length else f"call_{token}"


def taken(parser: Parser, text: str, *, ended: bool) -> list[Piece]:
    """What a parser makes of the next text."""
    return parser.push(text) + (parser.finish() if ended else [])


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind joined, and without empty text."""
    result: list[Piece] = []
    for kind, alike in itertools.groupby(pieces, key=type):
        if kind is Call:
            result += alike
        elif text := "".join(piece.text for piece in alike if not isinstance(piece, Call)):
            result.append(kind(text))
    return result


def message_of(deltas: Iterable[Delta]) -> AssistantMessage:
    """The whole message that deltas add up to."""
    content, thoughts, calls = "", "", []
    for delta in deltas:
        content += delta.content or ""
        thoughts += delta.reasoning or ""
        for call in delta.tool_calls or ():
            name, arguments = call.function.name or "", call.function.arguments or ""
            if call.id:
                calls.append(ToolCall(call.id, FunctionCall(name, "")))
            calls[-1].function.arguments += arguments
    return AssistantMessage(
        content or (None if calls or thoughts else ""),
        tool_calls=calls or UNSET,
        reasoning=thoughts or UNSET,
        reasoning_content=thoughts or UNSET,
    )
