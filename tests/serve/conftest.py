"""`--recorded-graphs`: what makes engines runs a second time, through the path of CUDA graphs (recorded_graphs.py)."""

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from serve.engine import engine, ranks
from tests.ranks import FollowerThread
from tests.serve.recorded_graphs import recorded_graphs

ENGINES = {"make_engine", "Engine", "LLM"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.config.getoption("--recorded-graphs") or not hasattr(metafunc.module, "make_engine"):
        return
    if not ENGINES.isdisjoint(names_reached(metafunc.function)):
        metafunc.parametrize("_graphs", [False, True], ids=["launched", "recorded"], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without those that are not to run again, whole tests or single rows of them."""
    items[:] = [item for item in items if not (is_recorded(item) and item.get_closest_marker("eager"))]


def is_recorded(item: pytest.Item) -> bool:
    return (
        isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.callspec.params.get("_graphs", False)
    )


@pytest.fixture(autouse=True)
def _graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", False):
        monkeypatch.setattr(engine, "graphs_on", lambda device: recorded_graphs())


@pytest.fixture
def follower_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers of an engine that start at once."""
    monkeypatch.setattr(ranks, "FollowerProcess", FollowerThread)


def names_reached(test: Callable[..., Any]) -> set[str]:
    """All names that a test uses, and that functions of the tests do which it calls."""
    given = getattr(test, "hypothesis", None)
    waiting = [inspect.unwrap(test if given is None else given.inner_test)]
    reached, seen = set[str](), set[Callable[..., Any]]()
    while waiting:
        function = waiting.pop()
        seen.add(function)
        names = set(names_of(function.__code__))
        called = [function.__globals__.get(name) for name in names]
        ours = {one for one in called if isinstance(one, FunctionType) and one.__module__.startswith("tests.")}
        waiting += ours - seen
        reached |= names
    return reached


def names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_of(inner)
