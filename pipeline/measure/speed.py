"""Tokens a second of the serving engine, alone or with a draft: what `potstill serve` gives, minus HTTP."""

import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from model.files.checkpoint import load_config
from model.mesh import has_gpu
from pipeline.results import SpeedPoint
from pipeline.stages.shared.config import Decoding, Speed
from serve.config import EngineConfig
from serve.engine.engine import Engine
from serve.engine.loading import check_same_vocabulary, load_models
from serve.engine.warm_up import warm_up
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from train.packing import Batch

S = TypeVar("S", bound=Speed | Decoding)
log = logging.getLogger(__name__)

PREFILL_TOKENS = 2_048
"""Of one step, when several long prompts are to be read before decoding is timed."""

BEHIND_A_PROMPT = 16
"""Tokens for which there is room besides those that are asked for."""

WARM_UP_TOKENS = 64
"""Enough steps for the adaptive draft length to have measured acceptance and step costs."""

TURNS = 9
"""Timings of each engine at each batch size: one ratio of two is off by some hundredths, their median by one."""


def known_positions(folders: Iterable[Path]) -> int:
    """Of the models in these folders, those that all of them know."""
    return min(load_config(folder).num_positions for folder in folders)


def within(config: S, positions: int) -> S:
    """The same on prompts so short, and with so few tokens after them, that these positions hold both; says so."""
    new_tokens = min(config.new_tokens, positions // 2)
    if isinstance(config, Speed):
        prompt, room = "prompt_tokens", positions - new_tokens - BEHIND_A_PROMPT
    else:
        most = min(config.context_tokens, positions)
        prompt, room = "context_tokens", positions - _tokens_after(most, config, new_tokens)
    fitting = replace(config, **{prompt: max(min(getattr(config, prompt), room), 1), "new_tokens": new_tokens})
    if fitting != config:
        log.warning("speed is measured on shorter texts than asked for: its models know %s positions", f"{positions:,}")
    return fitting


def measure_speed(engines: Sequence[LLM], prompts: Sequence[list[int]], config: Speed) -> list[tuple[SpeedPoint, ...]]:
    """Greedy generation of each engine at each batch size, prompts included, after a warm-up.

    Medians of turns that alternate between the engines, forth and back, so that what slows the machine for a while
    slows all of them. Each turn asks other prompts, as far as there are: how many drafts are accepted depends on them.
    """
    timed = SamplingParams(temperature=0.0, max_tokens=config.new_tokens, ignore_eos=True)
    points: list[list[SpeedPoint]] = [[] for _ in engines]
    for batch_size in sorted(config.batch_sizes):
        asked = [
            [prompts[(turn * batch_size + at) % len(prompts)] for at in range(batch_size)] for turn in range(TURNS)
        ]
        for engine in engines:
            engine.generate(asked[0], SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True))
        turns = [_in_turn(engines, own, timed, back=number % 2 == 1) for number, own in enumerate(asked)]
        first, *_ = of_engines = list(zip(*turns, strict=True))
        for found, own in zip(points, of_engines, strict=True):
            found.append(_point(batch_size, own, None if own is first else first))
    return [tuple(found) for found in points]


@dataclass(frozen=True)
class _Turn:
    tokens_per_s: float
    num_drafted: int
    num_accepted: int


def _point(batch_size: int, turns: Sequence[_Turn], first: Sequence[_Turn] | None) -> SpeedPoint:
    """Of one engine's turns, and those of the first engine beside it. A machine's speed drifts, so turns are compared
    one by one."""
    drafted, accepted = sum(turn.num_drafted for turn in turns), sum(turn.num_accepted for turn in turns)
    return SpeedPoint(
        batch_size,
        tokens_per_s=statistics.median(turn.tokens_per_s for turn in turns),
        accepted=accepted / drafted if drafted else None,
        beside=None if first is None else statistics.median(_ratios(turns, first)),
    )


def _ratios(turns: Sequence[_Turn], first: Sequence[_Turn]) -> list[float]:
    return [own.tokens_per_s / other.tokens_per_s for own, other in zip(turns, first, strict=True)]


def _in_turn(engines: Sequence[LLM], prompts: list[list[int]], params: SamplingParams, *, back: bool) -> list[_Turn]:
    """One turn of each, in their order, or begun with the last."""
    found = [_timed(engine, prompts, params) for engine in (reversed(engines) if back else engines)]
    return found[::-1] if back else found


def _timed(engine: LLM, prompts: list[list[int]], params: SamplingParams) -> _Turn:
    started = time.perf_counter()
    answers = [answer.choices[0] for answer in engine.generate(prompts, params)]
    seconds = time.perf_counter() - started
    return _Turn(
        tokens_per_s=sum(len(answer.token_ids) for answer in answers) / seconds,
        num_drafted=sum(answer.num_drafted for answer in answers),
        num_accepted=sum(answer.num_accepted for answer in answers),
    )


