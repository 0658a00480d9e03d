"""What every Triton kernel here shares: when it runs, and what the interpreter needs.

Kernels run on CUDA tensors. Within `interpreted()` they also run on CPU tensors, slowly, through Triton's interpreter:
that is how the tests check them on machines without a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from kernels.common.triton import has_triton, tl, triton

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)


@contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on CPU tensors within this context.

    Raises RuntimeError unless TRITON_INTERPRET=1 was set before the kernels were imported: Triton decides then.
    """
    if not has_triton() or not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before Python starts, to run Triton kernels on the CPU")
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def runs_triton(x: Tensor) -> bool:
    """Return whether work on `x` goes to a Triton kernel."""
    return x.is_cuda or (_interpreting.get() and x.device.type == "cpu")


def is_interpreted(x: Tensor) -> bool:
    """Return whether a kernel on `x` is interpreted: `tl.dot` then needs its bf16 operands cast to fp32."""
    return not x.is_cuda


@triton.jit
def in_fp32(number):
    """A float as Triton launches a kernel with it. torch.compile passes it in fp64, which spreads to tiles it meets."""
    return tl.cast(number, tl.float32)


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; a few for the interpreter, so that persistent loops do loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def l2_bytes(device: torch.device) -> int:
    """Return the size of the cache that all processors share; a small one for the interpreter, so that it gets full."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 12


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's generation, as NVIDIA counts them; that of an H100 for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Return how much shared memory one program may use; as on an H100 for the interpreter."""
    if device.type != "cuda":
        return 227 * 1024
    # Each program takes 1 KiB more than it asks for.
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024


def lend_scratch(device: torch.device) -> None:
    """Let the next launch take memory from torch for the tensor descriptors that a kernel builds."""
    if device.type == "cuda":
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))


def check_rows(**tensors: Tensor) -> None:
    """Raise ValueError unless each tensor is fp32, bf16 or fp16 and contiguous in its last dimension."""
    for name, x in tensors.items():
        if x.dtype not in FLOAT_TYPES:
            raise ValueError(f"{name} is {x.dtype}; Triton kernels take float32, bfloat16 and float16")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension; its strides are {x.stride()}")
