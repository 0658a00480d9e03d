"""Decoding speed of potstill's engine beside transformers' `generate`: same model, same prompts, same lengths, one run.

    python -m bench.serve            # both parts, about 12 minutes on 2 cores

Part 1, one request at a time: 128 new tokens after a prompt of 64, through the engine, over HTTP, and by `generate`.
Part 2, 64 requests that want 16 to 512 new tokens: the engine takes them all at once; `generate` runs them in static
batches, each as long as its longest request, with the batch size that is fastest for it. Every side decodes greedily
in bf16 with end-of-text ignored, so all produce the same number of wanted tokens. Speeds count wanted tokens only.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT, teacher_folder, write_result
from model.text.tokenizer import Tokenizer
from pipeline.stages.conversation.server import running_server
from serve import LLM, SamplingParams

STATIC_BATCH_SIZES = (8, 16, 32, 64)


class Transformers:
    """`generate` as its documentation shows it: left padding, one call a batch."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
            out = self.model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        return out[:, longest:].tolist()

    def generate_in_batches(self, prompts: list[list[int]], lengths: list[int], batch_size: int) -> None:
        for start in range(0, len(prompts), batch_size):
            stop = start + batch_size
            self.generate(prompts[start:stop], max(lengths[start:stop]))


def ask(address: tuple[str, int], prompt: list[int], new_tokens: int) -> None:
    body = {"model": "teacher", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    with closing(HTTPConnection(*address, timeout=300)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        usage = json.loads(connection.getresponse().read())["usage"]
    if usage["completion_tokens"] != new_tokens:
        raise RuntimeError(f"The server generated {usage} instead of {new_tokens} tokens.")


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def prompts_of(folder: Path, lengths: list[int]) -> list[list[int]]:
    """Prompts of the given lengths in tokens, cut from Python's own source."""
    text = Path(argparse.__file__).read_text() * 2
    tokens = Tokenizer.load(folder).encode(text)
    return [tokens[97 * index : 97 * index + length] for index, length in enumerate(lengths)]


def one_at_a_time(folder: Path, llm: LLM, peer: Transformers, rounds: int) -> dict[str, Any]:
    new_tokens = 128
    [prompt] = prompts_of(folder, [64])
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    with running_server(folder, None, "--dtype", "bfloat16", name="teacher") as address:
        sides: dict[str, Callable[[], Any]] = {
            "potstill_engine": lambda: llm.generate([prompt], params),
            "potstill_http": lambda: ask(address, prompt, new_tokens),
            "transformers": lambda: peer.generate([prompt], new_tokens),
        }
        taken = [{name: seconds(run) for name, run in sides.items()} for _ in range(rounds + 1)]
    speeds = {name: [new_tokens / each[name] for each in taken[1:]] for name in sides}  # the first warms everybody up
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "prompt_tokens": 64, "new_tokens": new_tokens, "tokens_per_s": medians, "all_tokens_per_s": speeds,
        "ratio_engine": medians["potstill_engine"] / medians["transformers"],
        "ratio_http": medians["potstill_http"] / medians["transformers"],
    }  # fmt: skip


def many_at_once(folder: Path, llm: LLM, peer: Transformers, rounds: int) -> dict[str, Any]:
    rng = random.Random(0)
    lengths = [rng.randint(16, 512) for _ in range(64)]
    prompts = prompts_of(folder, [rng.randint(16, 256) for _ in range(64)])
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    wanted = sum(lengths)

    def by_engine() -> None:
        generations = llm.generate(prompts, params)
        produced = sum(len(generation.choices[0].token_ids) for generation in generations)
        if produced != wanted:
            raise RuntimeError(f"The engine produced {produced} tokens, {wanted} were wanted.")

    static: dict[int, float] = {}
    for size in STATIC_BATCH_SIZES:
        static[size] = wanted / seconds(partial(peer.generate_in_batches, prompts, lengths, size))
        print(f"  transformers, static batches of {size}: {static[size]:.0f} tokens/s", flush=True)
    best = max(static, key=lambda size: static[size])
    theirs, ours = [static[best]], []
    for round_number in range(rounds):
        ours.append(wanted / seconds(by_engine))
        if round_number:
            theirs.append(wanted / seconds(partial(peer.generate_in_batches, prompts, lengths, best)))
        print(f"  potstill {ours[-1]:.0f} tokens/s, transformers {theirs[-1]:.0f}", flush=True)
    return {
        "requests": len(lengths), "new_tokens": wanted,
        "tokens_per_s": {"potstill_engine": statistics.median(ours), "transformers": statistics.median(theirs)},
        "all_tokens_per_s": {"potstill_engine": ours, "transformers": theirs}, "static_batch_tokens_per_s": static,
        "best_static_batch": best, "ratio_engine": statistics.median(ours) / statistics.median(theirs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measured repetitions of each side")
    options = parser.parse_args()
    folder = teacher_folder()
    llm, peer = LLM(str(folder), dtype="bfloat16"), Transformers(folder)
    print("One request at a time", flush=True)
    single = one_at_a_time(folder, llm, peer, options.rounds)
    print(f"  {single['tokens_per_s']}, engine {single['ratio_engine']:.2f}x, HTTP {single['ratio_http']:.2f}x")
    print("64 requests of mixed lengths", flush=True)
    many = many_at_once(folder, llm, peer, options.rounds)
    print(f"  {many['tokens_per_s']}, engine {many['ratio_engine']:.2f}x")
    path = write_result("serve-cpu", "python -m bench.serve", {"one_at_a_time": single, "many_at_once": many})
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
