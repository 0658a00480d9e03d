"""Decoding and prefill by the engine, in this process, over random models of real shapes.

What the machine allows is bytes over the copy bandwidth or operations over the rate of a product, whichever takes
longer, both as part `peaks` has measured them: a decode step reads all weights once and the keys and values of all
sequences, and computes a token of each. On a CPU (--tiny) the path of CUDA graphs is walked with the stand-in of tests.
"""

import gc
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.common import DEVICE, DTYPE
from bench.gpu.checks import COPY, PRODUCT
from bench.gpu.figures import ITSELF, ROOFLINE, Figure, Goal
from bench.gpu.task import Skipped, Task
from bench.models import LLAMA_1B, LLAMA_8B, TINY, random_model, shaped
from bench.serve.decode_trace import find_gaps, kernel_times
from compress.quantize.round_to_nearest import quantize_model
from kernels.common.cuda_graph import graphs_on
from model.cost import flops_per_token, kv_bytes_per_token, weight_bytes
from model.formats.registry import format_named
from model.transformer import Transformer
from serve import LLM, SamplingParams
from serve.engine import engine as engine_module
from serve.engine.batch_state import synchronize
from serve.engine.engine import Engine
from serve.engine.kv_cache import PAGE_SIZE
from serve.engine.loading import Models
from tests.serve.recorded_graphs import recorded_graphs
from tests.serve.toys import toy_tokenizer

BF16 = "bf16"
SHAPES = {"8B": LLAMA_8B, "1B": LLAMA_1B}
WARM_STEPS, ROUNDS = 8, 3
STEP_TOKENS = 8192
"""Most tokens of a step: also the longest prompt that is read at once."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    shape: dict[str, Any]
    batches: tuple[int, ...] = (1, 16, 64, 256)
    graphless: tuple[int, ...] = (1, 16)
    """Batches that are measured without graphs too."""
    prompt: int = 512
    steps: int = 64
    """Of each round."""
    prompts: tuple[int, ...] = (512, 2048, 8192)
    """Lengths that prefill is measured at."""


def sizes_of(task: Task, shape: str) -> Sizes:
    if task.tiny:
        return Sizes(TINY, (1, 3), (1,), prompt=20, steps=4, prompts=(40,))
    return Sizes(SHAPES[shape])


class Sized:
    """A model in its serving form, and the arithmetic of its steps."""

    def __init__(self, model: Transformer, rates: dict[str, float]) -> None:
        """`model`: not fused yet. `rates`: what part `peaks` has found; nothing if it has not run."""
        self.config, self.rates = model.config, rates
        embedding = 0 if model.lm_head is None else model.model.embed_tokens.weight.nbytes
        self.read_bytes = weight_bytes(model, DTYPE) - embedding
        """Of weights, in a step: rows of the embedding are few."""
        self.model = model.fuse()

    def floor_s(self, tokens: int, rows: int, visible: int) -> float | None:
        """Seconds that a step takes at least; None where the machine's rates are not known.

        `tokens`: computed in all; `rows`: of logits; `visible`: keys that the tokens see, summed over them.
        """
        config = self.config
        if not self.rates:
            return None
        keys = kv_bytes_per_token(config, DTYPE) * visible
        scores = 4 * config.num_layers * config.num_query_heads * config.head_dim * visible
        operations = tokens * flops_per_token(config, 0) + scores + rows * 2 * config.hidden_size * config.vocab_size
        # A prompt's own keys are read by many of its tokens at once: of those what is written counts.
        num_bytes = self.read_bytes + (keys if tokens == rows else kv_bytes_per_token(config, DTYPE) * tokens)
        return max(num_bytes / (1e9 * self.rates[COPY]), operations / (1e12 * self.rates[PRODUCT]))


def sized_model(task: Task, shape: str, weights: str = BF16) -> Sized:
    """Of random weights, all linear layers but the head in the format of that name."""
    model = random_model(shaped(sizes_of(task, shape).shape), DTYPE, torch.device(DEVICE))
    if weights != BF16:
        quantize_model(model, format_named(weights))
    return Sized(model, task.measured("peaks"))


@contextmanager
def graphs(wanted: bool) -> Iterator[None]:
    """Engines made within have captured steps, or launch kernel by kernel."""
    stand_in = DEVICE == "cpu"
    engine_module.graphs_on = lambda device: (recorded_graphs() if stand_in else graphs_on(device)) if wanted else None
    try:
        yield
    finally:
        engine_module.graphs_on = graphs_on


def engine_of(
    model: Transformer, *, tokens: int, batch: int, draft: Transformer | None = None, captures: bool = True,
    all_tokens: int | None = None,
) -> Engine:  # fmt: skip
    """An engine for so many sequences at once, of at most so many tokens each, and `all_tokens` of all together."""
    gc.collect()  # an engine that is gone has left its pages
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    models = Models(model, toy_tokenizer(model.config.vocab_size), draft, dtype=DTYPE, device=torch.device(DEVICE))
    length = min(tokens + 64, model.config.max_position_embeddings)
    pages = (length * batch if all_tokens is None else all_tokens + length) // PAGE_SIZE + 2 * batch
    options = {"max_model_len": length, "max_num_seqs": batch, "num_pages": pages, "enable_prefix_caching": False}
    with graphs(captures):
        return LLM("random", models=models, max_num_batched_tokens=STEP_TOKENS, **options).engine


@dataclass
class Decoded:
    """Steps in which every sequence decoded."""

    tokens: int = 0
    reports: int = 0
    """A sequence's part in a step is one."""
    drafted: int = 0
    """Draft tokens that were verified."""
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@contextmanager
def decoding(engine: Engine, batch: int, prompt: int) -> Iterator[None]:
    """So many sequences behind random prompts, all of which decode, greedily, and have done so for some steps."""
    chosen = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=engine.max_model_len - prompt, ignore_eos=True)
    names = [str(number) for number in range(batch)]
    for name in names:
        engine.add_request(name, chosen.choices(range(2, engine.vocab_size), k=prompt), params)
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in checked_step(engine)}
    for _ in range(WARM_STEPS):
        checked_step(engine)
    yield
    for name in names:
        engine.abort(name)
    while engine.has_work():
        engine.step()


