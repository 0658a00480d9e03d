"""What a result was measured with: versions of the libraries that decide it, and the machine."""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from model.mesh import gpus, has_gpu

ROOMS = ("kernels", "model", "compress", "train", "serve", "pipeline")
"""Our packages."""
DECISIVE = ("potstill", "torch", "triton", "numpy", "safetensors", "tokenizers", "accelerate")


def versions() -> dict[str, str]:
    """Version of Python and of each library that can change a number; what is not installed is left out."""
    return {"python": platform.python_version(), **package_versions(DECISIVE)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores, memory in bytes, and the GPUs that torch sees."""
    import torch

    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus()],
    }


def processor_name() -> str:
    """As the operating system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory_bytes() -> int:
    """Physical memory of the machine; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def peak_memory_bytes() -> int:
    """The most memory that this process has held, on the GPU where there is one, else resident on the host."""
    import resource
    import sys

    import torch

    if has_gpu():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
