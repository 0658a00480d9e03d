"""Tokens a second of the serving engine, alone or with a draft: what `potstill serve` gives, minus HTTP."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.result import SpeedPoint
from pipeline.schema import Decoding, Speed

if TYPE_CHECKING:
    from serve.engine import Engine
    from train.packing import Batch

PREFILL_TOKENS = 2_048
"""Of one step, when several long prompts are to be read before decoding is timed."""

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
    """Greedy decoding after long prompts, by the median time of the steps in which everybody decodes.

    Prompts shorter than the context are repeated up to it: what counts is how much lies in the cache.
    """
    from serve.llm import LLM

    if not config.batch_sizes:
        return ()
    most = max(config.batch_sizes)
    budget = max(PREFILL_TOKENS, 2 * most)
    # The first to decode goes on while the others' prompts take what is left of the budget, half of it or more.
    longest = config.context_tokens + config.new_tokens + most * config.context_tokens // (budget // 2) + 2
    engine = LLM(
        model,
        max_model_len=longest,
        max_num_seqs=most,
        max_num_batched_tokens=budget,
        num_pages=most * (longest // 16 + 2) + 8,
        enable_prefix_caching=False,
    ).engine
    asked = [repeated(prompt, config.context_tokens) for prompt in prompts]
    return tuple(
        SpeedPoint(size, size / _decoding_step_s(engine, asked[:size], longest - config.context_tokens, config))
        for size in sorted(config.batch_sizes)
    )


def _decoding_step_s(engine: "Engine", prompts: Sequence[list[int]], most_tokens: int, config: Decoding) -> float:
    """Seconds of a step in which each of `prompts`, read before, gets one more token, at most `most_tokens` in all."""
    from serve.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=most_tokens, ignore_eos=True)
    names = {str(number): prompt for number, prompt in enumerate(prompts)}
    for name, prompt in names.items():
        engine.add_request(name, prompt, params)
    silent = set(names)
    while silent:
        silent -= {output.request_id for output in engine.step() if output.new_token_ids}
    seconds = []
    for _ in range(config.new_tokens - 1):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    for name in names:
        engine.abort(name)
    return statistics.median(seconds)


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
