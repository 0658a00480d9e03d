"""Triton, where it is asked for: `from kernels.common.triton import tl, triton`.

It is imported for a torch that is built for GPUs, where TRITON_INTERPRET says how kernels run (interpreted or not), and
for whoever imported it before. Elsewhere no kernel can run: Triton would only take its time, and some platforms have
none. There kernels are defined all the same, and say what is missing when they are launched.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

__all__ = ["has_triton", "tl", "triton"]


def has_triton() -> bool:
    """Whether it was asked for and is there."""
    return not isinstance(triton, NoTriton)


def _is_asked_for() -> bool:
    is_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return is_for_gpus or "triton" in sys.modules or "TRITON_INTERPRET" in os.environ


class UnlaunchedKernel:
    """A kernel where there is no Triton."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> NoReturn:
        raise RuntimeError(f"{self.__name__} is a Triton kernel, and Triton is not there: install it, or use the CPU")


class NoTriton:
    """What of Triton is used where kernels are defined and launched."""

    def jit(self, function: Callable[..., None] | None = None, **options: Any) -> Any:
        return partial(self.jit, **options) if function is None else UnlaunchedKernel(function)

    def cdiv(self, x: int, y: int) -> int:
        return -(-x // y)

    def next_power_of_2(self, n: int) -> int:
        return 1 << (n - 1).bit_length()


class NoLanguage:
    """Names that annotate parameters, and `constexpr` of a number, which is the number."""

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda value: value


def _choose() -> tuple[Any, Any]:
    if _is_asked_for():
        try:
            return importlib.import_module("triton"), importlib.import_module("triton.language")
        except ImportError:
            pass  # the first kernel that is launched says so
    return NoTriton(), NoLanguage()


if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    triton, tl = _choose()
