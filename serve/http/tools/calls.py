"""Reading tool calls: what the formats of all families have in common.

A call counts from the moment its name and the brace of its arguments have been read. From there on its arguments are
given out as they come, up to the brace that closes them, just as the model wrote them: should they not be JSON, or be
cut by max_tokens, the client sees that. What breaks off earlier, or is no call after all, is content.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from serve.http.tools.pieces import Arguments, Call, Content, Parser, Steps

ARGUMENTS = ("arguments", "parameters")
"""What families call the arguments of a call."""
MEMBERS = ("name", "type", "id", *ARGUMENTS)
"""All that a call has, where nothing but its members tells it from content."""
JSON_MARKS = {"": re.compile(r'["{}\[\]]'), '"': re.compile(r'["\\]')}
"""What matters to where JSON ends, outside strings and in them."""
NOT_WORD = re.compile(r"[^\w.+-]")

Tools = Mapping[str, Sequence[str]]
"""The functions of a request: the names of their parameters, by name."""


class NoCall(Exception):
    """What is being read is no tool call, or not as this format has it."""


class ValueEnd:
    """Finds where a bracketed value ends, in text that arrives in pieces."""

    marks: ClassVar[Mapping[str, re.Pattern[str]]]
    """Brackets, quotes and escapes that count, by the quote of the string that they stand in."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find(self, text: str, at: int) -> int:
        """Read on from `at`: the place behind the bracket that closes the value; -1 when it goes on."""
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while (match := self.marks[self._quote].search(text, at)) is not None:
            at = match.end()
            match match.group():
                case "'" | '"' as quote:
                    self._quote = "" if self._quote else quote
                case "\\":
                    self._escaped, at = at == len(text), at + 1
                case "(" | "[" | "{":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return at
        return -1


class JsonEnd(ValueEnd):
    """The end of a JSON object or list."""

    marks = JSON_MARKS


