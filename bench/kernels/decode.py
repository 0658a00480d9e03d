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
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.linear.quantized as module
from bench.common import write_result
from bench.kernels.families.attention import PAGE
from bench.kernels.families.linear import QUANTIZERS
from bench.kernels.timing import GpuClock, HostClock, Program, side_stream
from kernels.attention.paged import paged_attention, plan_paged_attention
from kernels.linear.dense import linear, prepare_linear_weight
from kernels.linear.lora import LoraWeights, lora_add
from kernels.linear.quantized import PreparedQuantizedWeight, Tiles, prepare_quantized_weight, quantized_linear
from tests.compare import check_close

N = K = 4096
ROWS = (1, 2, 4, 8, 16, 64, 256)
ROTATING_BYTES = {"cpu": 616 * 2**20, "cuda": 256 * 2**20}
ROUNDS = {"cpu": 41, "cuda": 61}
CALLS = {"cpu": 4, "cuda": 1}
"""How many calls in a row a side makes in its turn, as the layers of a decoding step do."""
WEIGHT_COPIES, ADAPTER_COPIES, PAGE_BYTES = 24, 512, 256 * 2**20
ADAPTERS = ((4096, 4096, 16), (576, 3072, 32))
"""Inputs, outputs and ranks: of a large layer, and of SmolLM2's gate and up, each with an adapter of rank 16."""
ADAPTED_ROWS = (1, 8, 32, 64)
LAYERS = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128), "Llama-2-7B": (32, 32, 128)}
"""Query heads, key/value heads, head dim."""
BATCHES = ((1, 1024), (8, 1024), (32, 1024), (1, 8192))
"""Sequences, and the keys of each."""
Call = Callable[[Tensor], Tensor]
Sides = dict[str, Iterator[Call]]
"""The calls of each side, one after another for ever, each with operands of its own."""


