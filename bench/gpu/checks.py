"""What comes before any speed: the tests that need a GPU, and what the machine itself can do."""

import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.common import DEVICE, ROOT
from bench.gpu.figures import ITSELF, Figure, Goal
from bench.gpu.process import last_lines, run_limited
from bench.gpu.task import NotDone, Task, Unfinished
from bench.kernels.timing import clock_of, measure_limits, side_stream

FILE_S = 240.0
"""For one file of tests."""
COPY, PRODUCT = "copy", "bf16 product"


class TestsFailed(NotDone):
    """Some tests failed; which ones are in the log."""


def gpu_tests(task: Task) -> Iterator[Figure]:
    """`pytest -m gpu`, each file of tests in a process of its own: an error of CUDA fails all that come behind it."""
    marker, files = ("not slow", [ROOT / "tests/test_compiled_before.py"]) if task.tiny else ("gpu", marked_files())
    ends, passed, total, failed = time.monotonic() + task.seconds - 10, 0, 0, []
    for number, path in enumerate(files):
        if (left_s := ends - time.monotonic()) <= 0:
            raise Unfinished(f"{len(files) - number} of {len(files)} files are left, from {path.name} on")
        found = run_file(path, marker, task.folder / "gpu", min(FILE_S, left_s))
        passed, total = passed + found[0], total + found[1]
        failed += [path.name] if found[0] < found[1] else []
        yield Figure("tests passed", "tests", passed, goals=(Goal(ITSELF, total),))
    if failed:
        raise TestsFailed(f"tests failed in {', '.join(failed)}")


def marked_files() -> list[Path]:
    """Only those with such tests: others may import what a GPU machine lacks."""
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())


def run_file(path: Path, marker: str, folder: Path, limit_s: float) -> tuple[int, int]:
    """How many tests passed, and of how many; skipped ones do not count. A file that cannot be run is one failure."""
    report, log = folder / "tests.xml", folder / f"tests-{path.stem}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", str(path), "-m", marker, "-q", "-p", "no:cacheprovider"]
    side_by_side = marker == "gpu" and find_spec("xdist")  # a dry run's tests end before four processes begin
    command += [f"--junitxml={report}", *(["-n", "4"] if side_by_side else [])]
    ended = run_limited(command, log, limit_s, cwd=ROOT)
    print(*last_lines(log), sep="\n", flush=True)
    if not report.exists():
        print(f"{path.name}: {'killed at its limit' if ended.code is None else f'exit code {ended.code}'}", flush=True)
        return 0, 1
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
    total = counts["tests"] - counts["skipped"]
    return total - counts["failures"] - counts["errors"], total


def peaks(task: Task) -> Iterator[Figure]:
    """Copy bandwidth, of bytes read and written, and the rate of a bf16 product, the best of several rounds."""
    device = torch.device(DEVICE)
    elements, n = (2**20, 128) if device.type == "cpu" else (2**29, 8192)
    with side_stream(device):
        found = [measure_limits(device, clock_of(device), elements, n) for _ in range(3)]
    yield Figure(COPY, "GB/s", max(limits.copy_bytes_per_s for limits in found) / 1e9)
    yield Figure(PRODUCT, "TFLOP/s", max(limits.matmul_flop_per_s for limits in found) / 1e12)
