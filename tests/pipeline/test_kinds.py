"""Kinds of stages: a new one is one module and one entry of the list, and nothing else knows a kind by name."""

import ast
import json
import sys
from pathlib import Path

import pytest

import pipeline.stages
from pipeline.cli import main
from pipeline.recipe import RecipeError, load_recipe
from pipeline.stages import base
from pipeline.stages.base import KINDS, kind_of, read_result
from tests.pipeline.tiny_run import RECIPE, ROOT, TinyRun

TOY = """
from dataclasses import dataclass

from pipeline.report.section import Section, Table
from pipeline.settings import setting
from pipeline.stages.base import StageKind


@dataclass(frozen=True)
class Toy:
    model: str = setting(refers="model")
    data: str = setting(refers="data")
    scale: float = setting(2.0, range=(0.1, 10.0))
    out: str = "scaled"


@dataclass(frozen=True)
class ToyDetails:
    scale: float
    tensors: int


def mistakes(config, recipe):
    if config.scale == 1:
        yield "scale", "is 1, which changes nothing"


def sections(results, curves):
    rows = [[result.stage, f"{result.details.scale:g}", str(result.details.tensors)] for result in results]
    return [Section("Scaled models", "Toys.", tables=[Table(rows, ["stage", "scale", "tensors"])])]


def setup(config, shapes):
    from train.config import TrainingConfig
    from model.training_memory import Setup

    return Setup(shapes[config.model], TrainingConfig(tokens=512, batch_tokens=256, micro_batch_tokens=256))


def run(context):
    from model.files.checkpoint import load_model
    from model.text.tokenizer import Tokenizer
    from pipeline.stages.shared.training import write_model

    config, source = context.stage.config, context.inputs[context.stage.config.model].folder
    model = load_model(source)
    model.model.norm.weight.data.mul_(config.scale)
    digest = context.publish(lambda folder: write_model(model, Tokenizer.load(source), folder))
    return context.result(output=digest, details=ToyDetails(config.scale, len(model.state_dict())))


KIND = StageKind("toy", Toy, ToyDetails, sections, mistakes, runner=__name__)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kinds").mkdir()
    (tmp_path / "kinds" / "toy.py").write_text(TOY)
    monkeypatch.setattr(pipeline.stages, "__path__", [*pipeline.stages.__path__, str(tmp_path / "kinds")])
    monkeypatch.setattr(base, "KINDS", (*KINDS, "toy"))
    monkeypatch.delitem(sys.modules, "pipeline.stages.toy", raising=False)


@pytest.mark.usefixtures("toy")
def test_a_new_kind_is_one_file_and_one_entry(copied_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the recipe, the plan, the run, a second run, the report and the command line."""
    stages = [{"toy": {"model": "teacher", "data": "text"}}, {"evaluate": {"model": "scaled", "data": "text"}}]
    changes = [*copied_run.overrides(), f"stages={json.dumps(stages)}", "serve={model: scaled}"]
    with pytest.raises(RecipeError, match=r"stages\.0\.toy\.scale is 1, which changes nothing\."):
        load_recipe(RECIPE, [*changes, "toy.scale=1"])
    with pytest.raises(RecipeError, match="Did you mean 'scale'"):
        load_recipe(RECIPE, [*changes, "toy.scal=1"])
    assert main(["plan", str(RECIPE), *changes, "--cache", str(copied_run.home / "cache")]) == 0
    assert "01-toy" in capsys.readouterr().out
    command = ["run", str(RECIPE), *changes, "evaluate.speed.batch_sizes=[]"]
    command += ["--folder", str(copied_run.folder.path), "--cache", str(copied_run.home / "cache")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Scaled models" in shown and "01-toy" in shown
    page = copied_run.folder.report.read_text()
    assert "<h2>Scaled models</h2><p>Toys.</p>" in page and "<td>2</td>" in page
    result, before = read_result(copied_run.folder.path / "01-toy"), copied_run.finished()
    assert result is not None and result.details.scale == 2.0 and result.output
    assert main(command) == 0
    assert copied_run.finished() == before, "nothing runs a second time"


def test_kinds_are_what_the_list_says() -> None:
    for name in KINDS:
        kind = kind_of(name)
        assert kind.name == name and kind.config.__doc__ and kind.details.__doc__
    with pytest.raises(ValueError, match="no kind of stage called 'shared'"):
        kind_of("shared")


def core() -> list[Path]:
    """Everything of pipeline/ outside the kinds' own folders."""
    own = {ROOT / "pipeline" / "stages" / name for name in KINDS}
    return [path for path in (ROOT / "pipeline").rglob("*.py") if not own & set(path.parents)]


@pytest.mark.parametrize("path", core(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_else_names_a_kind(path: Path) -> None:
    """Neither by a word of its own, nor by its module, nor by the class of its settings or details."""
    classes = {cls.__name__ for kind in map(kind_of, KINDS) for cls in (kind.config, kind.details)}
    classes -= {"NoDetails", "TrainingDetails", "ModelSource"}  # of several kinds; of the recipe's `models:`
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and node.value in KINDS and path.name != "base.py":
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipeline.stages."):
            found |= {node.module} if (node.module or "").split(".")[2] in KINDS else set()
        elif isinstance(node, ast.Name) and node.id in classes:
            found.add(node.id)
    assert found <= ({"pipeline.stages.import_model.config"} if path.name in ("schema.py", "recipe.py") else set())


def test_results_of_the_first_release_open_and_are_shown(copied_run: TinyRun) -> None:
    """They call an import `teacher`, and hold details as plain data."""
    path = copied_run.folder.path / "00-teacher" / "result.json"
    raw = json.loads(path.read_text())
    assert raw["kind"] == "import_model" and raw["details"] == {}
    path.write_text(json.dumps(raw | {"kind": "teacher"}))
    result = read_result(path.parent)
    assert result is not None and result.kind == "import_model"
    before = copied_run.finished()
    assert main(copied_run.arguments()) == 0
    assert copied_run.finished() == before
    distill = json.loads((copied_run.folder.path / "01-distill" / "result.json").read_text())["details"]
    assert set(distill) == {"kept_layers", "importance", "steps", "skipped_steps"}
