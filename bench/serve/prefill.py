"""What attention in C saves of reading a prompt on the CPU, beside torch's attention.

    python -m bench.serve.prefill [FOLDER]      # writes bench/results/prefill-cpu.json; 3 minutes

One layer's attention of prompts and of the last chunk of one, then whole prompts through the engine with SmolLM2-135M,
in the dtype that serving chooses here. Both sides by turns, in one process; processor time of one thread, the least of
all turns.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

import kernels.attention._paged_cpu as module
from bench.common import DTYPE, teacher_folder, write_result_by_processor
from bench.kernels.decode import LAYERS
from kernels.attention.paged import paged_attention, plan_paged_attention
from serve import LLM, SamplingParams
from tests.compare import check_close

PAGE, CHUNK = 16, 512
LAYER_PROMPTS = {"SmolLM2-135M": (512, 1024, 4096, 8192), "Llama-3-8B": (512, 1024)}
WHOLE_PROMPTS = (512, 1024)
TURNS = 2


@contextmanager
def attention_of(side: str) -> Iterator[None]:
    """Has prompts attended in C, or by torch."""
    in_c = module.prefills
    module.prefills = in_c if side == "c" else lambda *tensors: False
    yield
    module.prefills = in_c


def compare(run: Callable[[], object], turns: int) -> dict[str, float]:
    least = dict.fromkeys(("c", "torch"), float("inf"))
    for _, side in product(range(turns), least):
        with attention_of(side):
            begin = time.thread_time()
            run()
            least[side] = min(least[side], time.thread_time() - begin)
    return {**{f"{side}_s": seconds for side, seconds in least.items()}, "speedup": least["torch"] / least["c"]}


def layer(heads: tuple[int, int, int], queries: int, keys: int) -> Callable[[], torch.Tensor]:
    """The attention of one layer, over pages anywhere."""
    num_heads, num_kv_heads, head_dim = heads
    pages = keys // PAGE
    k_pages, v_pages = torch.randn(2, pages, PAGE, num_kv_heads, head_dim).to(DTYPE)
    q, tables = torch.randn(queries, num_heads, head_dim).to(DTYPE), torch.randperm(pages).int()[None]
    where = tables, torch.tensor([0, queries]).int(), torch.tensor([keys]).int()
    plan = plan_paged_attention(*where, PAGE)
    return lambda: paged_attention(q, k_pages, v_pages, *where, plan=plan)


def measure_layers() -> Iterator[dict[str, Any]]:
    for name, keys in ((name, keys) for name, prompts in LAYER_PROMPTS.items() for keys in prompts):
        for queries in sorted({CHUNK, keys}):
            run = layer(LAYERS[name], queries, keys)
            results = []
            for side in ("c", "torch"):
                with attention_of(side):
                    results.append(run())
            check_close(results[0], results[1].double())
            yield {"layer": name, "queries": queries, "keys": keys, **compare(run, TURNS)}


def reads_prompt(llm: LLM, tokens: int) -> Callable[[], None]:
    prompt = random.Random(0).choices(range(llm.engine.vocab_size), k=tokens)

    def run() -> None:
        llm.engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        while llm.engine.has_work():
            llm.engine.step()

    return run


def measure_prompts(folder: str) -> Iterator[dict[str, Any]]:
    llm = LLM(folder, num_pages=1024, enable_prefix_caching=False)
    reads_prompt(llm, 64)()
    for tokens in WHOLE_PROMPTS:
        yield {"tokens": tokens, **compare(reads_prompt(llm, tokens), TURNS)}


def noted(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = []
    for row in rows:
        print(row, flush=True)
        kept.append(row)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a model; default: SmolLM2-135M-Instruct, imported")
    folder = parser.parse_args().model or str(teacher_folder())
    torch.set_num_threads(1)
    result = {
        "unit": "seconds of one thread's processor time, the least of all turns",
        "dtype": str(DTYPE),
        "layers": noted(measure_layers()),
        "prompts": noted(measure_prompts(folder)),
    }
    write_result_by_processor("prefill-cpu", "python -m bench.serve.prefill", result)


if __name__ == "__main__":
    main()
