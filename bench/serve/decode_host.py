"""What a decoding step on the CPU does beside its products and its attention: operator calls, and the host's time.

    python -m bench.serve.decode_host [FOLDER]      # writes bench/results/decode-host-cpu.json; 2 minutes

SmolLM2-135M with linear layers in INT4 (groups of 64) and the embedding, which is the head, in INT8, all by rounding,
and as a GGUF file in Q4_1, with activations as they are and rounded (`--activations int8`), beside the dense model of
the same folder: all in the dtype that serving chooses here and in one process, by turns.
One thread, and its processor time; of each part the least of all steps. On a machine with other work all of it takes
longer, so compare figures of one run.

Steps are measured as they are served. Then the C forms of products and attention are clocked, which makes steps slower;
host time is a step's less what passes in these; without them it is all of the step. In reading a long prompt it holds
the dense model's products where they are torch's. `least_products_ms` is what reading each weight once takes, and
multiplying with it, at this thread's ceilings (bench/serve/ceilings.py): the larger of both is what no product comes
below, unless weights stay in a cache from step to step.
"""

import argparse
import cProfile
import pstats
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import kernels.attention._decode_cpu as attention
import kernels.attention._prefill_cpu as prefill
import kernels.linear._pairs_cpu as pairs
import kernels.linear._rounded_cpu as integers
import kernels.linear._skinny_cpu as products
import kernels.linear._tiles_cpu as tiles
from bench.common import DTYPE, teacher_folder, write_result_by_processor
from bench.serve.ceilings import Weights, least_milliseconds, measure_ceilings, weights_of
from model.files.checkpoint import load_model
from model.formats.gguf.reader import import_gguf_blocks
from model.formats.gguf.writer import export_gguf
from model.formats.registry import DEFAULT_FINER, DEFAULT_WEIGHTS, format_named
from model.quantized import round_activations, set_quantized
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from serve import LLM, SamplingParams
from serve.engine.loading import Models

PROMPT, PROFILED = 32, 4
GROUP = 64
DENSE, INT4, GGUF, ROUNDED = "dense", "int4", "q4_1", ", activations rounded"

Least = dict[str, dict[str, float]]
"""Milliseconds by side and part."""


class Load(NamedTuple):
    """What is computed, and how often."""

    batch: int
    prompt: int = PROMPT
    turns: int = 3
    unmeasured: int = 3
    """Steps of a turn that read the prompts, run the code, and capture it."""
    measured: int = 10


DECODING = tuple(Load(batch) for batch in (1, 8, 32))
READING = Load(1, prompt=900, turns=2, unmeasured=0, measured=1)


def quantized(model: Transformer) -> Transformer:
    """The model with all matrices rounded."""
    linear, embedding = format_named(DEFAULT_WEIGHTS, group=GROUP), format_named(DEFAULT_FINER)
    for name, module in list(model.model.named_modules(prefix="model")):
        if isinstance(module, nn.Linear | nn.Embedding):
            form: Any = linear if isinstance(module, nn.Linear) else embedding
            set_quantized(model, name, form.quantize(module.weight.detach()), form)
    return model


def rounding(model: Transformer) -> Transformer:
    """The model, whose products round activations."""
    round_activations(model)
    return model


class Side(NamedTuple):
    """A model and its engine."""

    llm: LLM
    weights: Weights


def side_of(folder: str, prepare: Callable[[Transformer], Transformer]) -> Side:
    model = prepare(load_model(folder, dtype=DTYPE, device=torch.device("cpu")))
    weights, models = weights_of(model), Models(target=model.fuse(), tokenizer=Tokenizer.load(folder), dtype=DTYPE)
    options: dict[str, Any] = {
        "num_pages": 1024,
        "max_num_batched_tokens": max(load.batch for load in DECODING) * PROMPT,
    }
    return Side(LLM(folder, models=models, enable_prefix_caching=False, **options), weights)


@contextmanager
def stepping(llm: LLM, load: Load) -> Iterator[Callable[[], object]]:
    """The steps of a turn from the first measured one on."""
    engine, random_ = llm.engine, random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for number in range(load.batch):
        engine.add_request(str(number), random_.choices(range(engine.vocab_size), k=load.prompt), params)
    for _ in range(load.unmeasured):
        engine.step()
    yield engine.step
    for number in range(load.batch):
        engine.abort(str(number))
    engine.step()