@dataclass(frozen=True)
class CallForm:
    """How calls are written, in pieces of which some may be control tokens: around each, and around all of them."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    between: str = "\n"
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    arguments: str = "arguments"
    """What the arguments are called."""


class ToolParser(Parser):
    """Takes apart an answer that may call tools. A family's format is one subclass."""

    name: ClassVar[str]
    """As --tool-call-parser has it: vLLM's name where it has one."""
    template_signs: ClassVar[tuple[str, ...]]
    """What tells that a chat template asks for this format: one of these stands in it."""
    control_tokens: ClassVar[tuple[str, ...]] = ()
    """Spellings of the format that are control tokens in the family's vocabulary, and must be seen here."""
    form: ClassVar[CallForm | None] = None
    """How calls are written that must be made; None: in Hermes' format, since this one has no grammar."""
    call_id_length: ClassVar[int | None] = None
    """Characters of a call's id, where the family's template insists on their number."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._announced = False
        """Whether the call that is being read has been given out."""

    @classmethod
    def example(cls, name: str, arguments: str) -> str:
        """A call as models are told to write it; for formats that have a form."""
        form = cls.form or CallForm()
        call = f'{{"name": "{name}", "{form.arguments}": {arguments}}}'
        return "".join((*form.begin, *form.before, call, *form.after, *form.end))

    @classmethod
    def suits(cls, template: str) -> bool:
        """Whether a chat template asks for this format."""
        return any(sign in template for sign in cls.template_signs)

    def _attempt(self, calls: Steps[None]) -> Steps[None]:
        """Read calls. What turns out to be none is content; the end of the text may cut their last brackets off."""
        self._announced = False
        try:
            yield from calls
            yield from self._skip_space()
        except NoCall:
            if not (self._announced and self._ended and self._at == len(self._text)):
                self._give(Content, self._at)
        self._drop()

    def _announce(self, name: Any, *, known: bool = False) -> None:
        """From here on there is a call; with `known` only of a tool of the request."""
        if not isinstance(name, str) or not name or not name.isprintable() or (known and name not in self._tools):
            raise NoCall
        self._pieces.append(Call(name))
        self._announced = True

    def _drop(self) -> None:
        """What has been read belongs to the format."""
        self._kept = self._at

    def _read_calls(self, *, known: bool = False) -> Steps[None]:
        """Read an object of `_read_object`, several with separators or without, or a list of them."""
        in_list = (yield from self._skip_space()) == "["
        self._at += in_list
        while True:
            yield from self._read_object(known=known)
            self._drop()
            following = yield from self._skip_space()
            if following in (",", ";"):
                self._at += 1
            elif following != "{":
                break
        if in_list:
            yield from self._expect("]")

    def _read_object(self, *, known: bool) -> Steps[None]:
        """Read {"name": …, "arguments": {…}} and give out the call. NoCall, also amid it, when it goes on otherwise.

        With `known` only a tool of the request is a call, and only with arguments: nothing else tells it from content.
        """
        self._announced = False
        members: dict[str, Any] = {}
        yield from self._expect("{")
        while True:
            key = yield from self._read_json()
            if not isinstance(key, str) or (known and key not in MEMBERS):
                raise NoCall
            yield from self._expect(":")
            if key not in ARGUMENTS or (yield from self._skip_space()) != "{":
                members[key] = yield from self._read_json()
            elif "name" in members:
                self._announce(members["name"], known=known)
                yield from self._give_arguments()
            else:
                members[key] = yield from self._read_raw(JsonEnd())
            if (yield from self._skip_space()) != ",":
                break
            self._at += 1
        yield from self._expect("}")
        if not self._announced:
            self._announce_whole(members, known=known)

    def _announce_whole(self, members: Mapping[str, Any], *, known: bool) -> None:
        """Give out a call whose arguments came before its name, in a string, or not at all."""
        given = [members[name] for name in ARGUMENTS if members.get(name) is not None]
        if len(given) > 1 or not all(isinstance(text, str) for text in given) or (known and not given):
            raise NoCall
        self._announce(members.get("name"), known=known)
        self._pieces.append(Arguments(given[0] if given else "{}"))

    def _give_arguments(self) -> Steps[None]:
        """Give out the JSON object that comes next, as it comes."""
        self._drop()
        end = JsonEnd()
        while (found := end.find(self._text, self._at)) < 0:
            self._give(Arguments, len(self._text))
            if not (yield from self._more()):
                raise NoCall
        self._give(Arguments, found)

    def _read_raw(self, end: ValueEnd) -> Steps[str]:
        """Read the bracketed value that comes next. NoCall when it does not end."""
        begin = self._at - self._kept  # what is kept stays, though its place moves
        while (found := end.find(self._text, self._at)) < 0:
            self._at = len(self._text)
            if not (yield from self._more()):
                raise NoCall
        self._at = found
        return self._text[self._kept + begin : self._at]

    def _read_word(self) -> Steps[str]:
        """Read letters, digits and what stands in names and numbers; possibly nothing."""
        begin = self._at - self._kept
        while (match := NOT_WORD.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not (yield from self._more()):
                return self._text[self._kept + begin :]
        self._at = match.start()
        return self._text[self._kept + begin : self._at]

    def _read_json(self) -> Steps[Any]:
        """The value of the string, number or word that comes next. NoCall when it is none."""
        if (yield from self._skip_space()) == '"':
            spelled = yield from self._read_string()
        else:
            spelled = yield from self._read_word()
        try:
            return json.loads(spelled)
        except ValueError:
            raise NoCall from None

    def _read_string(self) -> Steps[str]:
        begin = self._at - self._kept
        self._at += 1
        escaped = False
        while True:
            if not (yield from self._next()):
                raise NoCall
            match = None if escaped else JSON_MARKS['"'].search(self._text, self._at)
            self._at = self._at + 1 if escaped else len(self._text) if match is None else match.end()
            if match is not None and match.group() == '"':
                return self._text[self._kept + begin : self._at]
            escaped = match is not None

    def _expect(self, character: str) -> Steps[None]:
        """Read white space and this character. NoCall when another comes."""
        if (yield from self._skip_space()) != character:
            raise NoCall
        self._at += 1

    def _read_end(self, tag: str) -> Steps[None]:
        """Read white space and a closing tag, where there is one; the end of the text may cut it off."""
        yield from self._skip_space()
        found = yield from self._try(tag)
        if not found and self._ended and tag.startswith(self._text[self._at :]):
            self._at = len(self._text)
