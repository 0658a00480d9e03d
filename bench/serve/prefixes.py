"""What eight requests with a common beginning cost beside one prefill of it, on a CPU.

    python -m bench.serve.prefixes      # writes bench/results/prefixes-cpu.json; a minute

A prompt of 1,500 tokens alone, then eight at once that share those and end in 16 of their own, one new token each, with
SmolLM2-135M, by turns, each turn with another beginning. Tokens computed, processor time of one thread.
"""

import statistics
import time
from typing import Any

import torch

from bench.common import teacher_folder, write_result
from bench.serve.__main__ import prompts_of
from serve import LLM, SamplingParams

COMMON, OWN, REQUESTS, TURNS = 1500, 16, 8, 3
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def cost(llm: LLM, prompts: list[list[int]]) -> tuple[float, int]:
    """Seconds, and prompt tokens that were computed and not found."""
    before, began = llm.engine.stats(), time.thread_time()
    llm.generate(prompts, FIRST)
    seconds, after = time.thread_time() - began, llm.engine.stats()
    found = after.prefix_cache_hits - before.prefix_cache_hits
    return seconds, after.num_prompt_tokens - before.num_prompt_tokens - found


def measure(llm: LLM, texts: list[list[int]]) -> dict[str, Any]:
    turns = []
    for alone, together, end in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        own = [[*together[:COMMON], *end[OWN * number : OWN * (number + 1)]] for number in range(REQUESTS)]
        turns.append((cost(llm, [alone[:COMMON]]), cost(llm, own)))
    return {
        "seconds_alone": [one[0] for one, _ in turns],
        "seconds_together": [other[0] for _, other in turns],
        "tokens_alone": [one[1] for one, _ in turns],
        "tokens_together": [other[1] for _, other in turns],
        "prefills": statistics.median(other[0] / one[0] for one, other in turns),
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = teacher_folder()
    llm = LLM(str(folder), max_model_len=2048)
    texts = prompts_of(folder, [COMMON] * 3 * (TURNS + 1))
    measure(llm, texts[:3])  # warms up
    found = {"requests": REQUESTS, "common_tokens": COMMON, "own_tokens": OWN, **measure(llm, texts[3:])}
    print(found)
    write_result("prefixes-cpu", "python -m bench.serve.prefixes", found)


if __name__ == "__main__":
    main()
