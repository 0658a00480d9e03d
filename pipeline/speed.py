"""Tokens a second of the serving engine, alone or with a draft: what `potstill serve` gives, minus HTTP."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.result import SpeedPoint
from pipeline.schema import Speed

if TYPE_CHECKING:
    from train.packing import Batch

WARM_UP_TOKENS = 64
"""Enough steps for the adaptive draft length to have measured acceptance and step costs."""


def measure_speed(model: str, draft: str | None, prompts: Sequence[list[int]], config: Speed) -> tuple[SpeedPoint, ...]:
    """Greedy generation at each batch size, prompts included, after a warm-up with other prompts' tokens."""
    from serve.llm import LLM
    from serve.sampling_params import SamplingParams

    length = config.prompt_tokens + config.new_tokens + 16
    pages = max(config.batch_sizes) * (length // 16 + 2) + 8
    engine = LLM(model, draft=draft, max_model_len=length, num_pages=pages, enable_prefix_caching=False)
    points = []
    for batch_size in sorted(config.batch_sizes):
        asked = list(prompts[:batch_size])
        engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True))
        started = time.perf_counter()
        timed = SamplingParams(temperature=0.0, max_tokens=config.new_tokens, ignore_eos=True)
        answers = [answer.choices[0] for answer in engine.generate(asked, timed)]
        seconds = time.perf_counter() - started
        drafted = sum(answer.num_drafted for answer in answers)
        accepted = sum(answer.num_accepted for answer in answers)
        tokens = sum(len(answer.token_ids) for answer in answers)
        points.append(SpeedPoint(batch_size, tokens / seconds, accepted / drafted if drafted else None))
    return tuple(points)


def prompts_from(batches: "Sequence[Batch]", *, count: int, config: Speed) -> list[list[int]]:
    """`count` prompts of `prompt_tokens` each, from the beginnings of held-out sequences; short ones are left out.

    With too few sequences the same ones are asked again.
    """
    found: list[list[int]] = []
    for batch in batches:
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            if end - start >= config.prompt_tokens or not found:
                found.append(batch.tokens[start : min(end, start + config.prompt_tokens)].tolist())
    return [found[index % len(found)] for index in range(count)]
