"""Decoding speed of potstill's engine beside transformers' `generate`: same model, same prompts, same lengths, one run.

    python -m bench.serve                       # parts 1 and 2, about 15 minutes on 2 cores
    python -m bench.serve --beside llama.cpp    # part 3
    python -m bench.serve --beside vllm --peer PEER/bin/python      # part 4; bench/serve/vllm_cpu.py makes PEER
    python -m bench.serve --beside continuous   # part 5

Part 1, one request at a time: 128 new tokens after a prompt of 64, through the engine, over HTTP, and by `generate`.
Part 2, 64 requests that want 16 to 512 new tokens: the engine takes them all at once; `generate` runs them in static
batches, each as long as its longest request, with the batch size that is fastest for it. All decode greedily in the
dtype that suits the machine with end-of-text ignored, so all produce the same number of wanted tokens. Speeds count
wanted tokens only.

Part 3, GGUF files of 4 and 8 bits beside llama.cpp, over HTTP, on as many threads: 1 and 8 requests at a time, each for
128 new tokens after a prompt of 64 that the server has not seen; `rounded`: with `--activations int8`, as llama.cpp
rounds always.

Part 4, the same model beside vLLM's server for CPUs, over HTTP, on as many threads: 1, 8 and 32 at a time as in
part 3, and a prompt of 900 tokens with one new token, counted in prompt tokens.

Part 5, the prompts of part 2 beside transformers' continuous batching, with 16 new tokens each: it is slow on CPUs.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.common import DTYPE, check_peer, teacher_folder, write_result, write_result_by_processor
from bench.serve.llama_cpp import check_installed, instructions, running_llama_cpp
from bench.serve.vllm_cpu import running_vllm
from model.formats.gguf.reader import import_gguf_blocks
from model.formats.gguf.writer import export_gguf
from model.text.tokenizer import Tokenizer
from pipeline.stages.conversation.server import running_server
from serve import LLM, SamplingParams

STATIC_BATCH_SIZES = (8, 16, 32, 64)
LLAMA_CPP_TYPES = ("q4_1", "q8_0")
PEERS = ("transformers", "llama.cpp", "vllm", "continuous")
CONTINUOUS_TOKENS = 16
LONG_PROMPT = 900
REST_S = 0.5
"""Between two sides: threads of OpenMP wait actively for the next work, Intel's for 0.2 s, on cores of the other's."""


def generate(model: Any, prompts: list[list[int]], lengths: list[int], batch_size: int) -> None:
    """By transformers, as its documentation shows it: left padding; a batch is as long as its longest request."""
    for start in range(0, len(prompts), batch_size):
        rows, new_tokens = prompts[start : start + batch_size], max(lengths[start : start + batch_size])
        ids, mask = (
            pad_sequence([make(row) for row in rows], batch_first=True, padding_side="left")
            for make in (torch.tensor, lambda row: torch.ones(len(row), dtype=torch.int64))
        )
        wanted = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **wanted)


def generate_continuously(model: Any, prompts: list[list[int]], new_tokens: int) -> None:
    """By transformers' own continuous batching, in pages enough for all at once."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(num_blocks=4 * len(prompts), max_batch_tokens=512)
    answers = model.generate_batch(prompts, generation_config=config, continuous_batching_config=pages)
    produced = sum(len(answer.generated_tokens) for answer in answers.values())
    if produced != new_tokens * len(prompts):
        raise RuntimeError(f"generate_batch produced {produced} tokens, {new_tokens * len(prompts)} were wanted.")


