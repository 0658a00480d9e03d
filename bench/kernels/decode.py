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
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.linear.quantized as module
from bench.common import write_result
from bench.kernels.case import Inputs, Run, normal
from bench.kernels.families.attention import PAGE, paged
from bench.kernels.families.linear import QUANTIZERS, weight_bytes
from bench.kernels.timing import clock_of, interleave, side_stream
from kernels.attention.paged import paged_attention, plan_paged_attention
from kernels.linear.dense import linear, prepare_linear_weight
from kernels.linear.lora import LoraWeights, lora_add
from kernels.linear.quantized import PreparedQuantizedWeight, Tiles, prepare_quantized_weight, quantized_linear
from tests.compare import check_close

N = K = 4096
ROWS = (1, 2, 4, 8, 16, 64, 256)
ROTATING_BYTES = {"cpu": 616 * 2**20, "cuda": 256 * 2**20}
ROUNDS = {"cpu": 40, "cuda": 60}
CALLS = {"cpu": 4, "cuda": 1}
"""How many calls in a row a side makes in its turn, as the layers of a decoding step do."""
ADAPTER_COPIES, PAGE_BYTES = 512, 256 * 2**20
ADAPTERS = ((4096, 4096, 16), (576, 3072, 32))
"""Inputs, outputs and ranks: of a large layer, and of SmolLM2's gate and up, each with an adapter of rank 16."""
ADAPTED_ROWS = (1, 8, 32, 64)
LAYERS = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128), "Llama-2-7B": (32, 32, 128)}
"""Query heads, key/value heads, head dim."""
BATCHES = ((1, 1024), (8, 1024), (32, 1024), (1, 8192))
"""Sequences, and the keys of each."""


def call(function: Callable[..., Tensor], *operands: Any) -> Run:
    return lambda: (function(*operands),)


def time_sides(
    sides: Mapping[str, Sequence[Run]], expected: Mapping[str, Tensor], device: torch.device, what: str
) -> dict[str, float]:
    """Median seconds of each, once its result has been found right; its calls have operands of their own."""
    for name, runs in sides.items():
        check_close(runs[0]()[0], expected[name], what=f"{what}, {name}")
    clock, calls = clock_of(device), CALLS[device.type]
    programs = {
        name: [clock.program(runs[first : first + calls]) for first in range(0, len(runs), calls)]
        for name, runs in sides.items()
    }
    samples = interleave(programs, clock, ROUNDS[device.type])
    return {name: statistics.median(each) for name, each in samples.items()}


# Products


def product_sides(weight: Tensor) -> dict[str, tuple[Callable[..., Tensor], list[Any]]]:
    """bf16 twice, then each format: the function, and copies of the weight."""

    def copies(size: float, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(max(2, int(ROTATING_BYTES[weight.device.type] / size)))]

    quantized = {name: prepare_quantized_weight(quantize(weight)) for name, quantize in QUANTIZERS.items()}
    return {
        "bf16 prepared": (linear, copies(weight.nbytes, lambda: prepare_linear_weight(weight.clone()))),
        "bf16 plain": (F.linear, copies(weight.nbytes, weight.clone)),
        **{
            name: (quantized_linear, copies(weight_bytes(name, N, K), partial(deepcopy, prepared)))
            for name, prepared in quantized.items()
        },
    }


def measure_products(device: torch.device) -> list[dict[str, Any]]:
    """One entry per number of rows; prints it."""
    weight = 0.02 * normal(N, K, device=device)
    held = dict.fromkeys(("bf16 prepared", "bf16 plain"), weight.float())
    held |= {name: quantize(weight).dequantize() for name, quantize in QUANTIZERS.items()}
    products, results = product_sides(weight), []
    for rows in ROWS:
        x = normal(rows, K, device=device)
        sides = {name: [call(multiply, x, copy) for copy in copies] for name, (multiply, copies) in products.items()}
        expected = {name: x.float() @ matrix.t() for name, matrix in held.items()}
        times = time_sides(sides, expected, device, f"{rows} rows")
        ratios = {name: times["bf16 prepared"] / taken for name, taken in times.items()}
        results.append({"rows": rows, "n": N, "k": K, "seconds": times, "speedup_over_prepared_bf16": ratios})
        line = "  ".join(f"{name} {1e6 * taken:.0f} us ({ratios[name]:.2f}x)" for name, taken in times.items())
        print(f"{rows:4} rows: {line}", flush=True)
    return results


def torch_adapter(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor) -> Tensor:
    return torch.addmm(y, x @ weights.a[0].t(), weights.b[0].t())


def measure_adapters(device: torch.device) -> list[dict[str, Any]]:
    """One entry per shape and number of rows; prints it."""
    results = []
    new = partial(normal, device=device)
    for (k, n, rank), rows in itertools.product(ADAPTERS, ADAPTED_ROWS):
        a, b, x, y, slots = new(1, rank, k), new(1, n, rank), new(rows, k), new(rows, n), torch.zeros(rows).int()
        copies = [LoraWeights(a.clone() / k**0.5, b.clone(), torch.ones(1)) for _ in range(ADAPTER_COPIES)]
        adders = {"torch": torch_adapter, "ours": lora_add}
        sides = {name: [call(add, y, x, copy, slots) for copy in copies] for name, add in adders.items()}
        expected = y.float() + x.float() @ copies[0].a[0].float().t() @ copies[0].b[0].float().t()
        times = time_sides(sides, dict.fromkeys(sides, expected), device, f"adapter, {rows} rows")
        ratio = times["torch"] / times["ours"]
        results.append({"rows": rows, "n": n, "k": k, "rank": rank, "seconds": times, "speedup_over_torch": ratio})
        line = ", ".join(f"{name} {1e6 * taken:.0f} us" for name, taken in times.items())
        print(f"{rows:4} rows, adapter {k} to {n} of rank {rank}: {line} ({ratio:.2f}x)", flush=True)
    return results


