"""Kernels compiled side by side, before they are needed.

Triton compiles a kernel when it is first launched, one after another, while everybody waits. A rehearsal goes through
the same code with nothing launched that is not compiled yet, so that it takes no time; then all of it is compiled at
once, in as many threads as there are processors, for Triton's passes and assembler run without Python's lock.
"""

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from kernels.common.cpu_graph import UNFILLED
from kernels.common.triton import triton

REPORT_EVERY_S = 5.0
log = logging.getLogger(__name__)


class zeroed(TorchDispatchMode):
    """What is made without contents holds zeros: tokens that no kernel has drawn are tokens all the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in UNFILLED else result


class Rehearsal:
    """Notes kernels in place of launching them, and compiles them."""

    def __init__(self) -> None:
        self._noted: dict[tuple[Any, str], None] = {}
        """Kernels and what Triton says of a variant of theirs, each once, in the order of the launches."""

    @property
    def num_noted(self) -> int:
        return len(self._noted)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within, kernels that are not compiled yet are noted and compute nothing; what they fill holds zeros."""
        runtime = triton.knobs.runtime
        before, runtime.jit_cache_hook = runtime.jit_cache_hook, self._note
        try:
            with zeroed():
                yield
        finally:
            runtime.jit_cache_hook = before

    def _note(self, *, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        """As Triton asks before it compiles; True: neither compile nor launch."""
        self._noted[fn.jit_function, compile["specialization_data"]] = None
        return True

    def compile(self) -> None:
        """Compile all that was noted, and say how far it is and how long it will take. Raises what Triton raises."""
        began = said = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiling = [threads.submit(kernel.preload, variant) for kernel, variant in self._noted]
            for number, one in enumerate(as_completed(compiling), 1):
                one.result()
                now = time.monotonic()
                if now - said >= REPORT_EVERY_S or number == len(compiling):
                    left = (now - began) / number * (len(compiling) - number)
                    log.info("compiled %d of %d kernels, %.0f s left", number, len(compiling), left)
                    said = now
        self._noted.clear()
