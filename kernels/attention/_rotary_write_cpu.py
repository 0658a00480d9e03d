"""Head norms, rotation and the write into pages on the CPU, by `_rotary_write.c` where that compiles: one call.

Legend: T tokens, Hq query heads, Hkv key/value heads, d head dim, P pages.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call
from kernels.common.floats_cpu import DTYPES, NEEDS, is_plain

Norms = tuple[Tensor, Tensor, float]
"""Weights [d] of queries and keys, and eps."""

_STEP = 16
"""Numbers of a head that are rotated at a time."""


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dtype", "tokens", "heads", "kv_heads", "d")),
        *(
            (name, ctypes.c_int64)
            for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "table_token")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "slots", "out", "k_pages", "v_pages")
        ),
        ("eps", ctypes.c_float),
    )


def writes(q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor], norms: Norms | None) -> bool:
    """Whether `rotate_and_write_rows` takes these: of one dtype, heads [T, H, d], pages [P, page, Hkv, d]."""
    return (
        q.shape[2] % _STEP == 0
        and all(is_plain(x) and x.dtype == q.dtype for x in (q, k, v))
        and all(x.dtype == q.dtype and x.is_contiguous() for x in pages)
        and (norms is None or norms[0].dtype == norms[1].dtype == q.dtype)
        and _library() is not None
    )


def rotate_and_write_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: tuple[Tensor, Tensor],
    slots: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    norms: Norms | None,
) -> Tensor:
    """`rotate_and_write` of what `writes` accepts."""
    (tokens, heads, d), changes_q = q.shape, rotary is not None or norms is not None
    out = q.new_empty(q.shape) if changes_q else q
    cos, sin = rotary or (None, None)
    weights = (None, None) if norms is None else norms[:2]
    tensors = q, k, v, *weights, cos, sin, slots.contiguous(), out if changes_q else None, *pages
    batch = _Batch(
        DTYPES[q.dtype], tokens, heads, k.shape[1], d, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        0 if cos is None else cos.stride(0), *(None if x is None else x.data_ptr() for x in tensors),
        0.0 if norms is None else norms[2],
    )  # fmt: skip
    call(_library().rotate_and_write, batch, torch.get_num_threads())
    return out


@cache
def _library() -> Any:
    library = compiled(Path(__file__).with_name("_rotary_write.c"), needs=NEEDS)
    if library is not None:
        library.rotate_and_write.argtypes = (ctypes.POINTER(_Batch), ctypes.c_int)
        library.rotate_and_write.restype = None
    return library
