"""From a row of a data set to a document: text, a conversation, or a prompt with its completion.

What a row holds is recognised from the names of its fields. Every format is one entry of `known_formats`, in the order
in which they are tried:

    text                 {"text": …}                          every token is learnt
    messages             {"messages": [{"role", "content"}]}  of conversations what the assistant says
    ShareGPT             {"conversations": [{"from", "value"}]}
    Alpaca               {"instruction", "input", "output"}   a conversation of two messages
    prompt, completion   {"prompt", "completion"}             texts or messages; the completion is learnt
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]

ROLES = {
    "human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant",
}  # fmt: skip
"""ShareGPT's names of who speaks."""


class Completion(NamedTuple):
    """A text of which only the second part is learnt."""

    prompt: str
    completion: str


class Continuation(NamedTuple):
    """A conversation of which only the answers in the second part are learnt."""

    prompt: list[Message]
    completion: list[Message]


Content = str | list[Message] | Completion | Continuation


class FieldNames(Protocol):
    """The settings that say how rows are read."""

    @property
    def chat(self) -> bool: ...
    @property
    def text_field(self) -> str: ...
    @property
    def messages_field(self) -> str: ...
    @property
    def prompt_field(self) -> str: ...
    @property
    def completion_field(self) -> str: ...


@dataclass(frozen=True)
class RowFormat:
    """One way to write a document as a row."""

    name: str
    fields: tuple[str, ...]
    """Those that every row must have."""
    read: Callable[[dict[str, Any]], Content]
    """Of a row with these fields; raises ValueError with what is wrong, to follow the row's place."""
    more_fields: tuple[str, ...] = ()
    """Those that it reads where they are there."""
    learns_all: bool = False
    """Whether every token is learnt."""

    def content(self, row: Any, where: str) -> Content:
        """The document in a row; raises ValueError naming the row."""
        names = fields_of(row, where)
        if missing := [field for field in self.fields if field not in names]:
            found = f"{where} has no field {missing[0]!r} (found: {', '.join(names) or 'none'})"
            raise ValueError(f"{found}; the first row holds {self.name}, and so must all others")
        try:
            return self.read(row)
        except ValueError as reason:
            raise ValueError(f"{where}: {reason}") from None


def fields_of(row: Any, where: str) -> list[str]:
    """The names of a row's fields; raises ValueError where it has none."""
    if not isinstance(row, dict):
        raise ValueError(f'{where} is of type {type(row).__name__}; a row is an object like {{"text": "…"}}')
    return [str(name) for name in row]


def recognise(fields: Collection[str], names: FieldNames, where: str) -> RowFormat:
    """The format of rows with these fields; raises ValueError with the formats that there are."""
    known = list(known_formats(names))
    for one in known:
        if set(one.fields) <= set(fields):
            return one
    if names.chat and names.text_field in fields:
        what = f"has text in {names.text_field!r}, but no conversation; leave `chat` out to train on text"
        raise ValueError(f"{where} {what}, or give it {_listed(known)}")
    raise ValueError(
        f"{where} has the fields {', '.join(fields) or '(none)'}, which are no known format: expected is "
        f"{_listed(known)}; text_field, messages_field, prompt_field and completion_field name other fields"
    )


def known_formats(names: FieldNames) -> Iterator[RowFormat]:
    """In the order in which they are tried. With `chat` all of them are conversations."""
    if not names.chat:
        yield RowFormat("text", (names.text_field,), partial(_text, names.text_field), learns_all=True)
    for name, field in (("messages", names.messages_field), ("ShareGPT", "conversations")):
        yield RowFormat(name, (field,), partial(_conversation, field), more_fields=("system",))
    yield RowFormat("Alpaca", ("instruction", "output"), _alpaca, more_fields=("input", "system", "history"))
    pair = (names.prompt_field, names.completion_field)
    yield RowFormat("prompt and completion", pair, partial(_completion, *pair, names.chat))


def _listed(known: list[RowFormat]) -> str:
    return " or ".join(f"{one.name} ({', '.join(one.fields)})" for one in known)


def _string(row: dict[str, Any], field: str) -> str:
    if not isinstance(row[field], str):
        raise ValueError(f"{field!r} must be text, not {type(row[field]).__name__}")
    return row[field]


def _text(field: str, row: dict[str, Any]) -> str:
    return _string(row, field)


def _conversation(field: str, row: dict[str, Any]) -> list[Message]:
    messages = _messages(field, row[field])
    if row.get("system") and not (messages and messages[0]["role"] == "system"):
        return [{"role": "system", "content": _string(row, "system")}, *messages]
    return messages


def _messages(field: str, value: Any) -> list[Message]:
    """Messages as chat templates take them; those that are so already stay what they are."""
    wrong = f"{field!r} must be a list of messages, each with a role and a content (or from and value)"
    if not isinstance(value, list):
        raise ValueError(f"{wrong}, not {type(value).__name__}")
    return [_message(f"message {number} of {wrong}", message) for number, message in enumerate(value, 1)]


def _message(wrong: str, message: Any) -> Message:
    if isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message:
        return message
    if not (isinstance(message, dict) and "from" in message and isinstance(message.get("value"), str)):
        found = ", ".join(map(str, message)) if isinstance(message, dict) else type(message).__name__
        raise ValueError(f"{wrong}; found: {found}")
    if message["from"] not in ROLES:
        raise ValueError(f"{message['from']!r} is nobody who speaks in a conversation; known are {', '.join(ROLES)}")
    return {"role": ROLES[message["from"]], "content": message["value"]}


def _alpaca(row: dict[str, Any]) -> list[Message]:
    asked = [_string(row, "instruction"), *([_string(row, "input")] if row.get("input") else [])]
    said = [turn for pair in row.get("history") or [] for turn in _turns(pair)]
    messages = [*said, "\n".join(asked), _string(row, "output")]
    system = [{"role": "system", "content": _string(row, "system")}] if row.get("system") else []
    return system + [
        {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(messages)
    ]


def _turns(pair: Any) -> list[str]:
    if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
        raise ValueError("'history' must be a list of pairs: what was asked, and what was answered")
    return list(pair)


def _completion(prompt: str, completion: str, chat: bool, row: dict[str, Any]) -> Content:
    """With earlier answers in the prompt it stays apart: they are not learnt."""
    if not (chat or isinstance(row[prompt], list) or isinstance(row[completion], list)):
        return Completion(_string(row, prompt), _string(row, completion))
    asked, answered = _side(prompt, row, "user"), _side(completion, row, "assistant")
    if any(message["role"] == "assistant" for message in asked):
        return Continuation(asked, answered)
    return asked + answered


def _side(field: str, row: dict[str, Any], role: str) -> list[Message]:
    if isinstance(row[field], list):
        return _messages(field, row[field])
    return [{"role": role, "content": _string(row, field)}]
