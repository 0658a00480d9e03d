"""Memory for weights that a CPU reads whole in every step, in pages of 2 MiB where the system has them.

A product of few rows waits for memory, and in pages of 4 KiB for where each of them lies too. Matrices of small models
fill no large page alone, so they lie side by side.
"""

import mmap
import sys
import threading

import torch
from torch import Tensor

_PAGE = 2 << 20
_AREA = 64 << 20
"""Bytes that are asked for at once; the system gives them as they are filled."""
_ALIGNMENT = 64
_LEAST = 1 << 12
"""Less is read too fast to matter."""


class _Area:
    """Some memory, filled from its begin to its end, and again where no tensor is in it; it is freed with the last."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._begin = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % _PAGE
        self._next, self._end = self._begin, self._begin + num_bytes
        self._unused = sys.getrefcount(self._memory)
        """References while no tensor is in it: each tensor has one."""

    def take(self, like: Tensor) -> Tensor | None:
        """A contiguous tensor of that shape and dtype; None where there is no room."""
        if sys.getrefcount(self._memory) == self._unused:
            self._next = self._begin
        begin, end = self._next, self._next + like.nbytes
        if end > self._end:
            return None
        self._next = end + -end % _ALIGNMENT
        return torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=begin).view(like.shape)


_lock = threading.Lock()
_areas: list[_Area] = []
"""The one that is being filled, if there is one."""


def in_large_pages(tensor: Tensor) -> Tensor:
    """The numbers of a tensor, contiguous: a copy in memory as described, or as they are where they are few."""
    if tensor.nbytes < _LEAST or not tensor.is_cpu:
        return tensor.contiguous()
    with _lock:
        to = _areas[-1].take(tensor) if _areas else None
        if to is None:
            _areas[:] = [_Area(max(_AREA, tensor.nbytes))]
            to = _areas[-1].take(tensor)
    return tensor.contiguous() if to is None else to.copy_(tensor)
