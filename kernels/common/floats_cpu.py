"""What the Python side of C kernels over rows of floats shares: which tensors and processors they take.

The C side is `floats.h`.
"""

import torch
from torch import Tensor

from kernels.common.processor import Needs

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What C calls them."""
AVX2 = frozenset({"avx2", "fma", "f16c"})
NEON = frozenset({"asimd"})
NEEDS: Needs = (AVX2, NEON)
"""Of `eight_lanes.h`."""


def is_plain(x: Tensor) -> bool:
    """Whether C can read x where it lies: on the CPU, in one of `DTYPES`, the last dimension without gaps."""
    return x.is_cpu and x.dtype in DTYPES and x.stride(-1) == 1
