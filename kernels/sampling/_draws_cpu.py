"""Random words, the race for a token, the best one and the threshold of top-p on the CPU, by `_draws.c` if it compiles.

Legend: N rows, V numbers a row.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call
from kernels.common.floats_cpu import is_plain


class _Stream(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("seeds", "choices", "positions")),
        ("purpose", ctypes.c_int64),
    )


def draws() -> bool:
    """Whether the functions below run on this machine."""
    return _library() is not None


def draw_words(stream: tuple[Tensor, Tensor, Tensor], count: int, purpose: int) -> Tensor:
    """The words 0 … count − 1 of each row, [N, count] int64, of (seeds, choices, positions), [N] each."""
    stream = _rows(stream)
    out = torch.empty(len(stream[0]), count, dtype=torch.int64)
    call(_library().draw_words, _at(stream, purpose), *out.shape, out.data_ptr())
    return out


def race(probabilities: Tensor, stream: tuple[Tensor, Tensor, Tensor], purpose: int) -> Tensor:
    """The first argmax(p / e) of each row, [N] int64, of probabilities [N, V] fp32 and the stream's draws e."""
    probabilities, stream = probabilities.contiguous(), _rows(stream)
    tokens = torch.empty(len(probabilities), dtype=torch.int64)
    arguments = *probabilities.shape, tokens.data_ptr(), torch.get_num_threads()
    call(_library().race, probabilities.data_ptr(), _at(stream, purpose), *arguments)
    return tokens


def ranks(scores: Tensor) -> bool:
    """Whether `first_best` takes these."""
    return is_plain(scores) and draws()


def first_best(scores: Tensor) -> Tensor:
    """The first largest of each row, [N] int64, of scores [N, V]; −1 where it is not finite, or a score is NaN."""
    tokens = torch.empty(len(scores), dtype=torch.int64)
    where = scores.data_ptr(), scores.dtype == torch.bfloat16, scores.stride(0) * scores.itemsize
    call(_library().first_best, *where, *scores.shape, tokens.data_ptr(), torch.get_num_threads())
    return tokens


def least_kept(scores: Tensor, weights: Tensor, limits: Tensor) -> Tensor:
    """The least score of each row, [N, 1], above which scores of less weight than the limit are.

    Scores and weights [N, V] fp32, the weights of a row sum to 1; limits [N] below 1.
    """
    scores, weights, limits = scores.contiguous(), weights.contiguous(), limits.float().contiguous()
    out = torch.empty(len(scores), 1, dtype=torch.float32)
    pointers = scores.data_ptr(), weights.data_ptr(), limits.data_ptr()
    call(_library().least_kept, *pointers, *scores.shape, out.data_ptr(), torch.get_num_threads())
    return out


def _rows(stream: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    seeds, choices, positions = stream
    return seeds.long().contiguous(), choices.long().contiguous(), positions.long().contiguous()


def _at(stream: tuple[Tensor, Tensor, Tensor], purpose: int) -> _Stream:
    return _Stream(*(x.data_ptr() for x in stream), int(purpose))


@cache
def _library() -> Any:
    library = compiled(Path(__file__).with_name("_draws.c"), needs=(frozenset(),))
    if library is not None:
        number, pointer, stream = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(_Stream)
        library.draw_words.argtypes = (stream, number, number, pointer)
        library.race.argtypes = (pointer, stream, number, number, pointer, ctypes.c_int)
        library.least_kept.argtypes = (pointer, pointer, pointer, number, number, pointer, ctypes.c_int)
        library.first_best.argtypes = (pointer, ctypes.c_int, number, number, number, pointer, ctypes.c_int)
        library.least_kept.restype = ctypes.c_int
        library.draw_words.restype = library.race.restype = library.first_best.restype = None
    return library
