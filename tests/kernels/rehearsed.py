"""Rehearse and compile kernels for a GPU that is not there: run as `python -m tests.kernels.rehearsed`.

Prints a line of JSON: variants noted, noted again after compiling them, and whether what was drawn is token 0.
"""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from kernels.common.rehearsal import Rehearsal
from kernels.sampling.random import Stream
from kernels.sampling.sample import Filters, sample_tokens
from tests.native_compile import compile_instead_of_launching


def draw() -> Tensor:
    rows, vocabulary = 4, 512
    stream = Stream(*(torch.ones(rows, dtype=torch.int64) for _ in range(3)))
    filters = Filters(torch.ones(rows), torch.full([rows], 8), torch.ones(rows), torch.zeros(rows))
    return sample_tokens(torch.randn(rows, vocabulary), filters, stream)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    assemble = CUDABackend.make_cubin
    compile_instead_of_launching(90)
    CUDABackend.make_cubin = assemble

    def at_grid(self: JITFunction, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.run(*args, grid=grid, warmup=True, **options)

    JITFunction.__getitem__ = at_grid
    noted, tokens = [], []
    rehearsal = Rehearsal()
    for _ in range(2):
        with rehearsal.noted():
            tokens.append(draw().tolist())
        noted.append(rehearsal.num_noted)
        rehearsal.compile()
    print(json.dumps({"noted": noted, "tokens": tokens}))


if __name__ == "__main__":
    main()
