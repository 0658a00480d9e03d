"""What others make of the same shapes, batches and lengths: transformers and vLLM, where they are installed.

Their weights are random too, and their prompts are token ids. Each yields figures by the names that ours have.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.common import DEVICE, DTYPE
from bench.gpu.engine import ROUNDS, Sizes, decode_name, prefill_name, sizes_of
from bench.gpu.figures import Figure
from bench.gpu.serving import mix_of, offline_name
from bench.gpu.task import Task
from bench.models import shaped

MOST_CACHED = 2**18
"""Tokens, prompts and answers of a batch together, that transformers is given at once: it plans no memory."""


def transformers_model(shape: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = {name: value for name, value in shaped(shape).to_hf().items() if name != "architectures"}
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=DTYPE).eval()


def transformers_decode(task: Task, shape: str) -> Iterator[Figure]:
    """`generate`, whose time for a prompt and one token is taken off; that time is its prefill."""
    sizes = sizes_of(task, shape)
    model = transformers_model(sizes.shape)
    vocab_size = sizes.shape.get("vocab_size", 512)

    def seconds(batch: int, prompt: int, new_tokens: int) -> float:
        ids = torch.randint(2, vocab_size, (batch, prompt), device=DEVICE)
        return timed(lambda: generate(model, ids, new_tokens))

    for batch in (batch for batch in sizes.batches if batch * (sizes.prompt + sizes.steps) <= MOST_CACHED):
        seconds(batch, sizes.prompt, 2)
        lasts = [seconds(batch, sizes.prompt, 1 + sizes.steps) - seconds(batch, sizes.prompt, 1) for _ in range(ROUNDS)]
        speed = batch * sizes.steps / statistics.median(lasts)
        yield Figure(decode_name(shape, "bf16", batch), "tokens/s", peers={"transformers": speed})
    for length in sizes.prompts:
        lasts = [seconds(1, length, 1) for _ in range(1 + ROUNDS)][1:]
        speed = length / statistics.median(lasts)
        yield Figure(prefill_name(shape, length), "tokens/s", peers={"transformers": speed})


def generate(model: Any, ids: torch.Tensor, new_tokens: int) -> None:
    wanted = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **wanted)


def timed(run: Callable[[], Any]) -> float:
    """Seconds on the host's clock, the device idle before and after."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def transformers_offline(task: Task, shape: str) -> Iterator[Figure]:
    """Its continuous batching, which wants answers of one length: the mean of ours."""
    from transformers import GenerationConfig

    sizes, mix = sizes_of(task, shape), mix_of(task)
    model = transformers_model(sizes.shape)
    requests = mix.requests(sizes.shape.get("vocab_size", 512))
    prompts, wanted = [prompt for prompt, _ in requests], sum(wanted for _, wanted in requests) // len(requests)
    config = GenerationConfig(max_new_tokens=wanted, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found: list[int] = []
    # It would take most of a laptop's memory for its cache.
    bounded = {"continuous_batching_config": small_batches()} if task.tiny else {}

    def run() -> None:
        answers = model.generate_batch(prompts, generation_config=config, **bounded)
        found.append(sum(len(answer.generated_tokens) for answer in answers.values()))

    seconds = timed(run)
    if found[-1] != wanted * len(prompts):
        raise RuntimeError(f"generate_batch made {found[-1]} tokens; {wanted * len(prompts)} were wanted")
    yield Figure(offline_name(shape), "tokens/s", peers={"transformers": found[-1] / seconds})


def small_batches() -> Any:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)


def vllm(task: Task, shape: str) -> Iterator[Figure]:
    """The engine in its process, as it starts by default but for prefixes: they are random."""
    import vllm as package

    sizes, mix = sizes_of(task, shape), mix_of(task)
    longest = max(2 * mix.high, sizes.prompt + sizes.steps, *sizes.prompts) + 64
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shaped(sizes.shape).to_hf()))
        llm = package.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype=str(DTYPE).removeprefix("torch."),
            max_model_len=longest, enable_prefix_caching=False,
        )  # fmt: skip

        def seconds(prompts: list[list[int]], wanted: list[int]) -> float:
            params = [
                package.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
                for count in wanted
            ]
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            return timed(lambda: llm.generate(asked, params, use_tqdm=False))

        yield from vllm_figures(seconds, sizes, shape, mix.requests(sizes.shape.get("vocab_size", 512)))


Seconds = Callable[[list[list[int]], list[int]], float]
"""Of answering prompts of token ids with so many tokens each."""


def vllm_figures(seconds: Seconds, sizes: Sizes, shape: str, requests: list[tuple[list[int], int]]) -> Iterator[Figure]:
    chosen = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [chosen.choices(range(2, sizes.shape.get("vocab_size", 512)), k=length) for _ in range(count)]

    for batch in sizes.batches:
        long, short = (
            [seconds(prompts(batch, sizes.prompt), [new] * batch) for _ in range(1 + ROUNDS)][1:]
            for new in (1 + sizes.steps, 1)
        )
        speed = batch * sizes.steps / (statistics.median(long) - statistics.median(short))
        yield Figure(decode_name(shape, "bf16", batch), "tokens/s", peers={"vllm": speed})
    for length in sizes.prompts:
        lasts = [seconds(prompts(1, length), [1]) for _ in range(1 + ROUNDS)][1:]
        yield Figure(prefill_name(shape, length), "tokens/s", peers={"vllm": length / statistics.median(lasts)})
    asked, wanted = [prompt for prompt, _ in requests], [count for _, count in requests]
    speed = sum(wanted) / min(seconds(asked, wanted) for _ in range(2))
    yield Figure(offline_name(shape), "tokens/s", peers={"vllm": speed})
