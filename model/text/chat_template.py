"""Chat templates: from messages to the one text that a model was trained on.

Templates are Jinja programs that come with a model, so they run in an immutable sandbox on plain JSON values, with the
helpers that transformers offers them: `raise_exception`, `strftime_now`, `tojson`, loop controls, and
`{% generation %}...{% endgeneration %}` around what the assistant wrote.

Messages come from users. Wherever their text spells a control token ("<|im_end|>"), that spelling is hidden behind one
private character while the template runs, so control tokens in the result come from the template alone.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode noncharacters, never part of text; they stand around generation blocks until rendering is done.
OPEN_MARK, CLOSE_MARK = "\ufdd0", "\ufdd1"
FIRST_PRIVATE, LAST_PRIVATE = 0xF0000, 0xFFFFD
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplateError(ValueError):
    """A template that cannot be used, or messages that it refuses; the template's own reason where it has one."""


@dataclass(frozen=True)
class RenderedChat:
    """The rendered text and, as character positions in it, the spans inside generation blocks."""

    text: str
    generated: list[tuple[int, int]]


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables that templates expect, such as "bos_token". Raises ChatTemplateError."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.marks_generation = GENERATION_TAG.search(source) is not None
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as reason:
            raise ChatTemplateError(f"The chat template is not valid, line {reason.lineno}: {reason}.") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Runs the template on plain JSON values; `variables` are further names that it may read."""
        given = {
            **self.special_tokens,
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(given)
        except TemplateError as reason:
            raise ChatTemplateError(f"The chat template refuses these messages: {reason}.") from None
        except Exception as reason:  # whatever a program that came with a model may raise on a user's messages
            raise ChatTemplateError(f"The chat template fails on these messages: {reason!r}.") from reason
        return _without_marks(text)


class HiddenText:
    """Hides spellings of control tokens in JSON values, and puts them back into the rendered text.

    Hidden are whole spellings, and what a value begins or ends with if it could complete a spelling together with its
    neighbour in the rendered text. Each hidden string becomes one private character that none of the values contains.
    """

    def __init__(self, control_tokens: "ControlTokens") -> None:
        self.originals: dict[str, str] = {}
        self._control = control_tokens
        self._stand_ins: dict[str, str] = {}
        self._present: set[str] = set()

    def hide(self, value: Any) -> Any:
        """A copy of `value` without control tokens. Raises ChatTemplateError for what is not a plain JSON value."""
        for text in _strings_in(value):
            self._present.update(text)
        return self._copy(value)

    def restore(self, text: str) -> str:
        """`text` as it would be had nothing been hidden."""
        return text.translate(self._restoring) if self.originals else text

    @cached_property
    def _restoring(self) -> dict[int, str]:
        return {ord(character): original for character, original in self.originals.items()}

    def _copy(self, value: Any, name: str = "") -> Any:
        if isinstance(value, str):
            # A role may be part of a control token that the template spells around it ("<|user|>").
            return self._control.replace(value, self._stand_in, edges=name != "role")
        if isinstance(value, Mapping):
            return {self._copy(key, "role"): self._copy(item, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._copy(item) for item in value]
        return value

    def _stand_in(self, hidden: str) -> str:
        if hidden not in self._stand_ins:
            start = FIRST_PRIVATE + len(self._stand_ins)
            free = (chr(code) for code in range(start, LAST_PRIVATE + 1) if chr(code) not in self._present)
            character = next(free, None)
            if character is None:
                raise ChatTemplateError("The messages spell too many control tokens.")
            self._present.add(character)
            self._stand_ins[hidden] = character
            self.originals[character] = hidden
        return self._stand_ins[hidden]


class ControlTokens:
    """Finds the spellings of a set of control tokens in text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        spellings = sorted({*tokens, OPEN_MARK, CLOSE_MARK}, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, spellings)))
        self._longest = len(spellings[0])
        self._beginnings = {token[:cut] for token in spellings for cut in range(1, len(token))}
        self._suffixes = {token[cut:] for token in spellings for cut in range(1, len(token))}

    def replace(self, text: str, stand_in: Callable[[str], str], *, edges: bool) -> str:
        """Replaces whole spellings, and with `edges` also an unfinished one at either end of the text."""
        text = self._whole.sub(lambda match: stand_in(match.group()), text)
        return self._replace_edges(text, stand_in) if edges else text

    def _replace_edges(self, text: str, stand_in: Callable[[str], str]) -> str:
        # Templates trim what they are given, so the edges that count lie inside the white space.
        start, stop = len(text) - len(text.lstrip()), len(text.rstrip())
        longest = min(self._longest, stop - start)
        for length in range(longest, 0, -1):
            if text[stop - length : stop] in self._beginnings:
                text = text[: stop - length] + stand_in(text[stop - length : stop]) + text[stop:]
                stop += 1 - length
                break
        for length in range(min(longest, stop - start), 0, -1):
            if text[start : start + length] in self._suffixes:
                return text[:start] + stand_in(text[start : start + length]) + text[start + length :]
        return text


def _strings_in(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings_in(key)
            yield from _strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_in(item)
    elif not (value is None or isinstance(value, int | float)):
        raise ChatTemplateError(f"Chat templates take plain JSON values, not {type(value).__name__}.")


class _GenerationBlocks(Extension):
    """Puts marks around `{% generation %}` blocks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return OPEN_MARK + caller() + CLOSE_MARK


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape HTML characters. Templates pass these arguments by position too."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _without_marks(text: str) -> RenderedChat:
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    position = opened = 0
    for piece in re.split(f"([{OPEN_MARK}{CLOSE_MARK}])", text):
        if piece == OPEN_MARK:
            opened = position
        elif piece == CLOSE_MARK:
            spans.append((opened, position))
        else:
            pieces.append(piece)
            position += len(piece)
    return RenderedChat("".join(pieces), spans)
