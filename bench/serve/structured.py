"""What structured output costs a decoding step: eight requests with a grammar beside eight that write freely.

    python -m bench.serve.structured      # writes bench/results/structured-cpu.json; 3 minutes

SmolLM2-135M, two engines over one model that step by turns, on one thread, by its processor time: so other work on the
machine slows both alike, or neither. Both have equally many tokens at all times: the grammars ask for more than is
measured, and free answers ignore their end. A ratio is the median over pairs of steps, and the median of all rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from bench.common import DTYPE, teacher_folder, write_result
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.engine.loading import load_models
from serve.grammar import json_grammar, regex_grammar

BATCH, WARM_UP = 8, 10
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["author", "editor", "reader"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age", "role", "tags", "note"],
    "additionalProperties": False,
}
GRAMMARS = {
    "list of objects": json_grammar({"type": "array", "items": PERSON, "minItems": 500}),
    "one long string": json_grammar({"type": "string", "minLength": 5000}),
    "any JSON": json_grammar({"type": "array", "minItems": 500}),
    "regular expression": regex_grammar(r"([A-Z][a-z]{1,12} \d{1,3}, ){500}"),
}
SAMPLING = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "top_p": 0.95}}
PROMPT = "Write a list of people who work on number {} of a newspaper, as JSON.\n"


class Side:
    """Eight requests that decode together."""

    def __init__(self, llm: LLM, num_steps: int, **params: Any) -> None:
        self.engine = llm.engine
        for number in range(BATCH):
            tokens = llm.tokenizer.encode(PROMPT.format(number))
            sampling = SamplingParams(max_tokens=num_steps + WARM_UP + 20, seed=number, **params)
            self.engine.add_request(str(number), tokens, sampling)
        while len(self.engine.scheduler.running) < BATCH or any(s.num_output == 0 for s in self.sequences):
            self.engine.step()

    @property
    def sequences(self) -> list[Any]:
        return self.engine.scheduler.running

    def end(self) -> None:
        for number in range(BATCH):
            self.engine.abort(str(number))
        while self.engine.has_work():
            self.engine.step()


def seconds(work: Callable[[], object]) -> float:
    """Of the processor."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure(llms: tuple[LLM, LLM], grammar: str, sampling: dict[str, Any], num_steps: int) -> dict[str, float]:
    """One round."""
    free, structured = (
        Side(llm, num_steps, **sampling, **how)
        for llm, how in zip(llms, ({"ignore_eos": True}, {"grammar": grammar}), strict=True)
    )
    pairs = []
    for number in range(num_steps + WARM_UP):
        sides = (free, structured) if number % 2 else (structured, free)  # nobody always comes second
        took = {side: seconds(side.engine.step) for side in sides}
        pairs.append((took[free], took[structured]))
    if any(len(side.sequences) < BATCH for side in (free, structured)):
        raise RuntimeError("a request has ended within the measured steps")
    for side in (free, structured):
        side.end()
    pairs = pairs[WARM_UP:]
    return {
        "free_ms": 1000 * statistics.median(one for one, _ in pairs),
        "structured_ms": 1000 * statistics.median(other for _, other in pairs),
        "ratio": statistics.median(other / one for one, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options: dict[str, Any] = {"dtype": str(DTYPE).removeprefix("torch."), "max_model_len": 2048, "max_num_seqs": BATCH}
    folder = str(teacher_folder())
    models = load_models(EngineConfig(folder, **options))
    llms = LLM(folder, models=models, **options), LLM(folder, models=models, **options)
    found: dict[str, Any] = {}
    for name, grammar in GRAMMARS.items():
        for how, sampling in SAMPLING.items():
            rounds = [measure(llms, grammar, sampling, arguments.steps) for _ in range(arguments.rounds)]
            ratios = [one["ratio"] for one in rounds]
            found[f"{name}, {how}"] = {
                "free_ms": min(one["free_ms"] for one in rounds),
                "structured_ms": min(one["structured_ms"] for one in rounds),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
            }
            print(f"{name}, {how}: {found[f'{name}, {how}']}", flush=True)
    result = {"llguidance": version("llguidance"), "batch": BATCH, "steps": found}
    write_result("structured-cpu", "python -m bench.serve.structured", result)


if __name__ == "__main__":
    main()
