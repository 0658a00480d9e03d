"""`--recorded-graphs`: every engine of these tests goes through the path of CUDA graphs (recorded_graphs.py)."""

import pytest

from serve.engine import engine
from tests.serve.recorded_graphs import recorded_graphs


@pytest.fixture(autouse=True)
def _graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--recorded-graphs"):
        monkeypatch.setattr(engine, "graphs_on", lambda device: recorded_graphs())
