"""The tasks by name: their prompts, and when an answer passes. Prompts are the files of prompts/, our own writing."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.measure.suite.rules import follows, is_answer, is_text, last_number, mentions_any
from pipeline.measure.suite.sandbox import passes

PROMPTS = Path(__file__).with_name("prompts")
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Task:
    """One kind of prompts."""

    asks: str
    """In words, for the report."""
    max_tokens: int
    """Most tokens of an answer."""
    passes: Callable[[Mapping[str, Any], str, bool], bool]
    """Whether (an entry of the file, an answer to its prompt, whether that ended by itself) passes."""
    examples: tuple[tuple[str, str], ...] = ()
    """Prompts and answers that come before each prompt, where small models would else write essays."""


def prompts_of(name: str) -> list[dict[str, Any]]:
    """The entries of a task's file; each has a `prompt`, and what its answer is compared with."""
    return json.loads((PROMPTS / f"{name}.json").read_text(encoding="utf-8"))


def code_in(text: str) -> str:
    """The first fenced block of an answer, or all of it."""
    found = _FENCED.search(text)
    return found[1] if found else text


TASKS = {
    "answers": Task(
        "a sensible answer: text that does not loop, is about what was asked, and ends or is prose",
        64,
        lambda entry, text, finished: is_answer(text, entry["mentions"], finished=finished),
    ),
    "instructions": Task(
        "an answer in the form that was asked for", 64, lambda entry, text, finished: follows(text, entry["rules"])
    ),
    "facts": Task(
        "a simple fact",
        32,
        lambda entry, text, finished: is_text(text) and mentions_any(text, entry["accepted"]),
    ),
    "arithmetic": Task(
        "the right number at the end",
        24,
        lambda entry, text, finished: last_number(text) == entry["answer"],
        examples=(
            ("What is 1 + 1?", "1 + 1 = 2"),
            ("What is 4 - 1?", "4 - 1 = 3"),
            ("What is 2 times 2?", "2 * 2 = 4"),
        ),
    ),
    "code": Task(
        "a Python function that passes its tests",
        128,
        lambda entry, text, finished: passes(code_in(text), entry["tests"]),
    ),
}
"""What a recipe's `suite` may name."""