def decode_rounds(engine: Engine, batch: int, prompt: int, steps: int) -> list[Decoded]:
    with decoding(engine, batch, prompt):
        return [timed_steps(engine, steps) for _ in range(ROUNDS)]


def timed_steps(engine: Engine, steps: int) -> Decoded:
    synchronize(engine.device)
    decoded, drafted, began = Decoded(), engine.stats().num_draft_tokens, time.perf_counter()
    for _ in range(steps):
        outputs = checked_step(engine)
        decoded.tokens += sum(len(output.new_token_ids) for output in outputs)
        decoded.reports += len(outputs)
    synchronize(engine.device)
    decoded.seconds = time.perf_counter() - began
    decoded.drafted = engine.stats().num_draft_tokens - drafted
    return decoded


def checked_step(engine: Engine) -> list[Any]:
    """What a step says. Raises RuntimeError where a request failed: then nothing is worth timing."""
    outputs = engine.step()
    for output in outputs:
        if output.finish_reason is not None:
            raise RuntimeError(f"a request ended within the measurement: {output.finish_reason} {output.error or ''}")
    return outputs


def room(batch: int, sizes: Sizes, most_a_step: int = 1) -> int:
    """Tokens of a sequence: it decodes while other prompts are still read."""
    steps = batch * sizes.prompt // STEP_TOKENS + 2 + WARM_STEPS + ROUNDS * sizes.steps
    return sizes.prompt + most_a_step * steps


