"""Calls and thoughts as grammars: what the output is where a call must be made, and what may come before an answer.

Calls are forced in the model's own format, so that it writes what it was trained to write and its parser reads.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve.grammar import json_rule
from serve.http.tools.calls import CallForm
from serve.http.tools.reasoning import ReasoningFormat

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
SOME_SPACE = r"/[ \n]{0,4}/"


def spelled(piece: str, control_token_ids: Mapping[str, int]) -> str:
    """How a piece of a format stands in a grammar: control tokens by their numbers, all else as quoted text."""
    return f"<[{control_token_ids[piece]}]>" if piece in control_token_ids else quoted(piece)


def quoted(text: str) -> str:
    """Text as grammars have it."""
    return json.dumps(text, ensure_ascii=False)


def calls_grammar(
    form: CallForm,
    functions: Sequence[tuple[str, Mapping[str, Any] | None]],
    control_token_ids: Mapping[str, int],
    *,
    several: bool,
) -> str:
    """One call of `functions` (names, and the JSON schemas of their arguments), or with `several` one or more."""

    def sequence(*pieces: str) -> str:
        return " ".join(spelled(piece, control_token_ids) for piece in pieces)

    more = f"({sequence(form.between)} call)*" if several else ""
    lines = [
        f"start: {sequence(*form.begin)} call {more} {sequence(*form.end)}",
        f"call: {sequence(*form.before)} object {sequence(*form.after)}",
        "object: " + " | ".join(f"object_{number}" for number in range(len(functions))),
    ]
    for number, (name, schema) in enumerate(functions):
        head = f'{{"name": {quoted(name)}, "{form.arguments}": '
        lines.append(f'object_{number}: {quoted(head)} arguments_{number} "}}"')
        arguments = NO_PARAMETERS if schema is None else {"type": "object"} | dict(schema)
        lines.append(f"arguments_{number}: {json_rule(arguments)}")
    return "\n".join(lines)


def either(one: str, other: str) -> str:
    """The output is of one of two grammars."""
    return f"start: one | other\none: {nested(one)}\nother: {nested(other)}"


def after_thoughts(grammar: str, tags: ReasoningFormat, control_token_ids: Mapping[str, int], *, is_open: bool) -> str:
    """Thoughts first: they go on from the prompt (`is_open`), or the answer may begin with them."""
    start = f"thoughts space answer{'' if is_open else ' | answer'}"
    opened = "" if is_open else f"{spelled(tags.open, control_token_ids)} "
    if tags.close not in control_token_ids:
        end = re.escape(tags.close).replace("/", r"\/")
        body = [f"thoughts: {opened}closed", rf"closed[lazy]: /(.|\n)*{end}/"]
    else:
        body = [rf"thoughts: {opened}/(.|\n)*/ {spelled(tags.close, control_token_ids)}"]
    return "\n".join([f"start: {start}", *body, f"space: {SOME_SPACE}", f"answer: {nested(grammar)}"])


def nested(grammar: str) -> str:
    """A whole grammar as a rule of another."""
    return f"%lark {{\n{grammar}\n}}"
