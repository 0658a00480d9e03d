"""Which models are on the front, in a run's report and of several runs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.recipe import parse_recipe, recipe_to_yaml
from pipeline.report.charts import Point
from pipeline.report.front import Candidate, candidates_of, compare_sections, front_of, front_section
from pipeline.report.table import collect_rows
from pipeline.results import ModelReport
from tests.pipeline.test_report import make_result, quality, structure_of
from tests.pipeline.tiny_run import TinyRun

TEACHER = Candidate("teacher", 1000, 10.0, 0.02, 4.0)
SMALL = Candidate("small", 400, 10.2, 0.01, 2.0)
RUINED = Candidate("ruined", 500, 30.0, 0.03, 5.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1))
def test_no_other_beats_what_is_on_the_front(places: list[tuple[int, int]]) -> None:
    points = [Point(str(number), float(x), float(y)) for number, (x, y) in enumerate(places)]
    front = {(point.x, point.y) for point in front_of(points)}
    beaten = {
        (one.x, one.y)
        for one in points
        if any(other.x <= one.x and other.y <= one.y and (other.x, other.y) != (one.x, one.y) for other in points)
    }
    assert front == {(point.x, point.y) for point in points} - beaten


def test_the_sentence_names_what_gives_most() -> None:
    section = front_section([TEACHER, RUINED, SMALL])
    assert section.text == "small takes 0.40× the memory of teacher and has 2.00× its speed, at 1.020× its perplexity."
    assert [row[0] for row in section.tables[0].rows] == ["teacher ★", "ruined", "small ★"]
    assert [chart.title.split()[-1] for chart in section.charts] == ["memory", "latency", "cost"]
    assert "No model is within 5% of teacher's perplexity" in front_section([TEACHER, RUINED]).text


def test_a_speed_that_nobody_measured_is_left_out() -> None:
    section = front_section([TEACHER, replace(SMALL, seconds_per_token=None, cost=None)])
    assert [chart.title for chart in section.charts] == ["Quality against memory"]
    assert "speed" not in section.text and section.tables[0].rows[1][3] == "–"
    assert not front_section([TEACHER]).tables


def test_models_of_a_run_and_what_they_cost(finished_run: TinyRun) -> None:
    plain = finished_run.folder.recipe()
    recipe = parse_recipe(recipe_to_yaml(plain), ["serve.price_per_hour=3.6"])
    results = finished_run.folder.results(plain)
    [(data, candidates)] = candidates_of(recipe, results).items()
    assert data == recipe.data["text"]
    teacher, *others = candidates
    assert teacher.name == "teacher" and not any(one.name.endswith("before") for one in candidates)
    pair = next(one for one in others if "verified" in one.name)
    assert pair.perplexity == teacher.perplexity and pair.weight_bytes > teacher.weight_bytes
    fastest = {row.label: max(row.speed, key=lambda one: one.batch_size) for row in collect_rows(results) if row.speed}
    assert teacher.cost == pytest.approx(3.6 / 3600 * 1e6 / fastest["teacher"].tokens_per_s)


def test_text_with_stored_distributions_is_the_same_text() -> None:
    """And a pair is as good as its verifier, whichever model is measured first."""
    recipe = parse_recipe(
        """
        name: x
        models: {m: {from: y}}
        data: {text: {source: z}}
        stages:
          - sft: {model: m, data: text, tokens: 1k, out: tuned}
          - precompute: {model: m, data: text, out: told}
          - distill: {teacher: m, student: {from: m}, data: told, tokens: 1k, out: student}
        """
    )
    pair = ModelReport("student verified by m", 1, 2, 3, replace(quality(None), perplexity=1.5), exact=True)
    results = [
        make_result(stage="01-sft", models=(ModelReport("m", 1, 2, 3, quality(None)),)),
        make_result(stage="03-distill", models=(ModelReport("student", 1, 2, 3, quality(0.5)), pair)),
    ]
    [candidates] = candidates_of(recipe, results).values()
    assert [one.name for one in candidates] == ["m", "student", "student verified by m"]
    assert candidates[-1].perplexity == 1.5


def test_one_teacher_in_two_runs_is_one_model(finished_run: TinyRun) -> None:
    recipe = finished_run.folder.recipe()
    run = recipe, finished_run.folder.results(recipe)
    alone, together = (compare_sections(runs)[0].tables[0].rows for runs in ({"a": run}, {"a": run, "b": run}))
    assert alone == together


def test_the_command_prints_and_draws(
    finished_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, folder = tmp_path / "compare.html", finished_run.folder.path
    assert main(["compare", str(folder), str(folder), "--out", str(page)]) == 0
    assert "What each model gives" in capsys.readouterr().out
    text = structure_of(page.read_text(encoding="utf-8")).text
    assert "Quality against memory" in text and f"{folder}: teacher" in text
    assert "What each model gives" in structure_of(finished_run.folder.report.read_text(encoding="utf-8")).text
