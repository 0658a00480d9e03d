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
from kernels.common.floats_cpu import NEEDS

_CHUNK = 256
"""Keys that one task attends to, as in the C source."""
_COLUMNS = 64
_SOURCES = {torch.bfloat16: ("_decode.c", frozenset({"avx512_bf16"})), torch.float32: ("_decode_wide.c", NEEDS)}
"""By the dtype of queries, keys and values: the C source, and what it needs."""


class _Batch(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_sequences", "num_tasks", "heads", "kv_heads", "d", "page", "window"),
                *("q_stride", "k_stride", "v_stride", "table_stride"),
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "tables", "sequences", "owners", "numbers", "parts", "out")
        ),
        ("scale", ctypes.c_float),
    )


class DecodePlan:
    """The same for every layer of a step."""

    def __init__(self, sequences: np.ndarray, block_tables: np.ndarray, page_size: int, window: int | None) -> None:
        """sequences [S, 5] int64: row of the tables, first query, queries, first key, length; tables [B, …] int32."""
        queries, first_key, length = sequences[:, 2:].T
        first_chunk = first_key // _CHUNK
        chunks = -(-length // _CHUNK) - first_chunk
        parts = np.cumsum(chunks * queries)
        owners = np.repeat(np.arange(len(sequences)), chunks)
        numbers = np.arange(len(owners)) + (first_chunk - np.cumsum(chunks) + chunks)[owners]
        sequences = np.column_stack((sequences, parts - chunks * queries))
        self.num_parts = int(parts[-1])
        self._read_by_c = block_tables, sequences, owners, numbers
        pointers = dict(zip(("tables", "sequences", "owners", "numbers"), map(_place, self._read_by_c), strict=True))
        self.batch = _Batch(
            num_sequences=len(sequences), num_tasks=len(owners), page=page_size, window=window or 0,
            table_stride=block_tables.strides[0] // block_tables.itemsize, **pointers,
        )  # fmt: skip
        """What C reads; `attend_decode` fills in what differs between layers."""


def _place(array: np.ndarray) -> int:
    return array.ctypes.data


def takes(q: Tensor, k_slots: Tensor, v_slots: Tensor) -> bool:
    """Whether `attend_decode` does q [T, Hq, d] over keys and values [slots, Hkv, d]."""
    return (
        q.dtype == k_slots.dtype == v_slots.dtype
        and q.dtype in _SOURCES
        and q.shape[2] % _COLUMNS == 0
        and all(x.stride()[1:] == (x.shape[2], 1) for x in (q, k_slots, v_slots))
        and _library(q.dtype) is not None
    )


def attend_decode(q: Tensor, k_slots: Tensor, v_slots: Tensor, plan: DecodePlan, out: Tensor, scale: float) -> None:
    """Write the attention of the planned queries into out [T, Hq, d]; `takes` must accept the tensors."""
    (_, heads, d), batch = q.shape, plan.batch
    parts = torch.empty(plan.num_parts, heads, d + 2)
    batch.heads, batch.kv_heads, batch.d, batch.scale = heads, k_slots.shape[1], d, scale / math.log(2)
    batch.q_stride, batch.k_stride, batch.v_stride = q.stride(0), k_slots.stride(0), v_slots.stride(0)
    batch.q, batch.k, batch.v = q.data_ptr(), k_slots.data_ptr(), v_slots.data_ptr()
    batch.parts, batch.out = parts.data_ptr(), out.data_ptr()
    _library(q.dtype).attend_decode(batch, torch.get_num_threads())


@cache
def _library(dtype: torch.dtype) -> Any:
    name, needs = _SOURCES[dtype]
    library = compiled(Path(__file__).with_name(name), needs=needs)
    if library is not None:
        library.attend_decode.argtypes = (ctypes.POINTER(_Batch), ctypes.c_int)
        library.attend_decode.restype = None
    return library
