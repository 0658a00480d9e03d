"""What a decoding step computes, beside torch, on this machine: medians, all by turns, in one run.

    python -m bench.kernels.decode                # CPU: 4 minutes; both of the following
    python -m bench.kernels.decode quantized      # writes bench/results/quantized-DEVICE.json; on a GPU too
    python -m bench.kernels.decode attention      # writes bench/results/attention-cpu.json
    python -m bench.kernels.decode --tune         # on a GPU: prints the tile tables of kernels/linear/quantized.py

Every call reads other weights or keys, together larger than the last-level cache. Nothing is timed before its result
has been checked against fp32. (`bench.kernels` times adapters and attention on a GPU.)

- Products: the baseline is `kernels.linear.dense` with a prepared bf16 weight; the plain F.linear stands beside it.
- Adapters: the baseline is what torch needs for one, a matrix product, and another with an addition.
- Attention: ours reads keys and values from scattered pages; torch has them side by side, as transformers keeps them,
  and takes the query heads that share keys as the rows of one call, which is several times as fast as `enable_gqa`.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.linear.quantized as module
from bench.common import DEVICE, write_result
from bench.kernels.case import Call, Inputs, normal
from bench.kernels.cases import over_pages
from bench.kernels.families.attention import paged
from bench.kernels.families.linear import QUANTIZERS, weight_bytes
from bench.kernels.timing import clock_of, interleave, side_stream
from kernels.linear.dense import linear, prepare_linear_weight
from kernels.linear.lora import LoraWeights, lora_add
from kernels.linear.quantized import PreparedQuantizedWeight, Tiles, prepare_quantized_weight, quantized_linear
from tests.compare import check_close

N = K = 4096
ROWS = (1, 2, 4, 8, 16, 64, 256)
ROTATING_BYTES = {"cpu": 616 * 2**20, "cuda": 256 * 2**20}[DEVICE]
ROUNDS = {"cpu": 40, "cuda": 60}[DEVICE]
CALLS = {"cpu": 4, "cuda": 1}[DEVICE]
"""How many calls in a row a side makes in its turn, as the layers of a decoding step do."""
ADAPTER_COPIES, PAGE_BYTES = 512, 256 * 2**20
ADAPTERS = ((4096, 4096, 16), (576, 3072, 32))
"""Inputs, outputs and ranks: of a large layer, and of SmolLM2's gate and up, each with an adapter of rank 16."""
ADAPTED_ROWS = (1, 8, 32, 64)
LAYERS = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128), "Llama-2-7B": (32, 32, 128)}
"""Query heads, key/value heads, head dim."""
BATCHES = ((1, 1024), (8, 1024), (32, 1024), (1, 8192))
"""Sequences, and the keys of each."""
Sides = Mapping[str, tuple[Sequence[Call], Tensor]]
"""By name: calls with operands of their own, and what the first of them must give."""


def compare(entries: Iterable[tuple[dict[str, Any], Sides]], baseline: str, ratio: str) -> list[dict[str, Any]]:
    """Median seconds of every side, once its result has been found right, beside their sizes; prints as it goes.

    `ratio` is how many times as fast as the baseline ours is; of every side where there are several of ours.
    """
    results = []
    for sizes, sides in entries:
        what = ", ".join(f"{name} {size}" for name, size in sizes.items())
        for name, (calls, expected) in sides.items():
            check_close(calls[0](), expected, what=f"{what}, {name}")
        seconds = median_seconds({name: calls for name, (calls, _) in sides.items()}, CALLS, ROUNDS)
        ratios = {name: seconds[baseline] / taken for name, taken in seconds.items()}
        line = ", ".join(f"{name} {1e6 * taken:.0f} us ({ratios[name]:.2f}x)" for name, taken in seconds.items())
        print(f"{what}: {line}", flush=True)
        results.append({**sizes, "seconds": seconds, ratio: ratios.get("ours", ratios)})
    return results


def median_seconds(sides: Mapping[str, Sequence[Call]], at_once: int, rounds: int) -> dict[str, float]:
    """Of one call, of which `at_once` follow each other in a turn."""
    clock = clock_of(torch.device(DEVICE))
    programs = {
        name: [clock.program(calls[first : first + at_once]) for first in range(0, len(calls), at_once)]
        for name, calls in sides.items()
    }
    return {name: statistics.median(samples) for name, samples in interleave(programs, clock, rounds).items()}


# Products


def products() -> Iterator[tuple[dict[str, Any], Sides]]:
    """bf16 twice, and each format, for every number of rows."""

    def copies(num_bytes: float, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(max(2, int(ROTATING_BYTES / num_bytes)))]

    weight = 0.02 * normal(N, K).to(DEVICE)
    multipliers: dict[str, tuple[Callable[..., Tensor], list[Any], Tensor]] = {
        "bf16 prepared": (linear, copies(weight.nbytes, lambda: prepare_linear_weight(weight.clone())), weight.float()),
        "bf16 plain": (F.linear, copies(weight.nbytes, weight.clone), weight.float()),
    }
    for name, quantize in QUANTIZERS.items():
        stored = quantize(weight)
        prepared = partial(deepcopy, prepare_quantized_weight(stored))
        multipliers[name] = quantized_linear, copies(weight_bytes(name, N, K), prepared), stored.dequantize()
    for rows in ROWS:
        x, sides = normal(rows, K).to(DEVICE), {}
        for name, (multiply, operands, matrix) in multipliers.items():
            sides[name] = [partial(multiply, x, operand) for operand in operands], x.float() @ matrix.t()
        yield {"rows": rows, "n": N, "k": K}, sides


