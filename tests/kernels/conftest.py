"""Every kernel test runs with uninitialised memory full of NaN, so that nothing unwritten can pass as a result."""

from collections.abc import Iterator

import pytest
import torch

from kernels.sampling import _draws_cpu as in_c
from tests.interpreted import interpreted


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


@pytest.fixture(params=["C", "torch"])
def sampling_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws and filters on the CPU: `_draws.c`, and torch where that does not compile."""
    if request.param == "torch":
        monkeypatch.setattr(in_c, "draws", lambda: False)
    elif not in_c.draws():
        pytest.skip("no C compiler")
