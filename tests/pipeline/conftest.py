"""One finished tiny run, shared; a test that changes anything takes a copy."""

from pathlib import Path

import pytest

from tests.pipeline.tiny_run import TinyRun


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Import, distillation and evaluation, done once. Read only."""
    tiny = TinyRun.prepare(tmp_path_factory.mktemp("finished") / "home")
    tiny.run()
    return tiny


@pytest.fixture
def copied_run(finished_run: TinyRun, tmp_path: Path) -> TinyRun:
    """A copy of the finished run, to be changed."""
    return finished_run.copy(tmp_path / "run")
