"""What a decoding step on the CPU does beside its products and its attention: operator calls, and the host's time.

    python -m bench.serve.decode_host [FOLDER]      # writes bench/results/decode-host-cpu.json; 6 minutes

SmolLM2-135M with linear layers in INT4 (groups of 64) and the embedding, which is the head, in INT8, all by rounding,
and as a GGUF file in Q4_1, with activations as they are and rounded (`--activations int8`), beside the dense model of
the same folder: all in the dtype that serving chooses here and in one process, by turns.
One thread, and its processor time; of each part the least of all steps. On a machine with other work all of it takes
longer, so compare figures of one run.

Host time is a step's less what passes in the C forms of products and attention; without these it is all of the step. In
reading a long prompt it holds the dense model's products where they are torch's. `least_products_ms` is what reading
each weight once takes, and multiplying with it, at this thread's ceilings (bench/serve/ceilings.py): the larger of both
is what no product comes below, unless weights stay in a cache from step to step.
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

BATCHES, PROMPT, LONG_PROMPT = (1, 8, 32), 32, 900
STEPS, TURNS, PROFILED = 10, 3, 4
GROUP = 64
DENSE, INT4, GGUF, ROUNDED = "dense", "int4", "q4_1", ", activations rounded"


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
    options: dict[str, Any] = {"num_pages": 1024, "max_num_batched_tokens": max(BATCHES) * PROMPT}
    return Side(LLM(folder, models=models, enable_prefix_caching=False, **options), weights)


@contextmanager
def decoding(llm: LLM, batch: int, prompt: int = PROMPT) -> Iterator[Callable[[], object]]:
    """Steps of so many sequences; their prompts are not read yet."""
    engine, random_ = llm.engine, random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for number in range(batch):
        engine.add_request(str(number), random_.choices(range(engine.vocab_size), k=prompt), params)
    yield engine.step
    for number in range(batch):
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


def measure_step(
    step: Callable[[], object], inside: dict[str, float], least: dict[str, float], steps: int = STEPS
) -> None:
    """Lowers the milliseconds of a step and of its parts, where one of some steps takes less."""
    for _ in range(steps):
        inside.clear()
        begin = time.thread_time()
        step()
        taken = time.thread_time() - begin
        parts = {"step": taken, **inside, "host": taken - sum(inside.values())}
        for name, seconds in parts.items():
            least[name] = min(least.get(name, seconds * 1e3), seconds * 1e3)


def count_calls(step: Callable[[], object]) -> dict[str, float]:
    """Calls of torch's operators and of Python functions in a step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            step()
    operators = sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))
    python = cProfile.Profile()
    python.runcall(lambda: [step() for _ in range(PROFILED)])
    calls = pstats.Stats(python).total_calls  # type: ignore[attr-defined]
    return {"operator_calls": operators / PROFILED, "python_calls": calls / PROFILED}


def measure_prefill(sides: dict[str, Side], inside: dict[str, float], ceilings: dict[str, float]) -> dict[str, Any]:
    least: dict[str, dict[str, float]] = {name: {} for name in sides}
    for _ in range(2):
        for name, (llm, _) in sides.items():
            with decoding(llm, 1, LONG_PROMPT) as step:
                measure_step(step, inside, least[name], steps=1)
    return {"tokens": LONG_PROMPT, **_beside_dense(sides, least, (LONG_PROMPT, 1), ceilings)}


def measure_batch(
    sides: dict[str, Side], batch: int, inside: dict[str, float], ceilings: dict[str, float]
) -> dict[str, Any]:
    least: dict[str, dict[str, float]] = {name: {} for name in sides}
    for _ in range(TURNS):
        for name, (llm, _) in sides.items():
            with decoding(llm, batch) as step:
                for _ in range(3):  # reads the prompts, runs the code, captures it
                    step()
                measure_step(step, inside, least[name])
    with decoding(sides[INT4].llm, batch) as step:
        for _ in range(3):
            step()
        calls = count_calls(step)
    return {"batch": batch, **_beside_dense(sides, least, (batch, batch), ceilings), **calls}


def _beside_dense(
    sides: dict[str, Side], least: dict[str, dict[str, float]], rows: tuple[int, int], ceilings: dict[str, float]
) -> dict[str, Any]:
    """Milliseconds of each side, and how much faster than dense it is; prints them. `rows`: of a layer, of the head."""
    dense = least[DENSE]["step"]
    print({name: round(dense / parts["step"], 2) for name, parts in least.items()}, least, flush=True)
    found = {
        name: {
            "ms": parts,
            "least_products_ms": least_milliseconds(sides[name].weights, *rows, ceilings, ROUNDED in name),
            "speedup": dense / parts["step"],
        }
        for name, parts in least.items()
    }
    return {"dense_ms": dense, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a dense model; default: SmolLM2-135M-Instruct, imported")
    folder = parser.parse_args().model or str(teacher_folder())
    torch.set_num_threads(1)
    inside: dict[str, float] = {}
    clock(inside)
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
    ceilings = measure_ceilings(DTYPE)
    result = {
        "unit": "milliseconds of one thread's processor time, the least of all repetitions",
        "dtype": str(DTYPE),
        "ceilings": ceilings,
        "decoding": [measure_batch(sides, batch, inside, ceilings) for batch in BATCHES],
        "prefill": measure_prefill(sides, inside, ceilings),
    }
    write_result_by_processor("decode-host-cpu", "python -m bench.serve.decode_host", result)


if __name__ == "__main__":
    main()
