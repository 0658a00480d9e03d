"""A plugin of pytest for machines that are lent for minutes: `-p tests.gpu_results --results FILE`.

Every result goes to FILE at once, a line of JSON each, and a test that has passed there, or was skipped, is not run
again. A process whose GPU has failed for good, as CUDA does after an illegal access, ends, and pytest-xdist starts
another: all tests behind it would fail.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

LEFT_S = 0.5
"""For what a process that ends has still to report."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_LOST = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True, help="where results go, and those of earlier runs are")


def results_in(path: Path) -> dict[str, dict[str, Any]]:
    """The latest result of each test, by its name, and how many tests there are, under ""."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # whoever was killed may have left a part of a line
            result = json.loads(line)
            found[result["test"]] = result
    return found


def _write(path: Path, **fields: Any) -> None:
    with open(path, "a") as results:
        results.write(json.dumps(fields) + "\n")


def _is_one_of_many(config: pytest.Config) -> bool:
    """Whether pytest-xdist started this process; who started it began before."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Decides what runs: all processes, later ones too, must collect the same tests."""
    if not _is_one_of_many(config):
        known = results_in(config.getoption("--results"))
        done = [test for test, result in known.items() if result.get("outcome") in (PASSED, SKIPPED)]
        _done_before(config).write_text(json.dumps(done))


def _done_before(config: pytest.Config) -> Path:
    path: Path = config.getoption("--results")
    return path.with_suffix(".done.json")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path, done = config.getoption("--results"), set(json.loads(_done_before(config).read_text()))
    if "" not in results_in(path):
        _write(path, test="", count=len(items))
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.when == "call" or report.failed or report.skipped:
        said = {"seconds": round(report.duration, 3), "text": str(report.longrepr)[-2000:] if report.failed else ""}
        _write(item.config.getoption("--results"), test=item.nodeid, outcome=report.outcome, **said)
    if report.failed and gpu_is_lost():
        item.config.stash[_LOST] = True
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """The last of a test that a process of xdist's says."""
    if item.config.stash.get(_LOST, False) and _is_one_of_many(item.config):
        time.sleep(LEFT_S)
        os._exit(1)


def gpu_is_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
