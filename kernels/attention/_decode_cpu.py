"""Attention of a few queries a sequence on the CPU, by `_decode.c` in bf16 and `_decode_wide.c` in fp32.

Legend: T queries of all sequences, Hq query heads, Hkv key/value heads, d head dim, B sequences.
"""

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call
from kernels.common.floats_cpu import NEEDS

_CHUNK = 256
"""Keys that one task attends to, as in the C source."""
_COLUMNS = 64
_SOURCES = {torch.bfloat16: ("_decode.c", (frozenset({"avx512_bf16"}),)), torch.float32: ("_decode_wide.c", NEEDS)}
"""By the dtype of queries, keys and values: the C source, and what it needs."""


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_tasks", "page", "window", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("tables", "sequences", "owners", "numbers", "parts")),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("plan", ctypes.POINTER(_Plan)),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "d", "q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        ("scale", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class DecodePlan:
    """The same for every layer of a step."""

    def __init__(self, page_size: int, window: int | None) -> None:
        self.read_by_c = _Plan(page=page_size, window=window or 0)
        self._num_parts, self._part_size = 0, 0
        self._parts = torch.empty(0)

    def renew(self, sequences: np.ndarray, block_tables: np.ndarray) -> None:
        """Make it the plan of these; calls that have read it will read this one when they are made again.

        sequences [S, 5] int64: row of the tables, first query, queries, first key, length; tables [B, …] int32.
        """
        queries, first_key, length = sequences[:, 2:].T
        first_chunk = first_key // _CHUNK
        chunks = -(-length // _CHUNK) - first_chunk
        parts = np.cumsum(chunks * queries)
        owners = np.repeat(np.arange(len(sequences)), chunks)
        numbers = np.arange(len(owners)) + (first_chunk - np.cumsum(chunks) + chunks)[owners]
        sequences = np.column_stack((sequences, parts - chunks * queries))
        plan, self._held = self.read_by_c, (block_tables, sequences, owners, numbers)
        plan.num_sequences, plan.num_tasks = len(sequences), len(owners)
        plan.table_stride = block_tables.strides[0] // block_tables.itemsize
        plan.tables, plan.sequences, plan.owners, plan.numbers = (array.ctypes.data for array in self._held)
        self._num_parts = int(parts[-1])
        self.make_room(self._part_size)

    def make_room(self, part_size: int) -> None:
        """Have memory for partial results of so many numbers each."""
        self._part_size = max(self._part_size, part_size)
        if self._num_parts * self._part_size > len(self._parts):
            self._parts = torch.empty(self._num_parts * self._part_size)
        self.read_by_c.parts = self._parts.data_ptr()


def takes(q: Tensor, k_slots: Tensor, v_slots: Tensor) -> bool:
    """Whether `attend_decode` does q [T, Hq, d] over keys and values [slots, Hkv, d]."""
    return (
        q.dtype == k_slots.dtype == v_slots.dtype
        and q.dtype in _SOURCES
        and q.shape[2] % _COLUMNS == 0
        and all(x.stride()[1:] == (x.shape[2], 1) for x in (q, k_slots, v_slots))
        and _library(q.dtype) is not None
    )


def attend_decode(
    q: Tensor, k_slots: Tensor, v_slots: Tensor, plan: DecodePlan, out: Tensor, scale: float, soft_cap: float | None
) -> None:
    """Write the attention of the planned queries into out [T, Hq, d]; `takes` must accept the tensors."""
    _, heads, d = q.shape
    plan.make_room(heads * (d + 2))
    tensors = q, k_slots, v_slots
    batch = _Batch(
        ctypes.pointer(plan.read_by_c), heads, k_slots.shape[1], d, *(x.stride(0) for x in tensors),
        *(x.data_ptr() for x in (*tensors, out)), scale / math.log(2), 0 if soft_cap is None else soft_cap / scale,
    )  # fmt: skip
    call(_library(q.dtype).attend_decode, batch, torch.get_num_threads())


@cache
def _library(dtype: torch.dtype) -> Any:
    name, needs = _SOURCES[dtype]
    library = compiled(Path(__file__).with_name(name), needs=needs)
    if library is not None:
        library.attend_decode.argtypes = (ctypes.POINTER(_Batch), ctypes.c_int)
        library.attend_decode.restype = None
    return library
