"""What a piece of work takes is measured, whatever the process did before."""

import gc
import subprocess
import sys
from pathlib import Path

import torch

from bench.cost import cost_of

MEBIBYTES = 2**20
FROM_A_FREED_HEAP = """
from bench.cost import cost_of
large = bytearray(31 * 2**20)
del large  # from now on the allocator keeps blocks of up to that size in its heap
blocks = [b"x" * (16 * 2**20) for _ in range(25)]
above = [bytearray(2000) for _ in range(1000)]  # so the heap's end stays where it is
del blocks
print(cost_of(lambda: b"x" * (200 * 2**20))["peak_bytes"])
"""


def test_a_peak_is_measured_above_what_was_there() -> None:
    before = torch.ones(100 * MEBIBYTES)  # 400 MiB
    cost = cost_of(lambda: torch.ones(50 * MEBIBYTES).sum())
    assert 195 * MEBIBYTES < cost["peak_bytes"] < 260 * MEBIBYTES, "200 MiB"
    assert cost["wall_s"] > 0 and cost["processor_s"] > 0
    del before


def test_what_was_left_before_hides_no_peak() -> None:
    left: list[object] = [torch.ones(100 * MEBIBYTES)]
    left.append(left)  # a circle, which only the collector frees
    del left
    cost = cost_of(lambda: (gc.collect(), torch.ones(50 * MEBIBYTES).sum()))
    assert 195 * MEBIBYTES < cost["peak_bytes"] < 260 * MEBIBYTES, "200 MiB"


def test_what_the_allocator_kept_hides_no_peak() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FROM_A_FREED_HEAP],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert 195 * MEBIBYTES < int(ran.stdout) < 260 * MEBIBYTES, "200 MiB"
