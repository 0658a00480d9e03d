"""What one device does not hold is not measured there: the stage ends all the same, and everybody is told."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from pipeline.report.page import render
from pipeline.run_folder import RunFolder
from pipeline.stages.evaluate import run as evaluate
from pipeline.stages.gqa import run as gqa
from pipeline.stages.mod import run as mod
from pipeline.stages.shared import training
from tests.pipeline.test_sharded import STAGES, TRAINING
from tests.pipeline.tiny_run import run_stages


def too_large(*_: Any, **__: Any) -> NoReturn:
    raise torch.OutOfMemoryError("8 GiB wanted")


def test_parity_and_speed_of_what_does_not_fit_are_left_out_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((gqa, "measure_decoding"), (mod, "measure_prefill"), (evaluate, "measure_speed")):
        monkeypatch.setattr(module, name, too_large)
    for module in (training, evaluate):
        monkeypatch.setattr(module, "check_parity", too_large)
    stages = [{name: TRAINING | STAGES[name] | {"tokens": 512}} for name in ("gqa", "mod")]
    asked = {"model": "narrow", "against": "teacher", "data": "text", "held_out_tokens": 512}
    results = run_stages(tmp_path, *stages, {"evaluate": asked}, serve="narrow")[-3:]
    assert all(result.passed and result.parity is None for result in results)
    assert [bool(result.output) for result in results] == [True, True, False]
    unknown = [[sentence.partition(" is not known")[0] for sentence in result.skipped] for result in results]
    assert unknown == [
        ["Parity of narrow", "Decoding speed"],
        ["Parity of routed", "Speed of prefill and decoding"],
        ["Parity of teacher", "Parity of narrow", "Speed"],
    ]
    page = render(RunFolder(tmp_path / "run").recipe(), results, {})
    assert all(sentence in page for result in results for sentence in result.skipped)
    assert page.count("not measured") == 7
