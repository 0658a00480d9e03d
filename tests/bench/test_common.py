"""How results of benchmarks are kept."""

import json
from pathlib import Path

import pytest

import bench.common as common


def test_results_of_other_processors_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    for processor, figure in (("old", 1), ("new", 2), ("new", 3)):
        monkeypatch.setattr(common, "cpu_form", lambda processor=processor: processor)
        path = common.write_result_by_processor("speed", "python -m speed", {"figure": figure})
    kept = json.loads(path.read_text())["by_processor"]
    assert {processor: part["figure"] for processor, part in kept.items()} == {"old": 1, "new": 3}
    assert kept["old"]["machine"]["python"]