def measure_quantized(device: torch.device) -> None:
    result: dict[str, Any] = {"layers": measure_products(device)}
    result["unit"] = "seconds are medians of one product, or of one adapter"
    if device.type == "cpu":
        result["adapters"] = measure_adapters(device)
    print(write_result(f"quantized-{device.type}", "python -m bench.kernels.decode quantized", result))


# Attention


def ours(inputs: Inputs) -> Run:
    where = (inputs.block_tables, inputs.cu_seqlens, inputs.kv_lengths)
    attend = partial(paged_attention, plan=plan_paged_attention(*where, PAGE))
    run = call(attend, inputs.q, inputs.k_pages, inputs.v_pages, *where)
    run()  # a plan lists its work when it is first used
    return run


def by_torch(inputs: Inputs) -> Run:
    pages = (x[inputs.block_tables] for x in (inputs.k_pages, inputs.v_pages))
    k, v = (x.flatten(1, 2).transpose(1, 2).contiguous() for x in pages)
    q = inputs.q.view(len(k), k.shape[1], -1, k.shape[3])
    return lambda: (F.scaled_dot_product_attention(q, k, v).view_as(inputs.q),)


def measure_layer(name: str, sequences: int, keys: int, device: torch.device) -> dict[str, Any]:
    """One layer's attention; prints it."""
    heads, kv_heads, head_dim = LAYERS[name]
    shape, num_bytes = paged(sequences, 1, keys, *LAYERS[name]), 4 * sequences * keys * kv_heads * head_dim
    copies = max(1, PAGE_BYTES // num_bytes // CALLS["cpu"]) * CALLS["cpu"]
    inputs = [shape.inputs(device) for _ in range(copies)]
    sides = {side.__name__: [side(one) for one in inputs] for side in (ours, by_torch)}
    [expected] = shape.reference(inputs[0])
    times = time_sides(sides, dict.fromkeys(sides, expected), device, "attention")
    ratio = times["by_torch"] / times["ours"]
    line = f"{1e3 * times['ours']:.2f} ms, torch {1e3 * times['by_torch']:.2f} ms ({ratio:.2f}x)"
    print(f"{name:12} {sequences:2} sequences of {keys:,} keys: {line}", flush=True)
    speed = {"seconds": times, "speedup_over_torch": ratio, "gb_per_s": num_bytes / times["ours"] / 1e9}
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "sequences": sequences, "keys": keys}
    return {"layer": name, **sizes, **speed}


def measure_attention(device: torch.device) -> None:
    results = [measure_layer(name, *batch, device) for name in LAYERS for batch in BATCHES]
    result = {"attention": results, "unit": "seconds are medians of one layer's attention of one decoding step"}
    print(write_result("attention-cpu", "python -m bench.kernels.decode attention", result))


# Tiles


def tune(device: torch.device) -> None:
    """Print the fastest tiles for each number of rows in the tables, and where expanding the weight first wins."""
    weight = 0.02 * normal(N, K, device=device)
    for name, bits in (("nf4", 4), ("int8", 8)):
        table = module._FORWARD_TILES[bits]
        copies = [prepare_quantized_weight(QUANTIZERS[name](weight)) for _ in range(24)]
        for rows in table:
            x = normal(rows, K, device=device)
            timed = {}
            for outputs, warps, stages in itertools.product((32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 5)):
                table[rows] = Tiles(rows, outputs, warps, stages)
                timed[table[rows]] = _seconds_of(copies, x)
            table[rows] = min(timed, key=lambda tiles: timed[tiles])
            print(f"{bits} bits, {rows} rows: {table[rows]}  {1e6 * timed[table[rows]]:.1f} us", flush=True)
        for rows in (64, 96, 128, 192, 256, 512):
            x = normal(rows, K, device=device)
            taken = []
            for module._MOST_FUSED_ROWS in (0, 1 << 20):
                taken.append(1e6 * _seconds_of(copies, x))
            expanded, fused = taken
            print(f"{bits} bits, {rows} rows: expanded {expanded:.1f} us, fused {fused:.1f} us", flush=True)


def _seconds_of(copies: list[PreparedQuantizedWeight], x: Tensor) -> float:
    """The median of one product; infinite where the tiles do not fit the GPU."""
    try:
        quantized_linear(x, copies[0])
    except Exception as error:
        print(f"  skipped: {type(error).__name__}")
        return float("inf")
    clock = clock_of(x.device)
    program = clock.program([call(quantized_linear, x, copy) for copy in copies])
    return statistics.median(interleave({"": [program]}, clock, 20)[""])


MEASURES = {"quantized": measure_quantized, "attention": measure_attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=MEASURES, help="default: both; on a GPU `quantized`")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.tune and device.type != "cuda":
        parser.error("only a GPU's tiles can be tuned")
    if options.what == "attention" and device.type == "cuda":
        parser.error("`python -m bench.kernels` times attention on a GPU")
    everything = ["quantized"] if device.type == "cuda" else [*MEASURES]
    with side_stream(device), torch.inference_mode():
        if options.tune:
            tune(device)
            return
        for what in [options.what] if options.what else everything:
            MEASURES[what](device)


if __name__ == "__main__":
    main()
