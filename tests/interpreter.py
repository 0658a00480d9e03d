"""Makes Triton's interpreter two to three times faster, without changing what it computes.

At each launch it looks through all of triton.language for what to replace, and again at each call of one kernel
function by another, where all is replaced already; it builds a table of NumPy's types whenever it needs one of them;
and it computes whether integers overflow, for an assertion that is off.
"""

import inspect
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

element_type = cache(interpreter._get_np_dtype)


@cache
def builtins(namespace: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]


def patch_builtins(namespace: Any, builder: Any, scope: Any) -> None:
    for name, member in builtins(namespace):
        if getattr(namespace, name) is member:
            interpreter._patch_attr(namespace, name, member, builder, scope)


def numpy_type(dtype: tl.dtype) -> np.dtype:
    return np.dtype(np.uint64) if isinstance(dtype.scalar, tl.pointer_type) else element_type(dtype.scalar)


def quicken() -> None:
    """For the rest of the process."""
    patch, patched = interpreter._patch_lang, set[str]()

    @cache
    def languages(function: FunctionType) -> frozenset[str]:
        named = function.__globals__.values()
        return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in named))

    class Launch(interpreter._LangPatchScope):
        """What one launch replaced, until it ends."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(function: FunctionType) -> Any:
        if languages(function) <= patched:
            return None  # a function that the running kernel calls: nobody restores its scope
        patched.update(languages(function))
        return patch(function)

    interpreter._LangPatchScope = Launch
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = numpy_type
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
