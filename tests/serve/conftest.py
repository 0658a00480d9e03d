"""`--recorded-graphs`: what makes engines runs through the path of CUDA graphs as well (recorded_graphs.py)."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from serve.engine import engine, ranks
from tests import trials
from tests.ranks import FollowerThread
from tests.serve.recorded_graphs import recorded_graphs

ENGINES = {"make_engine", "Engine", "LLM"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.config.getoption("--recorded-graphs") or not hasattr(metafunc.module, "make_engine"):
        return
    if not ENGINES.isdisjoint(names_reached(metafunc.function)):
        metafunc.parametrize("_graphs", [False, True], ids=["launched", "recorded"], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without those that are not to run again, whole tests or single rows of them; of many rows each runs one way."""
    items[:] = [item for item in items if not (is_recorded(item) and item.get_closest_marker("eager"))]
    if not trials.in_full:
        left_out = set(other_ways(items))
        items[:] = [item for item in items if item not in left_out]


def is_recorded(item: pytest.Item) -> bool:
    return (
        isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.callspec.params.get("_graphs", False)
    )


def other_ways(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """What need not run of tests with several rows: of each row the way that its values have been tried more often.

    So every row runs, every test both ways, and every value both ways where two rows have it. A break of one way shows
    in any row that takes it; what takes one row's values and one way together, `--all-trials` finds.
    """
    tests: dict[Any, dict[Any, dict[bool, pytest.Item]]] = defaultdict(lambda: defaultdict(dict))
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "_graphs" in item.callspec.params:
            row = tuple((name, repr(value)) for name, value in item.callspec.params.items() if name != "_graphs")
            tests[item.parent, item.originalname][row][is_recorded(item)] = item
    for rows in tests.values():
        both = {row: ways for row, ways in rows.items() if len(ways) == 2}
        tried = Counter[Any]()
        for row, ways in both.items() if len(both) > 1 else ():
            way = min(ways, key=lambda way: (sum(tried[way, value] for value in row), tried[way]))
            tried.update([way, *((way, value) for value in row)])
            yield ways[not way]


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
