"""What this machine's processor can do, in the words that Linux has for it."""

import ctypes
import platform
import sys
from collections.abc import Callable
from pathlib import Path

Needs = tuple[frozenset[str], ...]
"""Features of a processor: all of one of these."""

_CPUINFO = Path("/proc/cpuinfo")
_ON_MACOS = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}
"""What Apple calls them."""


def is_arm64() -> bool:
    return platform.machine() in ("aarch64", "arm64")


def processor_features() -> frozenset[str]:
    """Empty where the system does not list them."""
    if sys.platform == "darwin":
        return features_on_macos(_says_yes) if is_arm64() else frozenset()
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    named = ("Features",) if is_arm64() else ("flags",)
    return frozenset(next((line for line in lines if line.startswith(named)), "").partition(":")[2].split())


def features_on_macos(says_yes: Callable[[str], bool]) -> frozenset[str]:
    """Of an arm64 processor, all of which have NEON; `says_yes` answers for a name of `sysctl hw.optional`."""
    return frozenset({"asimd", *(name for name, apples in _ON_MACOS.items() if says_yes(f"hw.optional.arm.{apples}"))})


def _says_yes(name: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and value.value == 1


def suits(features: frozenset[str], needs: Needs) -> bool:
    return any(each <= features for each in needs)
