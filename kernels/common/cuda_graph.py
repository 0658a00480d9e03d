"""Captured work: launched once kernel by kernel, then as a whole, for a hundredth of the host's time.

A capture freezes everything but the contents of memory: shapes, addresses, numbers that Python has passed on. So what
is captured reads its inputs from tensors that stay and decides nothing on the host. On CUDA it is a CUDA graph. A CPU
has graphs of its own for passes (`kernels.common.cpu_graph`), and nothing is captured here.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

MOST_FAILURES = 3
"""Captures that may fail before no more are tried: then it is the model, not the moment."""
log = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]


class Graph(Protocol):
    """One capture."""

    def __init__(self, pool: Any) -> None:
        """`pool`: what graphs that never run at once share for their memory."""

    def capture(self, run: Callable[[], Outputs]) -> Outputs:
        """Note what `run` launches; nothing is computed. The outputs lie where each replay puts them."""
        ...

    def replay(self) -> None: ...


class CudaGraph:
    """A CUDA graph."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, run: Callable[[], Outputs]) -> Outputs:
        # Other threads of the process may call CUDA meanwhile; what they do is no part of this.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        self._graph.replay()


def graphs_on(device: torch.device) -> "Graphs | None":
    """Those of a device that can capture; else None."""
    return Graphs(CudaGraph, torch.cuda.graph_pool_handle()) if device.type == "cuda" else None


class Graphs:
    """All captures of a device, by what they were captured for; one runs at a time."""

    def __init__(self, kind: Callable[[Any], Graph], pool: Any = None) -> None:
        self._kind, self._pool = kind, pool
        self._captured: dict[Hashable, tuple[Graph, Outputs] | None] = {}
        """None: has run once."""
        self.num_failures = 0
        self.has_prepared = False
        """Whether the latest run did more than later ones of its kind will do."""
        self._are_off = False

    @property
    def num_captured(self) -> int:
        return sum(captured is not None for captured in self._captured.values())

    def run(self, key: Hashable, run: Callable[[], Outputs]) -> Outputs:
        """What `run` returns, which is captured when it runs for the second time under this key.

        The first time loads kernels and fills what is computed once, which no capture may do.
        """
        self.has_prepared = self._captured.get(key) is None
        if self._are_off:
            return run()
        if key not in self._captured:
            self._captured[key] = None
            return run()
        captured = self._captured[key] or self._capture(key, run)
        if captured is None:
            return run()
        graph, outputs = captured
        graph.replay()
        return outputs

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, whatever runs is launched kernel by kernel and does not count."""
        self._are_off = True
        try:
            yield
        finally:
            self._are_off = False

    def forget(self) -> None:
        """Whoever moves what graphs read calls this."""
        self._captured.clear()

    def _capture(self, key: Hashable, run: Callable[[], Outputs]) -> tuple[Graph, Outputs] | None:
        if self.num_failures >= MOST_FAILURES:
            return None
        graph = self._kind(self._pool)
        try:
            outputs = graph.capture(run)
        except Exception:
            self.num_failures += 1
            log.exception("a step could not be captured (%s); it is launched kernel by kernel", key)
            return None
        self._captured[key] = graph, outputs
        return graph, outputs
