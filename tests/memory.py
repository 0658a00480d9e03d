"""Measures the memory of tensors on the CPU, from the profiler's record of every allocation."""

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


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
