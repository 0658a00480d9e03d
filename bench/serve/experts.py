"""A mixture of experts beside transformers: eight requests decoded together on the CPU, greedy.

    python -m bench.serve.experts               # about two minutes on 2 cores

Random weights of Qwen3's form with experts, rounded to numbers of bf16 as checkpoints have them, computed in bf16 and
in fp32, where answers are to be equal: random weights decide by less than bf16 can tell. transformers computes its
experts by grouped products, its default. Both sides compute the same prompts in turns with one thread, after a round
that does not count; processor time of the whole, prompts included, the median of the rounds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.common import write_result
from model.files.checkpoint import load_model
from tests.serve.toys import generate, greedy, make_engine

REQUESTS, PROMPT, ROUNDS = 8, 32, 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512, "norm_topk_prob": True, "initializer_range": 0.1, "max_position_embeddings": 1024,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time, and what came out."""
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def their_model() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # not the buffers: angles stay as they are
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def beside(dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Both sides in turns, computing in this dtype."""
    theirs = their_model().to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder))
        model = load_model(folder, dtype=dtype).fuse()
    engine = make_engine(model, max_model_len=256)
    prompts = torch.randint(3, SIZES["vocab_size"], (REQUESTS, PROMPT))
    told = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": torch.ones_like(prompts)}
    sides: dict[str, Callable[[], Any]] = {
        "potstill": lambda: generate(engine, prompts.tolist(), greedy(tokens)),
        "transformers": lambda: theirs.generate(prompts, **told)[:, PROMPT:].tolist(),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    written: dict[str, Any] = {}
    for turn in range(1 + ROUNDS):
        for side, run in sides.items():
            seconds, written[side] = seconds_of(run)
            if turn:
                times[side].append(seconds)
    ours, other = (statistics.median(times[side]) for side in sides)
    print(f"{dtype}: potstill {ours:.2f} s, transformers {other:.2f} s: {other / ours:.2f}x")
    result = {"processor_seconds": times, "ratio": round(other / ours, 2)}
    if dtype == torch.float32:
        result["equal_answers"] = sum(one == two for one, two in zip(*written.values(), strict=True))
        print(f"{result['equal_answers']} of {REQUESTS} answers equal")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="new ones of each request")
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    result = {"model": SIZES, "requests": REQUESTS, "prompt_tokens": PROMPT, "new_tokens": tokens}
    result |= {name: beside(dtype, tokens) for name, dtype in DTYPES.items()}
    write_result("experts-cpu", "python -m bench.serve.experts", result)


if __name__ == "__main__":
    main()
