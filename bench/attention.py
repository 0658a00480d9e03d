"""Attention of a decoding step on the CPU beside torch: medians, all by turns, in one run.

    python -m bench.attention            # 2 minutes; writes bench/results/attention-cpu.json

Ours reads keys and values from scattered pages; torch has them side by side, as transformers keeps them, and takes the
query heads that share keys as the rows of one call, which is several times as fast as `enable_gqa`. Every call reads
other ones, all together larger than the last-level cache. Nothing is timed before its result has been checked against
fp32. (`bench.kernels` times attention on a GPU.)
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import write_result
from bench.quantized import CALLS, Product, time_products
from kernels.attention.paged import paged_attention, plan_paged_attention
from tests.compare import check_close

LAYERS = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128), "Llama-2-7B": (32, 32, 128)}
"""Query heads, key/value heads, head dim."""
BATCHES = ((1, 1024), (8, 1024), (32, 1024), (1, 8192))
"""Sequences, and the keys of each."""
PAGE = 16
ROTATING_BYTES = 256 * 2**20


def candidates(pools: list[Tensor], tables: Tensor) -> dict[str, Iterator[Product]]:
    """Both sides, each over one pool after another for ever. pools [2, P, page, Hkv, d]: keys and values."""
    sequences, pages = tables.shape
    bounds, lengths = torch.arange(sequences + 1).int(), torch.full((sequences,), pages * PAGE).int()
    plan = plan_paged_attention(tables, bounds, lengths, PAGE)

    def ours(pool: Tensor) -> Product:
        return lambda q: paged_attention(q, *pool, tables, bounds, lengths, plan=plan)

    def by_torch(pool: Tensor) -> Product:
        k, v = (side_by_side(x, tables) for x in pool)
        return lambda q: F.scaled_dot_product_attention(q.view(sequences, k.shape[1], -1, k.shape[3]), k, v).view_as(q)

    return {side.__name__: itertools.cycle([side(pool) for pool in pools]) for side in (ours, by_torch)}


def side_by_side(pages: Tensor, tables: Tensor) -> Tensor:
    """`[P, page, Hkv, d] -> [B, Hkv, keys, d]`."""
    return pages[tables].flatten(1, 2).transpose(1, 2).contiguous()


def measure(name: str, sequences: int, num_keys: int) -> dict[str, Any]:
    """One layer's attention; prints it."""
    heads, num_kv_heads, head_dim = LAYERS[name]
    num_pages, num_bytes = sequences * num_keys // PAGE, 4 * sequences * num_keys * num_kv_heads * head_dim
    copies = max(1, ROTATING_BYTES // num_bytes // CALLS["cpu"]) * CALLS["cpu"]
    tables = torch.randperm(num_pages).int().view(sequences, -1)
    pools = [torch.randn(2, num_pages, PAGE, num_kv_heads, head_dim).bfloat16() for _ in range(copies)]
    q = torch.randn(sequences, heads, head_dim).bfloat16()
    k, v = (side_by_side(x.float(), tables) for x in pools[0])
    expected = F.scaled_dot_product_attention(q.float()[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    sides = candidates(pools, tables)
    for side, products in sides.items():
        check_close(next(products)(q), expected, what=f"attention, {side}")
    times = time_products(sides, q, copies)
    ratio = times["by_torch"] / times["ours"]
    line = f"{1e3 * times['ours']:.2f} ms, torch {1e3 * times['by_torch']:.2f} ms ({ratio:.2f}x)"
    print(f"{name:12} {sequences:2} sequences of {num_keys:,} keys: {line}", flush=True)
    speed = {"seconds": times, "speedup_over_torch": ratio, "gb_per_s": num_bytes / times["ours"] / 1e9}
    shape = {"heads": heads, "kv_heads": num_kv_heads, "head_dim": head_dim, "sequences": sequences, "keys": num_keys}
    return {"layer": name, **shape, **speed}


def main() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        results = [measure(name, *batch) for name in LAYERS for batch in BATCHES]
    result = {"attention": results, "unit": "seconds are medians of one layer's attention of one decoding step"}
    print(write_result("attention-cpu", "python -m bench.attention", result))


if __name__ == "__main__":
    main()
