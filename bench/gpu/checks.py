"""What comes before any speed: the tests that need a GPU, and what the machine itself can do."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.common import DEVICE, ROOT
from bench.gpu.figures import ITSELF, Figure, Goal
from bench.gpu.process import last_lines, run_limited
from bench.gpu.sources import TESTED, digest
from bench.gpu.task import NotDone, Task, Unfinished
from bench.kernels.timing import clock_of, measure_limits, side_stream
from tests.gpu_results import FAILED, PASSED, SKIPPED, results_in

MOST_PROCESSES = 15
"""Each keeps a context of CUDA, and what its tests take, on the one GPU."""
MARGIN_S = 10.0
COPY, PRODUCT = "copy", "bf16 product"


class TestsFailed(NotDone):
    """Some tests failed; which ones are in the log."""


def gpu_tests(task: Task) -> Iterator[Figure]:
    """`pytest -m gpu` in as many processes as there are processors, for kernels take longer to compile than to run.

    What has passed before with the same sources is not run again; skipped ones do not count.
    """
    marker, files = ("not slow", [ROOT / "tests/test_compiled_before.py"]) if task.tiny else ("gpu", marked_files())
    results = task.folder / "gpu" / f"tests-{digest(TESTED)}.jsonl"
    if task.again:
        results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *map(str, files), "-m", marker, "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.gpu_results", "--results", str(results)]
    if marker == "gpu" and find_spec("xdist"):  # a dry run's tests end before other processes begin
        processes = min(MOST_PROCESSES, os.cpu_count() or 1)
        command += ["-n", str(processes), "--maxschedchunk", "8", "--max-worker-restart", "50"]
    log = task.folder / "gpu" / "pytest.log"
    ended = run_limited(command, log, task.seconds - MARGIN_S, cwd=ROOT)
    print(*last_lines(log), sep="\n", flush=True)
    found = results_in(results)
    if "" not in found:
        raise TestsFailed(f"pytest ended with exit code {ended.code} before it had collected any tests")
    outcomes = [one["outcome"] for test, one in found.items() if test]
    total, passed = found.pop("")["count"] - outcomes.count(SKIPPED), outcomes.count(PASSED)
    yield Figure("tests passed", "tests", passed, goals=(Goal(ITSELF, total),))
    if failed := sorted({test.partition("[")[0] for test, one in found.items() if one["outcome"] == FAILED}):
        raise TestsFailed(f"failed: {', '.join(failed)}")
    if left := total - passed:
        raise Unfinished(f"{left} of {total} tests are left")


def marked_files() -> list[Path]:
    """Only those with such tests: others may import what a GPU machine lacks."""
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())


def peaks(task: Task) -> Iterator[Figure]:
    """Copy bandwidth, of bytes read and written, and the rate of a bf16 product, the best of several rounds."""
    device = torch.device(DEVICE)
    elements, n = (2**20, 128) if device.type == "cpu" else (2**29, 8192)
    with side_stream(device):
        found = [measure_limits(device, clock_of(device), elements, n) for _ in range(3)]
    yield Figure(COPY, "GB/s", max(limits.copy_bytes_per_s for limits in found) / 1e9)
    yield Figure(PRODUCT, "TFLOP/s", max(limits.matmul_flop_per_s for limits in found) / 1e12)
