"""The comparison with TRL, with our side standing in for the peer's as well."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.train.gkd import __main__ as driver
from bench.train.gkd import potstill
from bench.train.sides import Case
from model.files.checkpoint import save_model
from pipeline.measure.quality import HeldOut
from tests.bench.test_quantize import tokens
from tests.tiny import tiny_config, tiny_model
from train.packing import Batch


@pytest.fixture
def case(tmp_path: Path) -> Case:
    found = Case(tmp_path, 16, sequences=2, steps=4, warm_up=0)
    found.prepare("teacher", tiny_config())
    save_model(tiny_model(seed=3), tmp_path / "student")
    return found


def test_every_sequence_is_trained_on_once(case: Case) -> None:
    sequences, documents = driver.in_order(case), case.documents().tokens.reshape(-1, 17)
    assert sorted(sequences) == sorted(documents.tolist()) and sequences != documents.tolist()


def test_equal_sides_are_equally_good(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run_side(interpreter: str, module: str, told: dict[str, Any]) -> dict[str, Any]:
        ran.append((interpreter, module))
        path = Path(f"{told['out']}.json")
        path.write_text(json.dumps(told))
        monkeypatch.setattr(sys, "argv", ["potstill", str(path)])
        potstill.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1]) | {"peak_bytes": 1}

    monkeypatch.setattr(driver, "run_side", run_side)
    ids = torch.tensor(tokens(80))
    ends = torch.tensor([0, 80], dtype=torch.int32)
    held_out = HeldOut((Batch(ids, torch.arange(80), ends, labels=ids, num_labels=80, num_bytes=80),))
    found = driver.compare({"potstill": "one", "trl": "other"}, case, held_out)
    assert ran == [("one", "bench.train.gkd.potstill"), ("other", "bench.train.gkd.trl")]
    assert found["ratio_kl"] == 1 and found["sides"]["trl"]["kl"] < found["kl_before"]
    assert len(found["sides"]["potstill"]["losses"]) == 4 and found["trained_tokens"] == 128
