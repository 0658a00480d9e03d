"""Devices, their dtypes, and the processes of a run: chosen and named here, for training, measuring and serving.

Whatever comes after takes a `torch.device` and asks no further. torch is imported by what needs it, so that a process
knows its rank before that.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Rank:
    """One process among those that a launcher (accelerate, torchrun) started together."""

    index: int
    """0 is the main one."""
    local: int
    """Among those of the same machine: the number of its GPU."""
    count: int


def this_rank() -> Rank:
    """This process's; the only one where no launcher said otherwise."""
    index, local, count = (int(os.environ.get(name, default)) for name, default in _LAUNCHED)
    return Rank(index, local, count)


_LAUNCHED = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))


def has_gpu() -> bool:
    """Whether computation goes to a GPU where nobody says otherwise; a launcher can ask for the CPU."""
    import torch

    asks_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    return torch.cuda.is_available() and not asks_for_cpu


def gpus() -> list[Any]:
    """Properties of every GPU of this machine: `name`, `total_memory` and so on."""
    import torch

    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def choose_device(name: str = "auto") -> "torch.device":
    """The device of that name; `auto` is this process's GPU, or the CPU without one.

    A GPU with a number becomes the current one: kernels are launched on the current device, wherever their tensors
    are. Raises ValueError for what is no device or is not there.
    """
    import torch

    if name == "auto":
        rank = this_rank()
        name = "cpu" if not has_gpu() else "cuda" if rank.count == 1 else f"cuda:{rank.local}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f'device must be "auto", "cpu" or "cuda", not {name!r}') from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs for torch")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, device: "torch.device") -> "torch.dtype":
    """The dtype of that name; `auto` is bf16 where the device multiplies it fast, else fp32. Raises ValueError."""
    import torch

    if name == "auto":
        return training_dtype("bf16", on_gpu=device.type == "cuda")
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    return getattr(torch, name)


def training_dtype(precision: str, *, on_gpu: bool) -> "torch.dtype":
    """What matrix products are in at this precision, "bf16" or "fp32".

    A CPU without bf16 instructions takes up to eighty times as long in bf16, so there it is fp32 either way.
    """
    import torch

    fast = on_gpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if precision == "bf16" and fast else torch.float32
