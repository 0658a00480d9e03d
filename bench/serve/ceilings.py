"""What one thread of this processor can do at most, and so the least time that the products of a pass take."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.linear._tiles_cpu import has_tiles
from model.cost import num_weights, weight_bytes
from model.transformer import Transformer

READ_BYTES, SIZE, REPEATS = 1 << 29, 2048, 5


def measure_ceilings(dtype: torch.dtype) -> dict[str, float]:
    """Bytes and products a second: a dot product far larger than the caches, and a matrix product within them.

    Of rounded activations in bf16 with AMX the products are those of bf16; else, in the same units, of as many integers
    as a number has bytes (VNNI).
    """
    halves = [torch.ones(READ_BYTES // 8) for _ in range(2)]
    square = torch.randn(SIZE, SIZE).to(dtype)
    products = SIZE**3 / _least_seconds(lambda: square @ square)
    return {
        "read_bytes_per_s": READ_BYTES / _least_seconds(lambda: torch.dot(*halves)),
        "products_per_s": products,
        "rounded_products_per_s": products * (1 if has_tiles(square) else dtype.itemsize),
    }


def _least_seconds(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        run()
        taken.append(time.thread_time() - begin)
    return min(taken)


class Weights(NamedTuple):
    """What the products of a pass read."""

    count: int
    head: int
    """Of them, those of the head."""
    num_bytes: int


def weights_of(model: Transformer) -> Weights:
    """Before it is prepared for serving; dense ones count as bf16."""
    head = model.config.vocab_size * model.config.hidden_size
    return Weights(num_weights(model), head, weight_bytes(model, torch.bfloat16))


def least_milliseconds(
    weights: Weights, rows: int, heads: int, ceilings: dict[str, float], rounded: bool
) -> dict[str, float]:
    """Of the products of a pass of `rows` rows, `heads` of which go through the head: each weight is read once."""
    products = rows * (weights.count - weights.head) + heads * weights.head
    return {
        "reading": 1e3 * weights.num_bytes / ceilings["read_bytes_per_s"],
        "multiplying": 1e3 * products / ceilings["rounded_products_per_s" if rounded else "products_per_s"],
    }
