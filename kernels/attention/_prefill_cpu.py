"""Attention of many queries a sequence on the CPU by `_prefill.c`: fp32 or bf16, over keys of the same or of 8 bits.

Not taken, so that torch does it: gradients, fp16, and head dims that are not a multiple of 8 or above 256. Arithmetic
is fp32, but that products of bf16 are pairs where the processor has such (AVX-512 BF16, AMX): probabilities, and keys
and values of 8 bits, are rounded to bf16 then, as on a GPU.

Legend: T queries of all sequences, Hq query heads, Hkv key/value heads, d head dim, B sequences, S prompts.
"""

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention._cached_rows import CachedRows, values_of_codes
from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call
from kernels.common.floats_cpu import DTYPES, NEEDS, is_plain

_QUERIES = 64
"""Of one task, as in the C source."""
_EVERY_KEY = 2**31 - 1
"""A window that hides none."""
_CODES = 2
"""What C calls 8-bit numbers."""
_CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tasks", "page", "window", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("tables", "sequences", "owners", "firsts")),
    )


class _Cached(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "slot", "head")),
        *((name, ctypes.c_void_p) for name in ("rows", "scales")),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("plan", ctypes.POINTER(_Plan)),
        *((name, ctypes.c_int64) for name in ("dtype", "heads", "kv_heads", "d", "q_token", "q_head")),
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("k", _Cached),
        ("v", _Cached),
        ("values", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class PrefillPlan:
    """The same for every layer of a step."""

    def __init__(self, sequences: np.ndarray, tables: np.ndarray, page_size: int, window: int | None) -> None:
        """sequences [S, 4] int64: row of the tables, first query, queries, length; tables [B, …] int32."""
        queries, length = sequences[:, 2:].T
        tasks = -(-queries // _QUERIES)
        owners = np.repeat(np.arange(len(sequences)), tasks)
        firsts = (np.arange(len(owners)) - (np.cumsum(tasks) - tasks)[owners]) * _QUERIES
        keys = (length - queries)[owners] + firsts
        longest_first = np.argsort(-keys, kind="stable")
        self._held = tables, np.ascontiguousarray(sequences), owners[longest_first], firsts[longest_first]
        self.read_by_c = _Plan(
            len(owners), page_size, _EVERY_KEY if window is None else min(window, _EVERY_KEY),
            tables.strides[0] // tables.itemsize, *(array.ctypes.data for array in self._held),
        )  # fmt: skip


def takes(q: Tensor, k: CachedRows, v: CachedRows) -> bool:
    """Whether `attend_prefill` does q [T, Hq, d] over these."""
    return (
        is_plain(q)
        and q.shape[2] % 8 == 0
        and q.shape[2] <= 256
        and all(_reads(x, q.dtype) for x in (k, v))
        and _library() is not None
    )


def _reads(cached: CachedRows, dtype: torch.dtype) -> bool:
    rows, scales = cached
    if scales is None:
        return rows.dtype == dtype and rows.stride(-1) == 1
    return rows.dtype in _CODE_DTYPES and rows.stride(-1) == 1 and scales.is_contiguous()


def attend_prefill(
    q: Tensor, k: CachedRows, v: CachedRows, plan: PrefillPlan, out: Tensor, scale: float, soft_cap: float | None
) -> None:
    """Write the attention of the planned queries into out [T, Hq, d], contiguous; `takes` must accept the tensors."""
    _, heads, d = q.shape
    values = None if k.scales is None else values_of_codes(k.rows.dtype)
    batch = _Batch(
        ctypes.pointer(plan.read_by_c), DTYPES[q.dtype], heads, k.rows.shape[1], d, *q.stride()[:2],
        q.data_ptr(), out.data_ptr(), _read_by_c(k), _read_by_c(v), None if values is None else values.data_ptr(),
        scale / math.log(2), 0 if soft_cap is None else soft_cap / math.log(2),
    )  # fmt: skip
    call(_library().attend_prefill, batch, torch.get_num_threads())


def _read_by_c(cached: CachedRows) -> _Cached:
    rows, scales = cached
    kind = DTYPES[rows.dtype] if scales is None else _CODES
    return _Cached(kind, *rows.stride()[:2], rows.data_ptr(), None if scales is None else scales.data_ptr())


@cache
def _library() -> Any:
    return load(Path(__file__).with_name("_prefill.c"))


def load(source: Path) -> Any:
    """The compiled library; None where it cannot be had."""
    library = compiled(source, needs=NEEDS)
    if library is not None:
        library.attend_prefill.argtypes = (ctypes.POINTER(_Batch), ctypes.c_int)
        library.attend_prefill.restype = ctypes.c_int
        library.permit_tiles.argtypes, library.permit_tiles.restype = (), ctypes.c_int
        library.permit_tiles()
    return library
