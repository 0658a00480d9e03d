"""Where the tests run: natively on a GPU if there is one, else Triton's kernels go through its interpreter."""

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined; it has no effect on kernels imported before.
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.interpreter import quicken

    quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Let the collector walk no more over what was imported: a trainer calls it, and it took half of many tests."""
    gc.collect()
    gc.freeze()
