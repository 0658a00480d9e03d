"""Where the tests run: natively on a GPU if there is one, else Triton's kernels go through its interpreter."""

import gc
import os

import pytest
import torch

from tests import trials

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined; it has no effect on kernels imported before.
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.interpreter import quicken

    quicken()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--recorded-graphs", action="store_true", help="engines' tests run on the path of CUDA graphs too")
    parser.addoption("--all-trials", action="store_true", help="try promises as often as `make soak` does")


def pytest_configure(config: pytest.Config) -> None:
    trials.in_full = config.getoption("--all-trials")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        _skip(items, "gpu", "needs an NVIDIA GPU")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Let the collector walk no more over what was imported: a trainer calls it, and it took half of many tests."""
    gc.collect()
    gc.freeze()
