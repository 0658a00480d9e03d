"""Measures the memory of tensors on the CPU: by the profiler's record of all allocations, or of the process."""

import ctypes
import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from bench.cost import cost_of

M_MMAP_THRESHOLD = -3
"""In malloc.h."""


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that tensors made within `function` take at one moment."""
    gc.collect()  # or what earlier tests left may be freed meanwhile, and hide what this one takes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak


def return_what_is_freed() -> None:
    """From now on tensors get pages of their own, which leave the process with them."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**12)


def peak_resident_bytes(function: Callable[[], object]) -> int:
    """The most that the process grows by within `function`: what other threads free, the profiler does not see.

    What was made before must be such as `return_what_is_freed` leaves behind.
    """
    return int(cost_of(function)["peak_bytes"])
