"""Drafts from the text alone: prompts whose answers repeat them, and prompts whose answers do not.

    python -m bench.serve.quotes                # about 5 minutes on 2 cores

One request at a time, greedy, up to 128 new tokens. Every side answers each prompt in turn, after a first round that
does not count; all say the same, so that only time differs. `beside_alone` is the time without a draft over the time
with it, of all prompts of a kind together, by the median of the rounds.
"""

import argparse
import fnmatch
import inspect
import shlex
import statistics
import textwrap
import time
from typing import Any

from bench.common import DTYPE, teacher_folder, write_result
from serve import LLM, SamplingParams

SIDES: dict[str, str | None] = {"alone": None, "ngram": "ngram", "suffix": "suffix"}
CODE = (shlex.quote, shlex.join, fnmatch.filter, textwrap.indent, textwrap.fill, textwrap.shorten)
NEWS = (
    "The committee met on Tuesday to discuss the new bridge over the river Elbe. Engineers explained that the old "
    "bridge carries forty thousand vehicles a day and that its steel is tired. The city will pay half of the costs, "
    "and the state the other half. Work begins in spring and lasts three years."
)
REPEATING = (
    *(
        f"Add a comment to the first line of this code and repeat all of it:\n\n```python\n{inspect.getsource(one)}```"
        for one in CODE
    ),
    f"Summarise this text, quoting its sentences:\n\n{NEWS}",
    f"Correct the spelling of this text and repeat it:\n\n{NEWS}",
)
FREE = (
    "What is the capital of France?",
    "Explain how rain forms.",
    "Tell me a story about a dragon.",
    "Why is the sky blue?",
    "How do I start a small garden?",
    "Write a letter to an old friend.",
)


def answered(engine: LLM, prompt: str) -> tuple[float, Any]:
    """Seconds, and the answer."""
    start = time.perf_counter()
    [answer] = engine.chat([{"role": "user", "content": prompt}], SamplingParams(temperature=0.0, max_tokens=128))
    return time.perf_counter() - start, answer.choices[0]


def measure(engines: dict[str, LLM], prompts: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """By side: what a round took, and what became of its drafts."""
    seconds: dict[str, list[float]] = {side: [] for side in engines}
    counts: dict[str, list[int]] = {}
    for _ in range(1 + rounds):
        took = dict.fromkeys(engines, 0.0)
        counts = {side: [0, 0, 0] for side in engines}
        for prompt in prompts:
            said = set()
            for side, engine in engines.items():
                elapsed, choice = answered(engine, prompt)
                took[side] += elapsed
                said.add(tuple(choice.token_ids))
                numbers = len(choice.token_ids), choice.num_drafted, choice.num_accepted
                counts[side] = [a + b for a, b in zip(counts[side], numbers, strict=True)]
            if len(said) > 1:
                raise RuntimeError(f"A draft has changed the answer to {prompt!r}.")
        for side in engines:
            seconds[side].append(took[side])
        print("  " + ", ".join(f"{side} {took[side]:.1f} s" for side in engines), flush=True)
    return {side: _summary(seconds, counts, side) for side in engines}


def _summary(seconds: dict[str, list[float]], counts: dict[str, list[int]], side: str) -> dict[str, Any]:
    tokens, drafted, accepted = counts[side]
    pairs = zip(seconds["alone"][1:], seconds[side][1:], strict=True)
    return {
        "tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_s": tokens / statistics.median(seconds[side][1:]),
        "beside_alone": statistics.median(alone / own for alone, own in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds, folder = parser.parse_args().rounds, str(teacher_folder())
    options = {"dtype": str(DTYPE).removeprefix("torch."), "enable_prefix_caching": False, "max_model_len": 2048}
    engines = {side: LLM(folder, draft=draft, max_num_seqs=4, **options) for side, draft in SIDES.items()}
    found = {}
    for name, prompts in (("repeating", REPEATING), ("free", FREE)):
        print(name, flush=True)
        found[name] = measure(engines, prompts, rounds)
    write_result("quotes-cpu", "python -m bench.serve.quotes", found)


if __name__ == "__main__":
    main()