def clock(seconds: dict[str, float]) -> None:
    """Has the seconds that pass in the C forms added up, by name, in passes that are captured from here on too."""
    for library, name in (
        (products._library(DTYPE), "skinny_product"),
        (products._library_of_outputs() if torch.float32 == DTYPE else None, "skinny_product"),
        (products._library_of_pairs() if torch.bfloat16 == DTYPE else None, "skinny_product"),
        (pairs._library(), "pairs_product"),
        (tiles._library(), "tiled_product"),
        (integers._library(), "rounded_product"),
        (attention._library(DTYPE), "attend_decode"),
        (prefill._library(), "attend_prefill"),
    ):
        if library is not None:
            setattr(library, name, _clocked(getattr(library, name), name, seconds))


def _clocked(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        begin = time.thread_time()
        result = function(*arguments)
        seconds[name] = seconds.get(name, 0.0) + time.thread_time() - begin
        return result

    return call


def measure(sides: dict[str, Side], load: Load, clocks: dict[str, float] | None = None) -> Least:
    """The least milliseconds of a step of each side; given `clocks`, of what they show of it."""
    least: Least = {name: {} for name in sides}
    for _ in range(load.turns):
        for name, (llm, _) in sides.items():
            with stepping(llm, load) as step:
                for _ in range(load.measured):
                    seconds = {} if clocks is None else clocks
                    seconds.clear()
                    begin = time.thread_time()
                    step()
                    if clocks is None:
                        seconds["step"] = time.thread_time() - begin
                    lower(least[name], seconds)
    return least


def lower(least: dict[str, float], seconds: dict[str, float]) -> None:
    """Takes in the milliseconds of what has taken less than before."""
    for name, taken in seconds.items():
        least[name] = min(least.get(name, taken * 1e3), taken * 1e3)


def count_calls(llm: LLM, load: Load) -> dict[str, float]:
    """Calls of torch's operators and of Python functions in a step."""
    with stepping(llm, load) as step:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED):
                step()
        python = cProfile.Profile()
        python.runcall(lambda: [step() for _ in range(PROFILED)])
    operators = sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))
    calls = pstats.Stats(python).total_calls  # type: ignore[attr-defined]
    return {"operator_calls": operators / PROFILED, "python_calls": calls / PROFILED}


def beside_dense(sides: dict[str, Side], load: Load, steps: Least, parts: Least, ceilings: dict[str, float]) -> Any:
    """Milliseconds of each side, and how much faster than dense it is; prints them."""
    dense, rows = steps[DENSE]["step"], (load.prompt, 1) if load is READING else (load.batch, load.batch)
    found: dict[str, Any] = {"dense_ms": dense}
    for name, (_, weights) in sides.items():
        step, inside = steps[name]["step"], parts[name]
        found[name] = {
            "ms": {"step": step, **inside, "host": step - sum(inside.values())},
            "least_products_ms": least_milliseconds(weights, *rows, ceilings, ROUNDED in name),
            "speedup": dense / step,
        }
    print({name: round(found[name]["speedup"], 2) for name in sides}, found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a dense model; default: SmolLM2-135M-Instruct, imported")
    folder = parser.parse_args().model or str(teacher_folder())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        file, blocks = Path(scratch, "model.gguf"), Path(scratch, "model")
        export_gguf(folder, file, type=GGUF)
        import_gguf_blocks(file, blocks)
        sides = {
            DENSE: side_of(folder, lambda model: model),
            INT4: side_of(folder, quantized),
            INT4 + ROUNDED: side_of(folder, lambda model: rounding(quantized(model))),
            GGUF: side_of(str(blocks), lambda model: model),
            GGUF + ROUNDED: side_of(str(blocks), rounding),
        }
    ceilings, loads = measure_ceilings(DTYPE), (*DECODING, READING)
    steps = [measure(sides, load) for load in loads]
    calls = [count_calls(sides[INT4].llm, load) for load in DECODING]
    clocks: dict[str, float] = {}
    clock(clocks)
    for llm, _ in sides.values():
        llm.engine.runner.forget_captures()
    parts = [measure(sides, load, clocks) for load in loads]
    *decoding, reading = (beside_dense(sides, *each, ceilings) for each in zip(loads, steps, parts, strict=True))
    result = {
        "unit": "milliseconds of one thread's processor time, the least of all repetitions",
        "dtype": str(DTYPE),
        "ceilings": ceilings,
        "decoding": [
            {"batch": load.batch, **found, **counted}
            for load, found, counted in zip(DECODING, decoding, calls, strict=True)
        ],
        "prefill": {"tokens": READING.prompt, **reading},
    }
    write_result_by_processor("decode-host-cpu", "python -m bench.serve.decode_host", result)


if __name__ == "__main__":
    main()
