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


class _Lengths(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("borders", "lengths", "rows")),
        *((name, ctypes.c_int64) for name in ("count", "most_queries", "window")),
    )


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("sequences", "tasks", "parts"))


class DecodePlan:
    """Who of a step decodes or verifies: the same for every layer."""

    def __init__(self, page_size: int, window: int | None, most_queries: int) -> None:
        """Whoever has more queries than that, or more than keys, is left out. `plans` must hold."""
        self.read_by_c = _Plan(page=page_size, window=window or 0)
        self._given, self._found = _Lengths(most_queries=most_queries, window=window or 0), _Sizes()
        self._part_size = 0
        self._parts = torch.empty(0)
        self._make_memory(room=1)

    @property
    def num_sequences(self) -> int:
        return self._found.sequences

    def renew(
        self, block_tables: Tensor, cu_seqlens_q: Tensor, kv_lengths: Tensor, table_rows: Tensor | None = None
    ) -> None:
        """Make it the plan of these; calls that have read it will read this one when they are made again.

        All int32: tables [B, …], borders [B + 1], lengths [B], and which row of the tables is whose, [B].
        """
        rows = None if table_rows is None else table_rows.contiguous()
        self._held = block_tables, cu_seqlens_q.contiguous(), kv_lengths.contiguous(), rows
        plan, given, (_, borders, lengths, _) = self.read_by_c, self._given, self._held
        plan.tables, plan.table_stride = block_tables.data_ptr(), block_tables.stride(0)
        given.borders, given.lengths, given.count = borders.data_ptr(), lengths.data_ptr(), lengths.shape[0]
        given.rows = None if rows is None else rows.data_ptr()
        self._lay_out()
        most = max(self._found.sequences, self._found.tasks)
        if most > self._room:
            self._make_memory(2 * most)
            self._lay_out()
        plan.num_sequences, plan.num_tasks = self._found.sequences, self._found.tasks
        self.make_room(self._part_size)

    def _lay_out(self) -> None:
        plan = self.read_by_c
        to = self._room, plan.sequences, plan.owners, plan.numbers
        _library(torch.float32).plan_decode(self._given, *to, self._found)

    def _make_memory(self, room: int) -> None:
        """For so many sequences, six numbers each, and as many owners and numbers of tasks."""
        self._room, self._memory = room, np.empty((8, room), dtype=np.int64)
        plan, lines = self.read_by_c, self._memory.ctypes.data
        plan.sequences, plan.owners, plan.numbers = (lines + line * self._memory.strides[0] for line in (0, 6, 7))

    def make_room(self, part_size: int) -> None:
        """Have memory for partial results of so many numbers each."""
        self._part_size = max(self._part_size, part_size)
        if self._found.parts * self._part_size > self._parts.shape[0]:
            self._parts = torch.empty(self._found.parts * self._part_size)
        self.read_by_c.parts = self._parts.data_ptr()


def plans() -> bool:
    """Whether there is a `DecodePlan` here: wherever any dtype is attended to."""
    return _library(torch.float32) is not None


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
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.attend_decode.argtypes = (ctypes.POINTER(_Batch), ctypes.c_int)
        to = number, pointer, pointer, pointer
        library.plan_decode.argtypes = (ctypes.POINTER(_Lengths), *to, ctypes.POINTER(_Sizes))
        library.attend_decode.restype = library.plan_decode.restype = None
    return library
