"""The one Accelerator of a process: what accelerate or torchrun set up, on the device that model/mesh.py chooses.

accelerate keeps its state for the whole process and refuses a second Accelerator that asks for something else, so
training and the pipeline's barriers share this one.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from model.mesh import choose_device, this_rank

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed import ProcessGroup

OURS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
"""What a launcher says of sharding `model.mesh.training_mesh` reads. accelerate would wrap models by itself: one
alone, none on a CPU, no block of ours."""
WAIT_S = 24 * 3600
"""How long processes wait for the main one, which may tokenize or measure for hours."""


@cache
def this_accelerator() -> "Accelerator":
    """Made on first use; with several processes this joins the group. Raises ValueError for DeepSpeed or Megatron."""
    with _without(OURS):
        return _made()


@cache
def writers_group() -> "ProcessGroup | None":
    """What processes agree over while checkpoints are written behind training; None where there is one process.

    On the CPU, whatever trains; all processes make it at the same time.
    """
    if this_accelerator().num_processes == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """The environment as if the launcher had not said these."""
    said = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(said)


def _made() -> "Accelerator":
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs

    accelerator = Accelerator(
        cpu=choose_device().type == "cpu",
        mixed_precision="no",  # whatever the launcher says: a recipe's `precision` decides
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=WAIT_S)),
            # Every process has loaded the same buffers (a quantized base among them); no batch takes them along.
            # Gradients lie where they travel from, or they would be there twice.
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
    )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        kind = accelerator.distributed_type.value
        raise ValueError(f"training is replicated or sharded by FSDP; the launcher's configuration asks for {kind}")
    if accelerator.num_processes != this_rank().count:
        raise ValueError("several processes are started by `accelerate launch` or torchrun, which number them by RANK")
    return accelerator