def time_sides(sides: Sides, x: Tensor, num_copies: int, expected: dict[str, Tensor], what: str) -> dict[str, float]:
    """Median seconds of each, once its result has been found right."""
    for name, side in sides.items():
        check_close(next(side)(x), expected[name], what=f"{what}, {name}")
    clock, calls = GpuClock() if x.is_cuda else HostClock(), CALLS[x.device.type]

    def program(some: list[Call]) -> Program:
        return clock.program([lambda call=call: (call(x),) for call in some])

    programs = {
        name: itertools.cycle([program([next(side) for _ in range(calls)]) for _ in range(num_copies // calls)])
        for name, side in sides.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS[x.device.type]):
        for name, taken in zip(sides, clock.seconds([next(programs[name]) for name in sides]), strict=True):
            if number:
                seconds[name].append(taken / calls)
    return {name: statistics.median(each) for name, each in seconds.items()}


# Products


def rotating(make: Callable[[], Any], function: Callable[[Tensor, Any], Tensor], num_copies: int) -> Iterator[Call]:
    """Products with copies of one weight, one after another for ever."""
    copies = [make() for _ in range(num_copies)]
    return itertools.cycle([lambda x, weight=weight: function(x, weight) for weight in copies])


def product_sides(weight: Tensor) -> Sides:
    """bf16 twice, then each format."""
    bits = {"bf16 prepared": 16, "bf16 plain": 16, "nf4": 4.127, "int4": 4.25, "int8": 8, "fp8": 8}
    bytes_each = {name: weight.numel() * each / 8 for name, each in bits.items()}
    copies = {name: max(2, int(ROTATING_BYTES[weight.device.type] / each)) for name, each in bytes_each.items()}
    prepared = {name: prepare_quantized_weight(quantize(weight)) for name, quantize in QUANTIZERS.items()}
    return {
        "bf16 prepared": rotating(lambda: prepare_linear_weight(weight.clone()), linear, copies["bf16 prepared"]),
        "bf16 plain": rotating(weight.clone, F.linear, copies["bf16 plain"]),
        **{name: rotating(partial(deepcopy, it), quantized_linear, copies[name]) for name, it in prepared.items()},
    }


def measure_products(device: torch.device) -> list[dict[str, Any]]:
    """One entry per number of rows; prints it."""
    weight = (0.02 * torch.randn(N, K)).bfloat16().to(device)
    held = dict.fromkeys(("bf16 prepared", "bf16 plain"), weight.float())
    held |= {name: quantize(weight).dequantize() for name, quantize in QUANTIZERS.items()}
    sides, results = product_sides(weight), []
    for rows in ROWS:
        x = torch.randn(rows, K).bfloat16().to(device)
        expected = {name: x.float() @ matrix.t() for name, matrix in held.items()}
        times = time_sides(sides, x, WEIGHT_COPIES, expected, f"{rows} rows")
        ratios = {name: times["bf16 prepared"] / taken for name, taken in times.items()}
        results.append({"rows": rows, "n": N, "k": K, "seconds": times, "speedup_over_prepared_bf16": ratios})
        line = "  ".join(f"{name} {1e6 * taken:.0f} us ({ratios[name]:.2f}x)" for name, taken in times.items())
        print(f"{rows:4} rows: {line}", flush=True)
    return results


def measure_adapters() -> list[dict[str, Any]]:
    """One entry per shape and number of rows, on the CPU; prints it."""
    results = []
    for (k, n, rank), rows in itertools.product(ADAPTERS, ADAPTED_ROWS):
        a, b = (torch.randn(shape).bfloat16() for shape in ((1, rank, k), (1, n, rank)))
        x, y, slots = torch.randn(rows, k).bfloat16(), torch.randn(rows, n).bfloat16(), torch.zeros(rows).int()
        copies = [LoraWeights(a.clone() / k**0.5, b.clone(), torch.ones(1)) for _ in range(ADAPTER_COPIES)]
        sides: Sides = {
            "torch": itertools.cycle([lambda x, w=w, y=y: torch.addmm(y, x @ w.a[0].t(), w.b[0].t()) for w in copies]),
            "ours": itertools.cycle([lambda x, w=w, y=y, slots=slots: lora_add(y, x, w, slots) for w in copies]),
        }
        expected = y.float() + x.float() @ copies[0].a[0].float().t() @ copies[0].b[0].float().t()
        times = time_sides(sides, x, ADAPTER_COPIES, dict.fromkeys(sides, expected), f"adapter, {rows} rows")
        ratio = times["torch"] / times["ours"]
        results.append({"rows": rows, "n": n, "k": k, "rank": rank, "seconds": times, "speedup_over_torch": ratio})
        line = ", ".join(f"{name} {1e6 * taken:.0f} us" for name, taken in times.items())
        print(f"{rows:4} rows, adapter {k} to {n} of rank {rank}: {line} ({ratio:.2f}x)", flush=True)
    return results


def measure_quantized(device: torch.device) -> None:
    result: dict[str, Any] = {"layers": measure_products(device)}
    result["unit"] = "seconds are medians of one product, or of one adapter"
    if device.type == "cpu":
        result["adapters"] = measure_adapters()
    print(write_result(f"quantized-{device.type}", "python -m bench.kernels.decode quantized", result))


# Attention


def attention_sides(pools: list[Tensor], tables: Tensor) -> Sides:
    """pools [2, P, page, Hkv, d]: keys and values."""
    sequences, pages = tables.shape
    bounds, lengths = torch.arange(sequences + 1).int(), torch.full((sequences,), pages * PAGE).int()
    plan = plan_paged_attention(tables, bounds, lengths, PAGE)

    def ours(pool: Tensor) -> Call:
        return lambda q: paged_attention(q, *pool, tables, bounds, lengths, plan=plan)

    def by_torch(pool: Tensor) -> Call:
        k, v = (side_by_side(x, tables) for x in pool)
        return lambda q: F.scaled_dot_product_attention(q.view(sequences, k.shape[1], -1, k.shape[3]), k, v).view_as(q)

    return {side.__name__: itertools.cycle([side(pool) for pool in pools]) for side in (ours, by_torch)}


def side_by_side(pages: Tensor, tables: Tensor) -> Tensor:
    """`[P, page, Hkv, d] -> [B, Hkv, keys, d]`."""
    return pages[tables].flatten(1, 2).transpose(1, 2).contiguous()


def measure_layer(name: str, sequences: int, num_keys: int) -> dict[str, Any]:
    """One layer's attention; prints it."""
    heads, num_kv_heads, head_dim = LAYERS[name]
    num_pages, num_bytes = sequences * num_keys // PAGE, 4 * sequences * num_keys * num_kv_heads * head_dim
    copies = max(1, PAGE_BYTES // num_bytes // CALLS["cpu"]) * CALLS["cpu"]
    tables = torch.randperm(num_pages).int().view(sequences, -1)
    pools = [torch.randn(2, num_pages, PAGE, num_kv_heads, head_dim).bfloat16() for _ in range(copies)]
    q = torch.randn(sequences, heads, head_dim).bfloat16()
    k, v = (side_by_side(x.float(), tables) for x in pools[0])
    expected = F.scaled_dot_product_attention(q.float()[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    sides = attention_sides(pools, tables)
    times = time_sides(sides, q, copies, dict.fromkeys(sides, expected), "attention")
    ratio = times["by_torch"] / times["ours"]
    line = f"{1e3 * times['ours']:.2f} ms, torch {1e3 * times['by_torch']:.2f} ms ({ratio:.2f}x)"
    print(f"{name:12} {sequences:2} sequences of {num_keys:,} keys: {line}", flush=True)
    speed = {"seconds": times, "speedup_over_torch": ratio, "gb_per_s": num_bytes / times["ours"] / 1e9}
    shape = {"heads": heads, "kv_heads": num_kv_heads, "head_dim": head_dim, "sequences": sequences, "keys": num_keys}
    return {"layer": name, **shape, **speed}


def measure_attention(device: torch.device) -> None:
    results = [measure_layer(name, *batch) for name in LAYERS for batch in BATCHES]
    result = {"attention": results, "unit": "seconds are medians of one layer's attention of one decoding step"}
    print(write_result("attention-cpu", "python -m bench.kernels.decode attention", result))


# Tiles


def tune(device: torch.device) -> None:
    """Print the fastest tiles for each number of rows in the tables, and where expanding the weight first wins."""
    weight = (0.02 * torch.randn(N, K)).bfloat16().to(device)
    for name, bits in (("nf4", 4), ("int8", 8)):
        table = module._FORWARD_TILES[bits]
        copies = [prepare_quantized_weight(QUANTIZERS[name](weight)) for _ in range(24)]
        for rows in table:
            x = torch.randn(rows, K).bfloat16().to(device)
            timed = {}
            for outputs, warps, stages in itertools.product((32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 5)):
                table[rows] = Tiles(rows, outputs, warps, stages)
                timed[table[rows]] = _seconds_of(copies, x)
            table[rows] = min(timed, key=lambda tiles: timed[tiles])
            print(f"{bits} bits, {rows} rows: {table[rows]}  {1e6 * timed[table[rows]]:.1f} us", flush=True)
        for rows in (64, 96, 128, 192, 256, 512):
            x = torch.randn(rows, K).bfloat16().to(device)
            taken = {}
            for module._MOST_FUSED_ROWS in (0, 1 << 20):
                taken[module._MOST_FUSED_ROWS] = _seconds_of(copies, x)
            expanded, fused = (1e6 * each for each in taken.values())
            print(f"{bits} bits, {rows} rows: expanded {expanded:.1f} us, fused {fused:.1f} us", flush=True)


def _seconds_of(copies: list[PreparedQuantizedWeight], x: Tensor) -> float:
    """The median of one product; infinite where the tiles do not fit the GPU."""
    try:
        quantized_linear(x, copies[0])
    except Exception as error:
        print(f"  skipped: {type(error).__name__}")
        return float("inf")
    clock = GpuClock()
    program = clock.program([lambda copy=copy: (quantized_linear(x, copy),) for copy in copies])
    return statistics.median(clock.seconds([program])[0] / len(copies) for _ in range(20))


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
