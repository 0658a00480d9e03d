"""Tokens a second of the serving engine, alone or with a draft: what `potstill serve` gives, minus HTTP."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.result import SpeedPoint
from pipeline.schema import Decoding, Speed

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


def measure_prefill(models: Sequence[str], prompt: Sequence[int], repeats: int = 5) -> list[float]:
    """Prompt tokens a second of each model, in one pass each: medians of turns that alternate between them."""
    from serve.llm import LLM
    from serve.sampling_params import SamplingParams

    size, once = len(prompt), SamplingParams(temperature=0.0, max_tokens=1)
    engines = [
        LLM(
            model,
            max_model_len=size + 16,
            max_num_seqs=1,
            max_num_batched_tokens=size,
            num_pages=size // 16 + 4,
            enable_prefix_caching=False,
        )
        for model in models
    ]
    seconds: list[list[float]] = [[] for _ in engines]
    for turn in range(repeats + 1):
        for engine, taken in zip(engines, seconds, strict=True):
            started = time.perf_counter()
            engine.generate([list(prompt)], once)
            if turn:  # the first warms up
                taken.append(time.perf_counter() - started)
    return [size / statistics.median(taken) for taken in seconds]


def measure_decoding(model: str, prompts: Sequence[list[int]], config: Decoding) -> tuple[SpeedPoint, ...]:
    """Greedy decoding after long prompts: the prompts' own time, which one token more takes, is left out.

    Prompts shorter than the context are repeated up to it: what counts is how much lies in the cache.
    """
    from serve.llm import LLM
    from serve.sampling_params import SamplingParams

    length = config.context_tokens + config.new_tokens + 16
    pages = max(config.batch_sizes) * (length // 16 + 2) + 8
    engine = LLM(model, max_model_len=length, num_pages=pages, enable_prefix_caching=False)
    asked = [repeated(prompt, config.context_tokens) for prompt in prompts]

    def seconds(batch_size: int, new_tokens: int) -> float:
        started = time.perf_counter()
        engine.generate(asked[:batch_size], SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True))
        return time.perf_counter() - started

    points = []
    for batch_size in sorted(config.batch_sizes):
        seconds(batch_size, 2)
        decoding = seconds(batch_size, config.new_tokens) - seconds(batch_size, 1)
        points.append(SpeedPoint(batch_size, batch_size * (config.new_tokens - 1) / max(decoding, 1e-9)))
    return tuple(points)


def repeated(prompt: Sequence[int], size: int) -> list[int]:
    """The prompt again and again, `size` tokens of it."""
    return (list(prompt) * -(-size // len(prompt)))[:size]


def prompts_from(batches: "Sequence[Batch]", *, count: int, prompt_tokens: int) -> list[list[int]]:
    """`count` prompts of `prompt_tokens` each, from the beginnings of held-out sequences; short ones are left out.

    With too few sequences the same ones are asked again.
    """
    found: list[list[int]] = []
    for batch in batches:
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            if end - start >= prompt_tokens or not found:
                found.append(batch.tokens[start : min(end, start + prompt_tokens)].tolist())
    return [found[index % len(found)] for index in range(count)]
