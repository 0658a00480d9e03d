"""An x86 processor with AVX2 and no more, as far as kernels and torch can tell.

    pytest -p tests.masked tests/kernels tests/model          # their C forms and torch's operators without AVX-512

To be imported before kernels are; processes that are started behind it see the whole processor again.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kernels.common import compiled, processor

FEATURES = ("avx", "avx2", "f16c", "fma", "sse4_1", "sse4_2", "ssse3")
"""Of those that the machine has, what is left: that of a Haswell, of 2013."""


def _for_haswell(run: Callable[..., str], *command: str) -> str:
    return run(*("-march=haswell" if word == "-march=native" else word for word in command))


with tempfile.NamedTemporaryFile("w", prefix="cpuinfo-", delete=False) as masked:
    masked.write(f"flags : {' '.join(sorted(processor.processor_features() & set(FEATURES)))}\n")
processor._CPUINFO = Path(masked.name)
compiled._run = partial(_for_haswell, compiled._run)
os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
