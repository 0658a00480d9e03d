"""`potstill generate`: one answer from the engine in this process, drafted tokens marked, and its speed."""

import argparse
import time

from rich.console import Console

from pipeline.report.terminal import print_answer
from pipeline.results import pieces_of
from pipeline.run_folder import Served
from serve.config import target_and_draft
from serve.llm import LLM
from serve.sampling_params import SamplingParams


def generate(served: Served, prompt: str, options: argparse.Namespace) -> int:
    """Prints the answer on standard output and the speed on standard error. Returns the exit code."""
    model, draft = target_and_draft(served.model, served.verify)
    names = "dtype", "device", "tensor_parallel_size", "pipeline_parallel_size"
    chosen = {name: getattr(options, name) for name in names}
    engine = LLM(model, draft=draft, kv_cache_bytes=2**29, **chosen)
    params = SamplingParams(
        temperature=options.temperature, top_p=options.top_p, seed=options.seed, max_tokens=options.max_tokens
    )
    started = time.perf_counter()
    if options.raw or not engine.tokenizer.templates:
        answer = engine.generate(prompt, params)[0].choices[0]
    else:
        answer = engine.chat([{"role": "user", "content": prompt}], params)[0].choices[0]
    seconds = time.perf_counter() - started
    spelled = engine.tokenizer.token_bytes()
    tokens = [(spelled[token], drafted) for token, drafted in zip(answer.token_ids, answer.drafted_mask, strict=True)]
    print_answer(Console(), pieces_of(tokens, answer.text))
    count = len(answer.token_ids)
    accepted = ""
    if answer.num_drafted:
        accepted = f"; {answer.num_accepted} of {answer.num_drafted} drafted tokens accepted"
    end = ""
    if answer.finish_reason == "length":
        end = f"; stopped at {'--max-tokens' if count == options.max_tokens else 'the last position of the model'}"
    speed = f"{count} tokens, {count / seconds:.1f} tokens/s{accepted}{end}"
    Console(stderr=True).print(speed, style="dim", soft_wrap=True)
    return 0