def decode(task: Task, shape: str, weights: str) -> Iterator[Figure]:
    """Tokens a second of each batch, replayed from graphs, and of some launched kernel by kernel."""
    sizes = sizes_of(task, shape)
    sized = sized_model(task, shape, weights)
    for captures, batches in ((True, sizes.batches), (False, sizes.graphless)):
        for batch in batches:
            tokens = room(batch, sizes)
            engine = engine_of(sized.model, tokens=tokens, batch=batch, captures=captures)
            rounds = decode_rounds(engine, batch, sizes.prompt, sizes.steps)
            speed = statistics.median(decoded.tokens_per_s for decoded in rounds)
            floor_s = sized.floor_s(batch, batch, batch * (sizes.prompt + tokens) // 2)
            roofline = None if floor_s is None else batch / floor_s
            goals, failures = decode_goals(shape, weights, batch), engine.stats().num_graph_failures
            name = decode_name(shape, weights, batch) + ("" if captures else ", no graphs")
            note = f"{failures} captures failed" if failures else ""
            yield Figure(name, "tokens/s", speed, roofline=roofline, goals=goals if captures else (), note=note)
            del engine


def decode_name(shape: str, weights: str, batch: int) -> str:
    return f"decode {shape} {weights}, batch {batch}"


def decode_goals(shape: str, weights: str, batch: int) -> tuple[Goal, ...]:
    if batch > 1:
        return ()
    if shape == "1B":
        return Goal("vllm", 1.5), Goal("transformers", 5.0)
    return Goal("vllm", 1.1), Goal(ROOFLINE, 0.8 if weights == BF16 else 0.6)


def idle(task: Task, shape: str) -> Iterator[Figure]:
    """How long the GPU waits between two kernels while it decodes; the profiler slows the host down a little."""
    if DEVICE != "cuda":
        raise Skipped("needs a GPU: on a CPU no kernel runs beside the host")
    sizes, sized = sizes_of(task, shape), sized_model(task, shape)
    for batch in sizes.graphless:
        engine = engine_of(sized.model, tokens=room(batch, sizes), batch=batch)
        with decoding(engine, batch, sizes.prompt), profile(activities=[ProfilerActivity.CUDA]) as profiler:
            timed_steps(engine, sizes.steps)
        kernels = kernel_times(profiler)
        share = sum(find_gaps(kernels)) / (max(end for _, end in kernels) - min(begin for begin, _ in kernels))
        goal, name = 2.0 if shape == "8B" else 5.0, f"GPU idle while it decodes {shape} bf16, batch {batch}"
        yield Figure(name, "%", 100 * share, goals=(Goal(ITSELF, goal),), less_is_better=True)
        del engine


def prefill(task: Task, shape: str, weights: str) -> Iterator[Figure]:
    """Prompt tokens a second, of one prompt at a time."""
    sizes = sizes_of(task, shape)
    sized = sized_model(task, shape, weights)
    for length in sizes.prompts:
        engine = engine_of(sized.model, tokens=length, batch=1)
        seconds = [read_prompt(engine, length, seed) for seed in range(1 + ROUNDS)][1:]
        floor_s = sized.floor_s(length, 1, length * length // 2)
        roofline = None if floor_s is None else length / floor_s
        yield Figure(prefill_name(shape, length), "tokens/s", length / statistics.median(seconds), roofline=roofline)


def prefill_name(shape: str, length: int) -> str:
    return f"prefill {shape} bf16, {length} tokens"


def read_prompt(engine: Engine, length: int, seed: int) -> float:
    """Seconds until the first token behind a random prompt."""
    prompt = random.Random(seed).choices(range(2, engine.vocab_size), k=length)
    synchronize(engine.device)
    began = time.perf_counter()
    engine.add_request("prompt", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    error = None
    while engine.has_work():
        for output in engine.step():
            error = error or output.error
    if error:
        raise RuntimeError(error)
    return time.perf_counter() - began
