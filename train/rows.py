"""From a row of a data set to a document: text, a conversation, or a prompt with its completion.

What a row holds is recognised from the names of its fields. Every format is one entry of `known_formats`, in the order
in which they are tried:

    text                 {"text": …}                          every token is learnt
    messages             {"messages": [{"role", "content"}]}  of conversations what the assistant says
    ShareGPT             {"conversations": [{"from", "value"}]}
    Alpaca               {"instruction", "input", "output"}   a conversation of two messages
    prompt, completion   {"prompt", "completion"}             texts or messages; the completion is learnt

Where pairs of answers are asked for, a row holds a chosen and a rejected one behind one prompt; the prompt is a field,
or the beginning that both have in common:

    {"prompt", "chosen", "rejected"}                          texts, or messages in any of them
    {"chosen", "rejected"}                                    whole conversations, or texts that begin alike
"""

import difflib
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

Message = dict[str, Any]
Prompt = TypeVar("Prompt", str, list[Message])

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


Learnt = str | list[Message] | Completion | Continuation
"""One document to learn."""


class Preference(NamedTuple):
    """Two answers to one prompt, each behind it, of which the first is the better one."""

    chosen: Learnt
    rejected: Learnt


Content = Learnt | Preference


def roles_of(content: Content) -> Iterator[str]:
    """Who speaks in a document, message after message; nobody in texts."""
    if isinstance(content, Preference | Continuation):
        for part in content:
            yield from roles_of(part)
    elif isinstance(content, list):
        yield from (message["role"] for message in content)


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
    @property
    def preference(self) -> bool: ...
    @property
    def chosen_field(self) -> str: ...
    @property
    def rejected_field(self) -> str: ...


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
    if names.preference:
        raise ValueError(_no_pair(fields, names, where))
    if names.chat and names.text_field in fields:
        what = f"has text in {names.text_field!r}, but no conversation; leave `chat` out to train on text"
        raise ValueError(f"{where} {what}, or give it {_listed(known)}")
    raise ValueError(
        f"{where} has the fields {', '.join(fields) or '(none)'}, which are no known format: expected is "
        f"{_listed(known)}; text_field, messages_field, prompt_field and completion_field name other fields"
    )


def known_formats(names: FieldNames) -> Iterator[RowFormat]:
    """In the order in which they are tried. With `chat` all of them are conversations, with `preference` pairs."""
    if names.preference:
        both = (names.chosen_field, names.rejected_field)
        yield RowFormat("preference pairs", both, partial(_preference, names), more_fields=(names.prompt_field,))
        return
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


def _completion(prompt: str, completion: str, chat: bool, row: dict[str, Any]) -> Learnt:
    if not (chat or isinstance(row[prompt], list) or isinstance(row[completion], list)):
        return Completion(_string(row, prompt), _string(row, completion))
    return _answered(_side(prompt, row, "user"), _side(completion, row, "assistant"))


def _answered(asked: list[Message], answered: list[Message]) -> Learnt:
    """With earlier answers in the prompt it stays apart: they are not learnt."""
    if any(message["role"] == "assistant" for message in asked):
        return Continuation(asked, answered)
    return asked + answered


def _side(field: str, row: dict[str, Any], role: str) -> list[Message]:
    if isinstance(row[field], list):
        return _messages(field, row[field])
    return [{"role": role, "content": _string(row, field)}]


# --- pairs of answers -------------------------------------------------------------------------------------------------


def _no_pair(fields: Collection[str], names: FieldNames, where: str) -> str:
    """What a row lacks that should hold two answers, and which of its fields may be meant."""
    wanted = {"chosen_field": names.chosen_field, "rejected_field": names.rejected_field}
    missing = {key: field for key, field in wanted.items() if field not in fields}
    meant = [(key, difflib.get_close_matches(field, fields, n=1, cutoff=0.5)) for key, field in missing.items()]
    hints = ", ".join(f"{key}: {found[0]}" for key, found in meant if found)
    did_you = f"; did you mean {hints}?" if hints else ";"
    lacks = " and ".join(map(repr, missing.values()))
    return (
        f"{where} has no field {lacks} (found: {', '.join(fields) or 'none'}){did_you} preference pairs are rows with "
        "a chosen and a rejected answer, and their prompt in a field of its own or at the beginning of both; "
        "chosen_field, rejected_field and prompt_field name other fields"
    )


def _preference(names: FieldNames, row: dict[str, Any]) -> Preference:
    """Both answers behind their prompt, which is the row's own or what they have in common."""
    prompt = row.get(names.prompt_field)
    both = (row[names.chosen_field], row[names.rejected_field])
    if names.chat or any(isinstance(value, list) for value in (prompt, *both)):
        return _two_conversations(names, row)
    chosen, rejected = _string(row, names.chosen_field), _string(row, names.rejected_field)
    if prompt:
        asked = _string(row, names.prompt_field)
        return Preference(Completion(asked, chosen), Completion(asked, rejected))
    asked = _found(_common_beginning(chosen, rejected), names)
    return Preference(*(Completion(asked, text[len(asked) :]) for text in (chosen, rejected)))


def _common_beginning(one: str, other: str) -> str:
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in alike)


def _two_conversations(names: FieldNames, row: dict[str, Any]) -> Preference:
    asked = _side(names.prompt_field, row, "user") if row.get(names.prompt_field) else []
    fields = (names.chosen_field, names.rejected_field)
    chosen, rejected = (_behind(asked, _side(field, row, "assistant"), field) for field in fields)
    last = min(len(chosen), len(rejected)) - 1
    alike = next((at for at in range(last) if chosen[at] != rejected[at]), last)
    prompt = _found(chosen[:alike], names)
    if any(side[alike]["role"] != "assistant" for side in (chosen, rejected)):
        raise ValueError(f"{fields[0]!r} and {fields[1]!r} must part where the assistant answers, not before")
    return Preference(*(_answered(prompt, side[alike:]) for side in (chosen, rejected)))


def _behind(asked: list[Message], answer: list[Message], field: str) -> list[Message]:
    """The conversation: some data sets write the prompt once more at the beginning of each answer."""
    if answer and answer[0]["role"] == "assistant":
        return asked + answer
    if not answer or answer[: len(asked)] != asked:
        raise ValueError(f"{field!r} must begin with the assistant's answer, or with the row's prompt")
    return answer


def _found(prompt: Prompt, names: FieldNames) -> Prompt:
    if not prompt:
        what = f"no field {names.prompt_field!r}, and nothing that both answers begin with"
        raise ValueError(f"there is no prompt: {what}; prompt_field names another field")
    return prompt
