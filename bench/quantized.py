"""Quantized linear layers beside bf16, and on the CPU adapters beside torch: medians, all by turns, in one run.

    python -m bench.quantized            # CPU: 2 minutes; writes bench/results/quantized-DEVICE.json
    python -m bench.quantized --tune     # on a GPU: prints the tile tables of kernels/linear/quantized.py

Every call reads another copy of its weight, all copies together larger than the last-level cache. On the CPU the
baseline is `kernels.linear.dense` with a prepared bf16 weight; the plain F.linear stands beside it. An adapter's
baseline is what torch needs for it: a matrix product, and another with an addition. (`bench.kernels` times adapters on
a GPU.)
Nothing is timed before its result has been checked against an fp32 product.
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
from bench.kernel_timing import GpuClock, HostClock, Program, side_stream
from kernels.linear.dense import linear, prepare_linear_weight
from kernels.linear.lora import LoraWeights, lora_add
from kernels.linear.quantization import QuantizedWeight, quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from kernels.linear.quantized import PreparedQuantizedWeight, Tiles, prepare_quantized_weight, quantized_linear
from tests.compare import check_close

N = K = 4096
ROWS = (1, 2, 4, 8, 16, 64, 256)
ROTATING_BYTES = {"cpu": 616 * 2**20, "cuda": 256 * 2**20}
ROUNDS = {"cpu": 41, "cuda": 61}
CALLS = {"cpu": 4, "cuda": 1}
"""How many products in a row a candidate computes in its turn, as the layers of a decoding step do."""
WEIGHT_COPIES, ADAPTER_COPIES = 24, 512
ADAPTERS = ((4096, 4096, 16), (576, 3072, 32))
"""Inputs, outputs and ranks: of a large layer, and of SmolLM2's gate and up, each with an adapter of rank 16."""
ADAPTED_ROWS = (1, 8, 32, 64)
Product = Callable[[Tensor], Tensor]

QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": quantize_nf4,
    "int4": quantize_int4,
    "int8": quantize_int8,
    "fp8": quantize_fp8,
}


def rotating(make: Callable[[Tensor], Product], weight: Tensor, bytes_each: float) -> Iterator[Product]:
    """Products with copies of one weight, one after another for ever."""
    copies = max(2, int(ROTATING_BYTES[weight.device.type] / bytes_each))
    return itertools.cycle([make(weight.clone()) for _ in range(copies)])


def candidates(weight: Tensor) -> dict[str, Iterator[Product]]:
    """bf16 twice, then each format."""

    def quantized(name: str) -> Callable[[Tensor], Product]:
        original = prepare_quantized_weight(QUANTIZERS[name](weight))

        def make(_: Tensor) -> Product:
            prepared = deepcopy(original)
            return lambda x: quantized_linear(x, prepared)

        return make

    def prepared_bf16(copy: Tensor) -> Product:
        prepared = prepare_linear_weight(copy)
        return lambda x: linear(x, prepared)

    def plain_bf16(copy: Tensor) -> Product:
        return lambda x: F.linear(x, copy)

    size = weight.numel()
    bytes_each = {"nf4": size * 4.127 / 8, "int4": size * 4.25 / 8, "int8": size, "fp8": size}
    return {
        "bf16 prepared": rotating(prepared_bf16, weight, 2 * size),
        "bf16 plain": rotating(plain_bf16, weight, 2 * size),
        **{name: rotating(quantized(name), weight, bytes_each[name]) for name in QUANTIZERS},
    }


def expected_weights(weight: Tensor) -> dict[str, Tensor]:
    """The matrix that each side holds, fp32."""
    held = {name: quantize(weight).dequantize() for name, quantize in QUANTIZERS.items()}
    return {"bf16 prepared": weight.float(), "bf16 plain": weight.float(), **held}


def time_products(sides: dict[str, Iterator[Product]], x: Tensor, num_copies: int) -> dict[str, float]:
    """Median seconds of each."""
    clock, calls = GpuClock() if x.is_cuda else HostClock(), CALLS[x.device.type]

    def program(products: list[Product]) -> Program:
        return clock.program([lambda product=product: (product(x),) for product in products])

    turns = {
        name: itertools.cycle([program([next(side) for _ in range(calls)]) for _ in range(num_copies // calls)])
        for name, side in sides.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS[x.device.type]):
        for name, taken in zip(sides, clock.seconds([next(turns[name]) for name in sides]), strict=True):
            if number:
                seconds[name].append(taken / calls)
    return {name: statistics.median(each) for name, each in seconds.items()}


def measure(device: torch.device) -> list[dict[str, Any]]:
    """One entry per number of rows; prints it."""
    weight = (0.02 * torch.randn(N, K)).bfloat16().to(device)
    sides, held = candidates(weight), expected_weights(weight)
    results = []
    for rows in ROWS:
        x = torch.randn(rows, K).bfloat16().to(device)
        for name, side in sides.items():
            check_close(next(side)(x), x.float() @ held[name].t(), what=f"{name}, {rows} rows")
        times = time_products(sides, x, WEIGHT_COPIES)
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
        sides: dict[str, Iterator[Product]] = {
            "torch": itertools.cycle([lambda x, w=w, y=y: torch.addmm(y, x @ w.a[0].t(), w.b[0].t()) for w in copies]),
            "ours": itertools.cycle([lambda x, w=w, y=y, slots=slots: lora_add(y, x, w, slots) for w in copies]),
        }
        expected = y.float() + x.float() @ copies[0].a[0].float().t() @ copies[0].b[0].float().t()
        for name, side in sides.items():
            check_close(next(side)(x), expected, what=f"adapter, {name}, {rows} rows")
        times = time_products(sides, x, ADAPTER_COPIES)
        ratio = times["torch"] / times["ours"]
        results.append({"rows": rows, "n": n, "k": k, "rank": rank, "seconds": times, "speedup_over_torch": ratio})
        line = ", ".join(f"{name} {1e6 * taken:.0f} us" for name, taken in times.items())
        print(f"{rows:4} rows, adapter {k} to {n} of rank {rank}: {line} ({ratio:.2f}x)", flush=True)
    return results


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
    program = clock.program([partial(_product, copy, x) for copy in copies])
    return statistics.median(clock.seconds([program])[0] / len(copies) for _ in range(20))


def _product(weight: PreparedQuantizedWeight, x: Tensor) -> tuple[Tensor]:
    return (quantized_linear(x, weight),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with side_stream(device), torch.no_grad():
        if options.tune:
            if device.type != "cuda":
                parser.error("only a GPU's tiles can be tuned")
            tune(device)
            return
        result = {"layers": measure(device), "unit": "seconds are medians of one product, or of one adapter"}
        if device.type == "cpu":
            result["adapters"] = measure_adapters()
    print(write_result(f"quantized-{device.type}", "python -m bench.quantized", result))


if __name__ == "__main__":
    main()
