"""Between host and device without a wait: uploads and downloads in the order of the stream, and the device's own time.

On CUDA an upload leaves from pinned memory and a download ends there, so neither holds up the host. On the CPU nothing
moves, and a pass is over when its call returns.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from serve.engine.drafts.length import PassCosts


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Download:
    """Tensors on their way to the host, where they are needed later."""

    def __init__(self, tensors: list[Tensor]) -> None:
        """All of one device."""
        # To the host and without blocking means into pinned memory.
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrival = None
        if any(tensor.is_cuda for tensor in tensors):
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host; the one place where the host waits for the device."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copies


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that it was asked for. Raises RuntimeError when it has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PassTimer:
    """Measures passes in the device's time and records what they cost as soon as that is known."""

    def __init__(self, costs: PassCosts, device: torch.device) -> None:
        self._costs = costs
        self._is_cuda = device.type == "cuda"
        self._measuring: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        """Passes that the device may not have finished: rows, beginning, end."""

    @contextmanager
    def measure(self, num_rows: int) -> Iterator[None]:
        """Measure what is launched within this context; a pass that raises is not recorded."""
        if not self._is_cuda:
            began = time.perf_counter()
            yield
            self._costs.record(num_rows, time.perf_counter() - began)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._measuring.append((num_rows, begin, end))
        while self._measuring and self._measuring[0][2].query():
            rows, began_at, ended_at = self._measuring.pop(0)
            self._costs.record(rows, began_at.elapsed_time(ended_at) / 1000)
