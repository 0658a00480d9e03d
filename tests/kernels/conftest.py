"""Every kernel test runs with uninitialised memory full of NaN, so that nothing unwritten can pass as a result."""

from collections.abc import Iterator

import pytest
import torch

from kernels.common.triton_support import interpreted


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its kin return NaN (torch.utils.deterministic.fill_uninitialized_memory)."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where Triton kernels run in a test: on the GPU, or on the CPU through the interpreter."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with interpreted():
        yield torch.device("cpu")