def engines_for_speed(model: str, verifier: str | None, config: Speed) -> list[LLM]:
    """Engines of the verifier, of the model, and of the model verified; without a verifier only that of the model.

    Warmed up, as the server's are before the first request.

    The verifier's weights are read once and used by both of its engines; each engine has KV pages of its own. The model
    is read again as a draft, since a draft may have fewer tokens to say.
    """
    length = config.prompt_tokens + config.new_tokens + BEHIND_A_PROMPT
    options: dict[str, Any] = {
        "max_model_len": length,
        "num_pages": max(config.batch_sizes) * (length // 16 + 2) + 8,
        "enable_prefix_caching": False,
    }
    alone = load_models(EngineConfig(model=model))
    engines = [LLM(model, models=alone, **options)]
    if verifier is not None:
        check_same_vocabulary(verifier, model)
        pair = load_models(EngineConfig(model=verifier, draft=model))
        target, together = replace(pair, draft=None), LLM(verifier, draft=model, models=pair, **options)
        engines = [LLM(verifier, models=target, **options), *engines, together]
    for llm in engines:
        warm_up(llm.engine)
    return engines


def measure_prefill(folders: Mapping[str, Path], prompt: Sequence[int], repeats: int = 5) -> dict[str, float]:
    """Prompt tokens a second of each model, in one pass each: medians of turns that alternate between them."""
    size, once = len(prompt), SamplingParams(temperature=0.0, max_tokens=1)
    engines = _engines(
        folders,
        max_model_len=size + BEHIND_A_PROMPT,
        max_num_seqs=1,
        max_num_batched_tokens=size,
        num_pages=size // 16 + 4,
    )
    seconds: list[list[float]] = [[] for _ in engines]
    for turn in range(repeats + 1):
        for engine, taken in zip(engines, seconds, strict=True):
            started = time.perf_counter()
            engine.generate([list(prompt)], once)
            if turn:  # the first warms up
                taken.append(time.perf_counter() - started)
    return {name: size / statistics.median(taken) for name, taken in zip(folders, seconds, strict=True)}


def measure_decoding(
    folders: Mapping[str, Path], prompts: Sequence[list[int]], config: Decoding
) -> dict[str, dict[str, float]]:
    """Tokens a second by model and batch size: greedy decoding after long prompts, by the median of steps.

    On the CPU the models take steps in turn. A GPU may have room for one such cache and not for two, and is steadier:
    there one model comes after the other. Prompts shorter than the context are repeated up to it: what counts is how
    much lies in the cache.
    """
    if not config.batch_sizes:
        return {name: {} for name in folders}
    asked = [repeated(prompt, config.context_tokens) for prompt in prompts]
    if not has_gpu():
        return _decode_in_turns(folders, asked, config)
    return {name: _decode_in_turns({name: folder}, asked, config)[name] for name, folder in folders.items()}


def _decode_in_turns(
    folders: Mapping[str, Path], prompts: Sequence[list[int]], config: Decoding
) -> dict[str, dict[str, float]]:
    most = max(config.batch_sizes)
    budget = max(PREFILL_TOKENS, 2 * most)
    longest = config.context_tokens + _tokens_after(config.context_tokens, config, config.new_tokens)
    pages = most * (longest // 16 + 2) + 8
    options = {"max_model_len": longest, "max_num_seqs": most, "max_num_batched_tokens": budget, "num_pages": pages}
    engines = [llm.engine for llm in _engines(folders, **options)]
    speeds: dict[str, dict[str, float]] = {name: {} for name in folders}
    for size in sorted(config.batch_sizes):
        steps = _decoding_steps_s(engines, prompts[:size], longest - config.context_tokens, config.new_tokens - 1)
        for name, own in zip(folders, zip(*steps, strict=True), strict=True):
            speeds[name][str(size)] = size / statistics.median(own)
    return speeds


def _tokens_after(context_tokens: int, config: Decoding, new_tokens: int) -> int:
    """Most tokens that one sequence gets after its prompt.

    The first to decode goes on while the others' prompts take what is left of the budget, half of it or more.
    """
    most = max(config.batch_sizes, default=1)
    return new_tokens + most * context_tokens // max(PREFILL_TOKENS // 2, most) + 2


def _engines(folders: Mapping[str, Path], **options: Any) -> list[LLM]:
    """One for each folder; none finds a prompt in its cache that it has read before."""
    return [LLM(str(folder), enable_prefix_caching=False, **options) for folder in folders.values()]


def _decoding_steps_s(
    engines: Sequence[Engine], prompts: Sequence[list[int]], most_tokens: int, num_steps: int
) -> list[list[float]]:
    """Seconds of `num_steps` steps, of each engine, in which each of `prompts`, read before, gets one more token."""
    params = SamplingParams(temperature=0.0, max_tokens=most_tokens, ignore_eos=True)
    names = {str(number): prompt for number, prompt in enumerate(prompts)}
    for engine in engines:
        for name, prompt in names.items():
            engine.add_request(name, prompt, params)
        silent = set(names)
        while silent:
            silent -= {output.request_id for output in engine.step() if output.new_token_ids}
    seconds = [[_step_s(engine) for engine in engines] for _ in range(num_steps)]
    for engine in engines:
        for name in names:
            engine.abort(name)
    return seconds


def _step_s(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def repeated(prompt: Sequence[int], size: int) -> list[int]:
    """The prompt again and again, `size` tokens of it."""
    return (list(prompt) * -(-size // len(prompt)))[:size]


def prompts_from(batches: Sequence[Batch], *, count: int, prompt_tokens: int) -> list[list[int]]:
    """`count` prompts of `prompt_tokens` each, from the beginnings of held-out sequences; short ones are left out.

    With too few sequences the same ones are asked again.
    """
    found: list[list[int]] = []
    for batch in batches:
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            if end - start >= prompt_tokens or not found:
                found.append(batch.tokens[start : min(end, start + prompt_tokens)].tolist())
    return [found[index % len(found)] for index in range(count)]