def ask(address: tuple[str, int], prompt: list[int], new_tokens: int) -> None:
    body = {"model": "teacher", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    with closing(HTTPConnection(*address, timeout=300)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        usage = json.loads(connection.getresponse().read())["usage"]
    if usage["completion_tokens"] != new_tokens:
        raise RuntimeError(f"The server generated {usage} instead of {new_tokens} tokens.")


def by_turns(sides: Mapping[Any, Callable[[], Any]], tokens: int, rounds: int) -> dict[Any, list[float]]:
    """Tokens per second of each side, which all make so many; prints as it goes."""
    speeds: dict[Any, list[float]] = {name: [] for name in sides}
    for name, run in [*sides.items()] * rounds:
        time.sleep(REST_S)
        start = time.perf_counter()
        run()
        speeds[name].append(tokens / (time.perf_counter() - start))
        print(f"  {name}: {speeds[name][-1]:.0f} tokens/s", flush=True)
    return speeds


def summarize(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """The medians, and ours over the peer's, which comes last."""
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    *ours, peer = medians
    ratios = {f"ratio_{name.removeprefix('potstill_')}": medians[name] / medians[peer] for name in ours}
    print(f"  {ratios}", flush=True)
    return {"tokens_per_s": medians, "all_tokens_per_s": speeds, **ratios}


def prompts_of(folder: Path, lengths: list[int]) -> list[list[int]]:
    """Prompts of the given lengths in tokens, cut from Python's own source."""
    text = Path(argparse.__file__).read_text() * 2
    tokens = Tokenizer.load(folder).encode(text)
    return [tokens[97 * index : 97 * index + length] for index, length in enumerate(lengths)]


def one_at_a_time(folder: Path, llm: LLM, peer: Any, rounds: int) -> dict[str, Any]:
    print("One request at a time", flush=True)
    new_tokens = 128
    [prompt] = prompts_of(folder, [64])
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    with running_server(folder, None, "--dtype", str(DTYPE).removeprefix("torch."), name="teacher") as address:
        sides: dict[str, Callable[[], Any]] = {
            "potstill_engine": lambda: llm.generate([prompt], params),
            "potstill_http": lambda: ask(address, prompt, new_tokens),
            "transformers": lambda: generate(peer, [prompt], [new_tokens], 1),
        }
        by_turns(sides, new_tokens, rounds=1)  # warms everybody up
        speeds = by_turns(sides, new_tokens, rounds)
    return {"prompt_tokens": len(prompt), "new_tokens": new_tokens, **summarize(speeds)}


def many_at_once(folder: Path, llm: LLM, peer: Any, rounds: int) -> dict[str, Any]:
    print("64 requests of mixed lengths; first transformers, by size of its batches", flush=True)
    prompts, lengths = mixed(folder)
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    wanted = sum(lengths)

    def by_engine() -> None:
        generations = llm.generate(prompts, params)
        produced = sum(len(generation.choices[0].token_ids) for generation in generations)
        if produced != wanted:
            raise RuntimeError(f"The engine produced {produced} tokens, {wanted} were wanted.")

    by_size = {size: partial(generate, peer, prompts, lengths, size) for size in STATIC_BATCH_SIZES}
    static = {size: speed for size, [speed] in by_turns(by_size, wanted, 1).items()}
    best = max(static, key=lambda size: static[size])
    speeds = by_turns({"potstill_engine": by_engine, "transformers": by_size[best]}, wanted, rounds)
    return {
        "requests": len(lengths), "new_tokens": wanted, **summarize(speeds), "static_batch_tokens_per_s": static,
        "best_static_batch": best,
    }  # fmt: skip


def mixed(folder: Path) -> tuple[list[list[int]], list[int]]:
    """64 prompts, and how many new tokens each wants."""
    rng = random.Random(0)
    lengths = [rng.randint(16, 512) for _ in range(64)]
    return prompts_of(folder, [rng.randint(16, 256) for _ in range(64)]), lengths


def beside_continuous(folder: Path, rounds: int) -> dict[str, Any]:
    llm, peer = LLM(str(folder)), AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)
    prompts, _ = mixed(folder)
    short = SamplingParams(temperature=0.0, max_tokens=CONTINUOUS_TOKENS, ignore_eos=True)
    sides: dict[str, Callable[[], Any]] = {
        "potstill_engine": lambda: llm.generate(prompts, short),
        "transformers_continuous": lambda: generate_continuously(peer, prompts, CONTINUOUS_TOKENS),
    }
    speeds = by_turns(sides, CONTINUOUS_TOKENS * len(prompts), rounds)
    return {"requests": len(prompts), "new_tokens_each": CONTINUOUS_TOKENS, **summarize(speeds)}


def beside_llama_cpp(
    folder: Path, rounds: int, new_tokens: int = 128, file_types: tuple[str, ...] = LLAMA_CPP_TYPES
) -> dict[str, Any]:
    """Both servers, of one GGUF file after another, by turns."""
    threads, dtype = torch.get_num_threads(), str(DTYPE).removeprefix("torch.")
    parts: dict[str, Any] = {"threads": threads, "dtype": dtype, "llama_cpp": instructions()}
    for file_type in file_types:
        with tempfile.TemporaryDirectory() as scratch:
            file, unpacked = Path(scratch, "model.gguf"), Path(scratch, "model")
            export_gguf(folder, file, type=file_type)
            import_gguf_blocks(file, unpacked)  # as `potstill serve model.gguf` does, which keeps it
            with (
                running_server(unpacked, None, "--dtype", dtype, name="teacher") as exact,
                running_server(unpacked, None, "--dtype", dtype, "--activations", "int8", name="teacher") as rounded,
                running_llama_cpp(file, sequences=8, threads=threads) as llama_cpp,
            ):
                servers = {"potstill_http": exact, "potstill_http_rounded": rounded, "llama_cpp": llama_cpp}
                found = {}
                for batch in (1, 8):
                    print(f"{file_type}, {batch} at a time", flush=True)
                    found[f"batch_{batch}"] = ask_by_turns(servers, folder, batch, rounds, new_tokens)
            parts[file_type] = {"file_bytes": file.stat().st_size, **found}
    return parts


def beside_vllm(folder: Path, interpreter: str, rounds: int, new_tokens: int = 128) -> dict[str, Any]:
    """Both servers, by turns."""
    threads, dtype = torch.get_num_threads(), str(DTYPE).removeprefix("torch.")
    room = "--max-num-seqs", "32", "--kv-cache-bytes", "1G"
    with (
        running_server(folder, None, "--dtype", dtype, *room, name="teacher") as ours,
        running_vllm(interpreter, folder, dtype=dtype, threads=threads) as vllm,
    ):
        servers, found = {"potstill_http": ours, "vllm": vllm}, {}
        for batch in (1, 8, 32):
            print(f"{batch} at a time", flush=True)
            found[f"batch_{batch}"] = ask_by_turns(servers, folder, batch, rounds, new_tokens)
        print(f"Prompts of {LONG_PROMPT} tokens", flush=True)
        found["prefill"] = ask_by_turns(servers, folder, 1, rounds, 1, prompt_tokens=LONG_PROMPT)
    return {"threads": threads, "dtype": dtype, **found}


def ask_by_turns(
    servers: dict[str, tuple[str, int]], folder: Path, batch: int, rounds: int, new_tokens: int, *,
    prompt_tokens: int = 64,
) -> dict[str, Any]:  # fmt: skip
    """Each server gets the same requests, `batch` at a time, and none twice. Of one new token the prompt is counted."""
    prompts = prompts_of(folder, [prompt_tokens] * batch * (rounds + 1))
    counted = batch * (prompt_tokens if new_tokens == 1 else new_tokens)
    left = {name: iter(prompts) for name in servers}

    def run(name: str) -> None:
        with ThreadPoolExecutor(batch) as clients:
            for _ in clients.map(lambda prompt: ask(servers[name], prompt, new_tokens), islice(left[name], batch)):
                pass

    sides = {name: partial(run, name) for name in servers}
    by_turns(sides, counted, rounds=1)  # warms everybody up
    return {"new_tokens": batch * new_tokens, **summarize(by_turns(sides, counted, rounds))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measured repetitions of each side")
    parser.add_argument("--beside", choices=PEERS, default=PEERS[0], help="the peer")
    parser.add_argument("--peer", default="python", help="with --beside vllm, the interpreter that has it")
    options = parser.parse_args()
    if options.beside == "vllm":
        check_peer(options.peer, "vllm", "make an environment as bench/serve/vllm_cpu.py says")
        result = beside_vllm(teacher_folder(), options.peer, options.rounds)
        command = "python -m bench.serve --beside vllm --peer PEER/bin/python"
        write_result_by_processor("serve-vllm-cpu", command, result)
        return
    if options.beside == "llama.cpp":
        check_installed()
        result = beside_llama_cpp(teacher_folder(), options.rounds)
        write_result_by_processor("serve-llama-cpp-cpu", "python -m bench.serve --beside llama.cpp", result)
        return
    folder = teacher_folder()
    if options.beside == "continuous":
        result = beside_continuous(folder, options.rounds)
        write_result("serve-continuous-cpu", "python -m bench.serve --beside continuous", result)
        return
    llm, peer = LLM(str(folder)), AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)
    parts = {part.__name__: part(folder, llm, peer, options.rounds) for part in (one_at_a_time, many_at_once)}
    write_result("serve-cpu", "python -m bench.serve", parts)


if __name__ == "__main__":
    main()
