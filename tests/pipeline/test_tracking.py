"""What wandb has of a run: its own record of a whole run offline, read back; and what its users' variables change."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from pipeline.errors import UserError
from pipeline.recipe import load_recipe
from pipeline.stages.base import read_result
from pipeline.tracking import _log_artifact, summary_of, wandb_mode
from tests.pipeline.tiny_run import RECIPE, TinyRun, rerun
from train.tracking import METRICS, read_metrics

BLOCK = 32 * 1024
FILE_HEADER, RECORD_HEADER = 7, 7


def records(path: Path) -> Iterator[Any]:
    """Of a `.wandb` file: LevelDB's log format (blocks of 32 KiB, records cut at their ends) around protobuf."""
    raw, at, parts = path.read_bytes(), FILE_HEADER, b""
    while at + RECORD_HEADER <= len(raw):
        if BLOCK - at % BLOCK < RECORD_HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        parts += raw[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


class Recorded:
    """One run of wandb, as its file tells it."""

    def __init__(self, path: Path) -> None:
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.artifacts: list[Any] = []
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
            elif kind == "history":
                self.history.append(values_of(record.history.item))
            elif kind == "summary":
                self.summary |= values_of(record.summary.update)
            elif kind == "artifact":
                self.artifacts.append(record.artifact)
            elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
                self.artifacts.append(record.request.log_artifact.artifact)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


def values_of(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


@pytest.fixture(scope="module")
def tracked_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyRun, dict[str, Recorded]]:
    """A run with wandb offline, as a user's shell starts it, and what each stage's run holds."""
    tiny = TinyRun.prepare(tmp_path_factory.mktemp("tracked") / "home")
    asked = {"WANDB_PROJECT": "mine", "WANDB_RUN_GROUP": "sweep", "WANDB_RUN_ID": "abc", "WANDB_TAGS": "a,b"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (asked | {"WANDB_MODE": "offline"}).items():
            patch.setenv(name, value)
        tiny.run("tracking.wandb=online")
    found = [Recorded(path) for path in tiny.folder.path.glob("*/wandb/offline-run-*/*.wandb")]
    return tiny, {one.run.job_type: one for one in found}


def test_each_stage_is_a_run_of_one_group(tracked_run: tuple[TinyRun, dict[str, Recorded]]) -> None:
    _, found = tracked_run
    assert sorted(found) == ["distill", "evaluate", "import_model"]
    for recorded in found.values():
        run = recorded.run
        assert (run.project, run.run_group, list(run.tags), recorded.exit_code) == ("mine", "sweep", ["a", "b"], 0)
        assert run.display_name.startswith("tiny-0")
    ids = {kind: recorded.run.run_id for kind, recorded in found.items()}
    assert ids["evaluate"] == "abc" and ids["distill"] == "abc-01-distill"
    config = {item.key: json.loads(item.value_json) for item in found["distill"].run.config.update}
    assert config["learning_rate"] == 3e-3 and config["student"]["layers"] == 2


def test_what_was_logged_is_in_it(tracked_run: tuple[TinyRun, dict[str, Recorded]]) -> None:
    tiny, found = tracked_run
    steps = [line for line in found["distill"].history if "loss" in line]
    lines = [line for line in read_metrics(tiny.folder.path / "01-distill" / METRICS) if "loss" in line]
    assert [(line["step"], line["loss"]) for line in steps] == [(line["step"], line["loss"]) for line in lines]
    assert all("tokens_per_s" in line for line in steps) and len(steps) == 8


def test_results_tables_and_models_are_in_it(tracked_run: tuple[TinyRun, dict[str, Recorded]]) -> None:
    tiny, found = tracked_run
    result = read_result(tiny.folder.path / "01-distill")
    assert result is not None
    told = found["distill"].summary
    for name, value in summary_of(result).items():
        assert told[name] == pytest.approx(value), name
    assert {"teacher/perplexity", "student/kl", "passed", "parity"} <= told.keys()
    shown = found["distill"].history[-1]
    files = tiny.folder.path / "01-distill" / "wandb" / "latest-run" / "files"
    page = (files / shown["report/path"]).read_text()
    assert shown["report/_type"] == "html-file" and "<svg" in page and "2 of 3 stages finished" in page
    assert shown["Models/_type"] == "table-file"
    table = json.loads((files / shown["Models/path"]).read_text())
    assert {"teacher", "student"} <= {row[0] for row in table["data"]}
    [artifact] = (one for one in found["distill"].artifacts if one.type == "model")
    assert artifact.name == "tiny-student"
    assert {"latest", "passed", result.key[:12]} <= set(artifact.aliases)
    assert json.loads(artifact.metadata)["parents"] == dict(result.parents)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_model_is_made_from_its_parents_where_wandb_knows_them(
    is_known: bool, tracked_run: tuple[TinyRun, dict[str, Recorded]]
) -> None:
    """One that was finished before the run was tracked is unknown to it."""
    tiny, _ = tracked_run
    used, artifacts = [], []

    def use_artifact(name: str) -> None:
        used.append(name)
        if not is_known:
            raise ValueError("no such artifact")

    online = SimpleNamespace(
        offline=False, use_artifact=use_artifact, log_artifact=lambda one, aliases: artifacts.append(one.name)
    )
    stage = tiny.folder.path / "01-distill"
    result = read_result(stage)
    assert result is not None
    _log_artifact(online, tiny.folder.recipe(), stage / "model", result)
    assert (used, artifacts) == (["tiny-teacher:latest"], ["tiny-student"])


def test_nothing_runs_again_for_it(tracked_run: tuple[TinyRun, dict[str, Recorded]]) -> None:
    tiny, _ = tracked_run
    before = tiny.finished()
    tiny.run("tracking.wandb=disabled")
    assert rerun(before, tiny.finished()) == set()


@pytest.mark.parametrize(
    ("recipe_says", "variables", "mode"),
    [
        ("disabled", {"WANDB_MODE": "online"}, None),
        ("online", {}, "online"),
        ("online", {"WANDB_MODE": "dryrun"}, "offline"),
        ("offline", {"WANDB_MODE": "disabled"}, None),
        ("online", {"WANDB_DISABLED": "true"}, None),
    ],
)
def test_variables_allow_less_or_other_than_a_recipe(
    recipe_says: str, variables: dict[str, str], mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(load_recipe(RECIPE, [f"tracking.wandb={recipe_says}"])) == mode


def test_a_mode_that_is_none_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "of line")
    with pytest.raises(UserError, match="WANDB_MODE is 'of line'; it can be online, run, offline, dryrun, disabled"):
        wandb_mode(load_recipe(RECIPE, []))
