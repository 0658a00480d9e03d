"""What the Python side of C kernels over rows of floats shares: which tensors and processors they take.

The C side is `floats.h`.
"""

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What C calls them."""
NEEDS = frozenset({"avx2", "fma"})


def is_plain(x: Tensor) -> bool:
    """Whether C can read x where it lies: on the CPU, in one of `DTYPES`, the last dimension without gaps."""
    return x.is_cpu and x.dtype in DTYPES and x.stride(-1) == 1
