"""Calls of C functions, many by one, by `_calls.c` if it compiles: from Python each costs about a microsecond."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from kernels.common.compiled import compiled

_MOST = 9
"""Arguments, as in the C source."""
_FUNCTION: Any = ctypes.CFUNCTYPE(None).__base__
"""What all functions of C libraries are instances of."""
_NUMBERS = (ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)
Call = Callable[[], Any]


class _Call(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("may_fail", ctypes.c_int64),
        ("arguments", ctypes.c_int64 * _MOST),
    )


def together(calls: list[Call]) -> list[Call]:
    """The same calls in their order; neighbours that C can make are one, which returns 1 where one of them fails."""
    if _library() is None:
        return calls
    made: list[Call] = []
    for is_of_c, neighbours in groupby(calls, _is_of_c):
        some = list(neighbours)
        made += [_Neighbours(some)] if is_of_c else some
    return made


class _Neighbours:
    """Calls that C makes. What their arguments point at stays."""

    def __init__(self, calls: list[Any]) -> None:
        self._held = calls
        self._calls = (_Call * len(calls))(*map(_as_c_has_it, calls))
        self._make: Any = partial(_library().make_calls, self._calls, len(calls))

    def __call__(self) -> int:
        return self._make()


def _is_of_c(call: Any) -> bool:
    """Whether it is one of a function of a C library, with arguments that `_calls.c` can pass."""
    function = getattr(call, "func", None)
    if not isinstance(function, _FUNCTION) or function.restype not in (None, ctypes.c_int):
        return False
    kinds = function.argtypes or ()
    return len(kinds) == len(call.args) <= _MOST and all(
        kind in _NUMBERS or isinstance(value, ctypes.Structure) for kind, value in zip(kinds, call.args, strict=True)
    )


def _as_c_has_it(call: Any) -> _Call:
    function = ctypes.cast(call.func, ctypes.c_void_p).value
    numbers = (ctypes.addressof(x) if isinstance(x, ctypes.Structure) else int(x or 0) for x in call.args)
    return _Call(function, call.func.restype is not None, (ctypes.c_int64 * _MOST)(*numbers))


@cache
def _library() -> Any:
    library = compiled(Path(__file__).with_name("_calls.c"), needs=(frozenset(),))
    if library is not None:
        library.make_calls.argtypes = (ctypes.POINTER(_Call), ctypes.c_int64)
        library.make_calls.restype = ctypes.c_int
    return library
