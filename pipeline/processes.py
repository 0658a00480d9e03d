"""One process or several that run the same recipe: who writes, and how all of them take the same turn.

Under `accelerate launch` or `torchrun` every process runs the whole recipe. The main one measures, publishes and
decides; the others train with it and wait for it otherwise. They share the run folder through the file system.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator

WAIT_S = 24 * 3600
"""How long the others wait for the main process, which may tokenize or measure for hours."""


class Processes:
    """This process's place among all of them. One process needs no group, and no accelerate until it trains."""

    def __init__(self) -> None:
        self._accelerator: Accelerator | None = None
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.is_main = int(os.environ.get("RANK", "0")) == 0

    @property
    def accelerator(self) -> "Accelerator":
        """Made on first use; with several processes this joins the group."""
        if self._accelerator is None:
            from datetime import timedelta

            import torch
            from accelerate import Accelerator
            from accelerate.utils import InitProcessGroupKwargs

            patience = InitProcessGroupKwargs(timeout=timedelta(seconds=WAIT_S))
            self._accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])
        return self._accelerator

    def agree(self, value: int) -> int:
        """The main process's number, in every process; also a barrier."""
        if self.count == 1:
            return value
        import torch
        from torch.distributed import broadcast

        number = torch.tensor([value], dtype=torch.int64, device=self.accelerator.device)
        broadcast(number, src=0)
        return int(number.item())

    def wait(self) -> None:
        """Returns when every process has come here."""
        self.agree(0)

    def close(self) -> None:
        """Leaves the group, so that the interpreter can end without complaint."""
        if self._accelerator is not None and self.count > 1:
            self._accelerator.end_training()
