"""The files of train/ that a batch enters are those that train/README.md draws, and they are few."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.tiny import tiny_model
from tests.train.test_routed_training import routed_model
from tests.train.toy import toy_trainer
from train.config import Loss
from train.objectives import Distillation, LanguageModelling, Objective, RoutedTraining, RoutingConfig
from train.sampler import Sampler

ROOT = Path(__file__).resolve().parents[2]
OBJECTIVES = {
    "text": LanguageModelling(),
    "teacher": Distillation(tiny_model(seed=5), Loss()),
    "routers": RoutedTraining(LanguageModelling(), RoutingConfig(capacity=0.5)),
}


def drawn() -> set[str]:
    """The files in the drawing of a batch's path."""
    section = (ROOT / "train" / "README.md").read_text().partition("## The path of a batch")[2].partition("\n## ")[0]
    return set(re.findall(r"train/\w+\.py", section))


def entered(objective: Objective, folder: Path, optimizer: str) -> set[str]:
    """The files of train/ that the second of three steps enters, from its first piece to the next step's."""
    trainer = toy_trainer(folder, model=routed_model(), objective=objective, tokens=3 * 128, optimizer=optimizer)
    files: set[str] = set()
    steps = 0

    def enter(frame: FrameType, event: str, _: object) -> None:
        nonlocal steps
        steps += event == "call" and frame.f_code is Sampler.take.__code__
        path = Path(frame.f_code.co_filename)
        if event == "call" and steps == 2 and path.is_relative_to(ROOT / "train"):
            files.add(str(path.relative_to(ROOT)))

    sys.setprofile(enter)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    assert steps == 3
    return files


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_batch_enters_the_files_that_are_drawn(objective: Objective, optimizer: str, tmp_path: Path) -> None:
    found = entered(objective, tmp_path, optimizer)
    assert found == drawn()
    assert len(found) <= 7
