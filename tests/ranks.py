"""Ranks of tensor parallelism as threads of this process, over gloo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from model.collectives import Group

Result = TypeVar("Result")


def in_ranks(count: int, work: Callable[[Group], Result]) -> list[Result]:
    """What `work` returns in each of so many ranks, which have met."""
    store = dist.HashStore()

    def run(index: int) -> Result:
        group = Group(index, count)
        group.join_by(store, torch.device("cpu"))
        return work(group)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
