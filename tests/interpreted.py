"""Triton's kernels on the CPU, in a test; and what is skipped where there is no Triton."""

from contextlib import AbstractContextManager

import pytest

from kernels.common import triton_support
from kernels.common.triton import has_triton

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton")


def interpreted() -> AbstractContextManager[None]:
    if not has_triton():
        pytest.skip("needs Triton")
    return triton_support.interpreted()