def torch_adapter(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor) -> Tensor:
    return torch.addmm(y, x @ weights.a[0].t(), weights.b[0].t())


def adapters() -> Iterator[tuple[dict[str, Any], Sides]]:
    for (k, n, rank), rows in itertools.product(ADAPTERS, ADAPTED_ROWS):
        a, b = normal(1, rank, k), normal(1, n, rank)
        x, y, slots = normal(rows, k), normal(rows, n), torch.zeros(rows, dtype=torch.int32)
        copies = [LoraWeights(a.clone() / k**0.5, b.clone(), torch.ones(1)) for _ in range(ADAPTER_COPIES)]
        expected = y.float() + x.float() @ copies[0].a[0].float().t() @ b[0].float().t()
        adders = {"torch": torch_adapter, "ours": lora_add}
        sides = {name: ([partial(add, y, x, copy, slots) for copy in copies], expected) for name, add in adders.items()}
        yield {"rows": rows, "n": n, "k": k, "rank": rank}, sides


def measure_quantized() -> None:
    layers = compare(products(), "bf16 prepared", "speedup_over_prepared_bf16")
    result: dict[str, Any] = {"layers": layers, "unit": "seconds are medians of one product, or of one adapter"}
    if DEVICE == "cpu":
        result["adapters"] = compare(adapters(), "torch", "speedup_over_torch")
    write_result(f"quantized-{DEVICE}", "python -m bench.kernels.decode quantized", result)


# Attention


def by_torch(inputs: Inputs) -> Call:
    pages = (x[inputs.block_tables] for x in (inputs.k_pages, inputs.v_pages))
    k, v = (x.flatten(1, 2).transpose(1, 2).contiguous() for x in pages)
    q = inputs.q.view(len(k), k.shape[1], -1, k.shape[3])
    return lambda: F.scaled_dot_product_attention(q, k, v).view_as(inputs.q)


def attention() -> Iterator[tuple[dict[str, Any], Sides]]:
    """One layer's."""
    for (layer, heads), (sequences, keys) in itertools.product(LAYERS.items(), BATCHES):
        names, shape = ("heads", "kv_heads", "head_dim"), paged(sequences, 1, keys, *heads)
        sizes = {"layer": layer, **dict(zip(names, heads, strict=True)), "sequences": sequences, "keys": keys}
        num_bytes = 4 * sequences * keys * math.prod(heads[1:])
        copies = max(1, PAGE_BYTES // num_bytes // CALLS) * CALLS
        inputs = [shape.inputs(torch.device(DEVICE)) for _ in range(copies)]
        [expected], sides = shape.reference(inputs[0]), {"ours": over_pages, "by_torch": by_torch}
        yield sizes, {name: ([adapt(one) for one in inputs], expected) for name, adapt in sides.items()}


def measure_attention() -> None:
    results = compare(attention(), "by_torch", "speedup_over_torch")
    for result in results:
        num_bytes = 4 * math.prod(result[name] for name in ("sequences", "keys", "kv_heads", "head_dim"))
        result["gb_per_s"] = num_bytes / result["seconds"]["ours"] / 1e9
    unit = "seconds are medians of one layer's attention of one decoding step"
    write_result("attention-cpu", "python -m bench.kernels.decode attention", {"attention": results, "unit": unit})


# Tiles


def tune() -> None:
    """Print the fastest tiles for each number of rows in the tables, and where expanding the weight first wins."""
    weight = 0.02 * normal(N, K).to(DEVICE)
    for name in ("nf4", "int4", "int8"):
        table = module._FORWARD_TILES[name]
        copies = [prepare_quantized_weight(QUANTIZERS[name](weight)) for _ in range(24)]
        for rows in table:
            x, timed = normal(rows, K).to(DEVICE), {}
            for outputs, warps, stages in itertools.product((32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 5)):
                table[rows] = Tiles(rows, outputs, warps, stages)
                timed[table[rows]] = _microseconds(copies, x)
            table[rows] = min(timed, key=lambda tiles: timed[tiles])
            print(f"{name}, {rows} rows: {table[rows]}  {timed[table[rows]]:.1f} us", flush=True)
        for rows in (64, 96, 128, 192, 256, 512):
            x, taken = normal(rows, K).to(DEVICE), []
            for module.MOST_FUSED_ROWS in (0, 1 << 20):
                taken.append(_microseconds(copies, x))
            print(f"{name}, {rows} rows: expanded {taken[0]:.1f} us, fused {taken[1]:.1f} us", flush=True)


def _microseconds(copies: list[PreparedQuantizedWeight], x: Tensor) -> float:
    """The median of one product; infinite where the tiles do not fit the GPU."""
    try:
        quantized_linear(x, copies[0])
    except Exception as error:
        print(f"  skipped: {type(error).__name__}")
        return float("inf")
    return 1e6 * median_seconds({"": [partial(quantized_linear, x, copy) for copy in copies]}, len(copies), 20)[""]


MEASURES = {"quantized": measure_quantized, "attention": measure_attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=MEASURES, help="default: both; on a GPU `quantized`")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.tune and DEVICE == "cpu":
        parser.error("only a GPU's tiles can be tuned")
    if options.what == "attention" and DEVICE != "cpu":
        parser.error("`python -m bench.kernels` times attention on a GPU")
    everything = [measure_quantized] if DEVICE != "cpu" else [*MEASURES.values()]
    with side_stream(torch.device(DEVICE)), torch.inference_mode():
        for measure in [tune] if options.tune else [MEASURES[options.what]] if options.what else everything:
            measure()


if __name__ == "__main__":
    main()
