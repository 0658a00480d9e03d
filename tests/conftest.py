"""Where the tests run: natively on a GPU if there is one, else Triton's kernels go through its interpreter."""

import atexit
import gc
import logging
import os
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.logging import LogCaptureHandler

from pipeline.cli import LOGGERS
from tests import compiled_before, trials

gc.disable()  # until all tests are collected: what is made until then stays

NEED_TRITON = [
    "bench/test_gpu_hour.py",
    "bench/test_gpu_parts.py",
    "bench/test_host_overhead.py",
    "bench/test_kernel_bench.py",
    "bench/test_machine_code.py",
    "kernels/test_flash_hopper.py",
    "kernels/test_flash_tiles.py",
    "kernels/test_native_compile.py",
    "kernels/test_paged_attention_triton.py",
    "kernels/test_quantized_pairs.py",
    "kernels/test_random.py",
    "kernels/test_wgmma_registers.py",
    "serve/test_warm_up.py",
]
"""Files that are about it throughout; single tests elsewhere are skipped without it (tests/interpreted.py)."""
collect_ignore: list[str] = []

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined; it has no effect on kernels imported before.
    os.environ["TRITON_INTERPRET"] = "1"
    from kernels.common.triton import has_triton

    if has_triton():
        from tests.interpreter import quicken

        quicken()
    else:
        collect_ignore = NEED_TRITON


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--recorded-graphs", action="store_true", help="engines' tests run on the path of CUDA graphs too")
    parser.addoption("--all-trials", action="store_true", help="try promises as often as `make soak` does")
    parser.addoption("--compile-again", action="store_true", help="compile all machine code, and record what passes")


def pytest_configure(config: pytest.Config) -> None:
    trials.in_full = config.getoption("--all-trials")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if collect_ignore:
        terminalreporter.line(f"left out, since Triton cannot be imported: {', '.join(collect_ignore)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(_rows_left_out(items))
    items[:] = [item for item in items if item not in left_out]
    _slow_files_first(items)
    if not torch.cuda.is_available():
        _skip([item for item in items if item.get_closest_marker("gpu")], "needs an NVIDIA GPU")
    if not (config.getoption("--compile-again") or trials.in_full):
        compiled = (item for item in items if item.get_closest_marker("machine_code"))
        _skip(filter(compiled_before.passed_before, compiled), "its machine code passed, and nothing of it has changed")


def _rows_left_out(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of tests that are marked as `covering`, by `trials.covering` over the values of their parameters."""
    tests: dict[tuple[str, bool], list[Any]] = {}
    for item in items:
        if mark := item.get_closest_marker("covering"):
            tests.setdefault((item.nodeid.partition("[")[0], mark.kwargs.get("pairs", False)), []).append(item)
    for (_, pairs), rows in tests.items():
        yield from set(rows) - set(trials.covering(rows, _values_of_pairs if pairs else _values_of))


def _values_of(item: Any) -> Iterable[Hashable]:
    return trials.by_column(item.callspec.params.values())


def _values_of_pairs(item: Any) -> Iterable[Hashable]:
    return trials.by_pairs(item.callspec.params.values())


def _slow_files_first(items: list[pytest.Item]) -> None:
    """In each of the equal parts that processes begin with, so that none is left alone with long tests at the end."""
    parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = [path for path, of in files.items() if any(item.get_closest_marker("slow") for item in of)]
    quick = [item for path, of in files.items() if path not in slow for item in of]
    ordered = list[pytest.Item]()
    for part in range(parts):
        ordered += [item for path in slow[part::parts] for item in files[path]]
        size = max(0, len(items) * (part + 1) // parts - len(ordered))
        ordered, quick = ordered + quick[:size], quick[size:]
    items[:] = ordered + quick


def _skip(items: Iterable[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    is_recorded = item.config.getoption("--compile-again") and item.get_closest_marker("machine_code")
    if is_recorded and report.when == "call" and report.passed:
        compiled_before.write_passed(item)
    return report


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands send messages to the screen of the hour, a captured one that is closed when the test is over.

    So do those that a fixture of several tests has run before this one.
    """
    root = logging.root
    level, handlers = root.level, root.handlers[:]
    _send_messages_up()
    yield
    _send_messages_up()
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers and not isinstance(handler, LogCaptureHandler):
            root.removeHandler(handler)


def _send_messages_up() -> None:
    """Of our loggers: to the root alone, as by default."""
    for logger in map(logging.getLogger, LOGGERS):
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        logger.handlers.clear()


def pytest_collection_finish() -> None:
    """Let the collector walk no more over what was imported: a trainer calls it, and it took half of many tests."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)
