"""Calls of C functions that C makes one after another."""

import ctypes
from functools import partial
from typing import Any

import pytest

import kernels.common.calls_cpu as module
from kernels.common.calls_cpu import together

pytestmark = pytest.mark.skipif(module._library() is None, reason="no C compiler")
KINDS = (ctypes.c_int, ctypes.c_void_p, *(ctypes.c_int64,) * 6, ctypes.c_int)


class Pair(ctypes.Structure):
    _fields_ = (("one", ctypes.c_int64), ("other", ctypes.c_int64))


def noting(seen: list[Any], answer: int = 0, kinds: tuple[Any, ...] = KINDS) -> Any:
    """A C function that notes its arguments."""

    def note(*arguments: Any) -> int:
        seen.append(arguments)
        return answer

    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(note)


def test_each_finds_its_arguments_in_their_order() -> None:
    seen: list[Any] = []
    all_kinds = noting(seen)
    one, none = noting(seen, kinds=(ctypes.c_int64,)), noting(seen, kinds=())
    (made,) = together(
        [partial(all_kinds, True, None, 2**40, -3, 4, 5, 6, 7, -8), partial(one, -(2**50)), partial(none)]
    )
    assert made() == 0 and made() == 0
    assert seen == 2 * [(1, None, 2**40, -3, 4, 5, 6, 7, -8), (-(2**50),), ()]


def test_structures_are_passed_where_they_lie() -> None:
    seen: list[tuple[int, int]] = []

    def read(pair: Any) -> None:
        seen.append((pair.contents.one, pair.contents.other))

    pair = Pair(3, 4)
    (made,) = together([partial(ctypes.CFUNCTYPE(None, ctypes.POINTER(Pair))(read), pair)])
    made()
    pair.one = 5
    assert made() == 0
    assert seen == [(3, 4), (5, 4)]


def test_nothing_is_called_behind_what_fails() -> None:
    seen: list[Any] = []
    right, wrong = noting(seen, kinds=(ctypes.c_int,)), noting(seen, answer=-1, kinds=(ctypes.c_int,))
    (made,) = together([partial(right, 1), partial(wrong, 2), partial(right, 3)])
    assert made() == 1 and seen == [(1,), (2,)]


def test_what_python_or_too_many_arguments_take_stays_apart() -> None:
    seen: list[Any] = []
    one, floats = noting(seen, kinds=(ctypes.c_int,)), noting(seen, kinds=(ctypes.c_float,))
    many = noting(seen, kinds=(ctypes.c_int,) * 10)
    calls = [partial(one, 1), partial(one, 2), partial(seen.append, 3), partial(floats, 4.5), partial(many, *range(10))]
    made = together([*calls, partial(one, 6)])
    assert len(made) == 5
    for call in made:
        call()
    assert seen == [(1,), (2,), 3, (4.5,), tuple(range(10)), (6,)]
