"""A rank that follows: `python -m serve.engine.follower --rank N --socket FD --meeting-point FILE --options JSON`.

It holds a part of the model and of every KV page, and computes the passes that rank 0 names, on both. It draws nothing
and answers nobody; when rank 0's side of the socket is closed it leaves, even amid a sum that will never be complete.
"""

import argparse
import os
import select
import signal
import socket
import threading
import traceback
from collections import deque
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from model.collectives import Grid
from model.kv_format import choose_kv_format
from model.mesh import choose_device
from serve.config import EngineConfig
from serve.engine.kv_cache import PAGE_SIZE
from serve.engine.loading import count_pages, load_part
from serve.engine.pass_inputs import Step
from serve.engine.rank_messages import (
    Allocate,
    Begun,
    Copy,
    End,
    Failed,
    Loaded,
    Logits,
    Meet,
    Met,
    Run,
    ToFollower,
    next_order,
    tell,
)
from serve.engine.ranks import grid_of
from serve.engine.runner import Runner
from serve.messages import ProtocolError


class Follower:
    """Does what rank 0 says, in its order."""

    def __init__(self, config: EngineConfig, grid: Grid) -> None:
        """Loads its part; ValueError or OSError when that cannot be done."""
        models = load_part(config, grid)
        self._grid = grid
        self._launched: deque[tuple[Step, Tensor]] = deque()
        """Passes that end in this stage, which is the first, and have not ended yet."""
        self._model, self._device = models.target, models.device
        self._kv_format = choose_kv_format(config.kv_cache_dtype, models.dtype, models.cache_scales)
        self.num_pages = count_pages(config, models, models.kv_bytes_per_token(self._kv_format.dtype))

    @torch.inference_mode()
    def do(self, order: ToFollower) -> None:
        """Raises whatever a pass raises."""
        match order:
            case Allocate(num_pages, num_rows, most_tokens):
                sizes = {"num_rows": num_rows, "most_tokens": most_tokens}
                pages = self._kv_format.allocate(self._model.config, num_pages, PAGE_SIZE, self._device, **sizes)
                feed = torch.zeros(1, 1, dtype=torch.int64, device=self._device)  # nothing that is told looks into it
                self._runner = Runner(self._model, pages, feed=feed, back=self._grid.back)
            case Run(arrays, sampled):
                parts = [None if array is None else array.numpy() for array in arrays]
                step = Step._make([*parts, sampled])
                hidden = self._runner.launch(step)
                if self._grid.stage.index == 0:
                    self._launched.append((step, hidden))
                if self._grid.stage.count == 1:
                    self._end()
            case End():
                self._end()
            case Logits(start, stop):
                self._runner.logits(self._hidden, start, stop)
            case Copy(copies):
                self._runner.copy_pages(copies)

    def _end(self) -> None:
        self._hidden, _ = self._runner.complete(*self._launched.popleft())


def follow(connected: socket.socket, rank: int, config: EngineConfig, meeting_point: Path) -> None:
    """Meet the others, load, and do what rank 0 says; raises EOFError or OSError when it is gone."""
    grid = grid_of(config, rank)
    tell(connected, Begun())
    if not isinstance(next_order(connected), Meet):
        raise ProtocolError("the first order is not to meet")
    grid.join(meeting_point, choose_device(config.device))
    tell(connected, Met())
    try:
        follower = Follower(config, grid)
    except (ValueError, OSError) as error:
        tell(connected, Failed(str(error)))
        return
    tell(connected, Loaded(follower.num_pages))
    while True:
        follower.do(next_order(connected))


def is_left(connected: socket.socket, timeout_ms: int | None) -> bool:
    """Whether the other side of the socket is closed, now or within the timeout; None: waits for it."""
    poll = select.poll()
    poll.register(connected, select.POLLRDHUP)
    return bool(poll.poll(timeout_ms))


def leave_with(connected: socket.socket) -> None:
    """End this process when rank 0 has left; in a thread of its own, since the others may wait in a sum."""
    is_left(connected, None)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="serve.engine.follower")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--socket", type=int, required=True, help="number of a file that this process has inherited")
    parser.add_argument("--meeting-point", type=Path, required=True)
    parser.add_argument("--options", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 says when to leave
        signal.signal(number, signal.SIG_IGN)
    connected = socket.socket(fileno=arguments.socket)
    threading.Thread(target=leave_with, args=(connected,), daemon=True).start()
    config = EngineConfig(**msgspec.json.decode(arguments.options))
    try:
        follow(connected, arguments.rank, config, arguments.meeting_point)
    except Exception:
        if not is_left(connected, 0):  # else whatever waited for rank 0 fails
            traceback.print_exc()
            os._exit(1)
    # What torch would take down at the end of Python may still wait for ranks that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
