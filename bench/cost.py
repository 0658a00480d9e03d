"""What a piece of work costs its process. The standard library alone: a peer's interpreter reads this as well."""

import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path


def cost_of(run: Callable[[], object]) -> dict[str, float]:
    """Seconds on the clock and of the processor, and how many bytes the process had more at its peak than before.

    What was left before is freed first, and given back to the system: freed meanwhile or filled again, it would hide
    what `run` takes.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began, busy = _memory_bytes("VmRSS"), time.perf_counter(), time.process_time()
    run()
    ended, worked = time.perf_counter(), time.process_time()
    return {"wall_s": ended - began, "processor_s": worked - busy, "peak_bytes": _memory_bytes("VmHWM") - before}


def _memory_bytes(name: str) -> int:
    [kilobytes] = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)
