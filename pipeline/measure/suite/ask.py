"""Asks a model the prompts of tasks through the serving engine, and counts what passes."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.measure.suite.tasks import TASKS, prompts_of
from serve.llm import LLM
from serve.sampling_params import SamplingParams

AT_ONCE = 64
"""Answers that are written in one batch."""
MOST_TOKENS = 512
"""Of a prompt and its answer, for which there is room in the cache; none is cut there."""


Asked = tuple[str, Mapping[str, Any]]
"""The name of a task, and what it says of a prompt."""


@dataclass(frozen=True)
class Marked:
    """One answer, greedy, and whether it passed."""

    model: str
    task: str
    prompt: str
    answer: str
    finished: bool
    """It ended by itself."""
    passed: bool


def prompts(names: Sequence[str]) -> list[Asked]:
    """Those of the tasks `names`."""
    return [(name, entry) for name in names for entry in prompts_of(name)]


def ask(folder: Path, asked: Sequence[Asked], *, label: str) -> list[Marked]:
    """The model in `folder` answers every prompt, in its chat template if it has one."""
    if not asked:
        return []
    params = [SamplingParams(temperature=0.0, max_tokens=TASKS[name].max_tokens) for name, _ in asked]
    engine = LLM(str(folder), max_num_seqs=AT_ONCE, num_pages=AT_ONCE * (MOST_TOKENS // 16 + 1))
    ids = [_prompt_ids(engine, name, entry) for name, entry in asked]
    given = [one.choices[0] for one in engine.generate(ids, params, progress=sys.stderr.isatty())]
    return [
        _mark(label, name, entry, choice.text, choice.finish_reason == "stop")
        for (name, entry), choice in zip(asked, given, strict=True)
    ]


def _prompt_ids(engine: LLM, name: str, entry: Mapping[str, Any]) -> list[int]:
    """A conversation of the task's examples and the prompt; without a template, their plain lines."""
    said = [text for pair in TASKS[name].examples for text in pair] + [entry["prompt"]]
    if not engine.tokenizer.templates:
        return engine.tokenizer.encode("\n".join(said) + "\n", add_special_tokens=True)
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return engine.tokenizer.chat_token_ids(messages, add_generation_prompt=True)


def _mark(label: str, name: str, entry: Mapping[str, Any], text: str, finished: bool) -> Marked:
    passed = TASKS[name].passes(entry, text, finished)
    return Marked(label, name, entry["prompt"], text, finished, passed)
