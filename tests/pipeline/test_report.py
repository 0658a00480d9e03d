"""The report: one page, no network, nothing unescaped, numbers where the eye looks for them."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from pipeline.recipe import parse_recipe
from pipeline.report.charts import MAX_POINTS, Bar, Bars, Lines, Point, Points, Series, sheet, short, ticks
from pipeline.report.page import read_metrics, render, section_html
from pipeline.report.section import Cell, Section, Table
from pipeline.report.table import collect_rows, columns, count, duration, models_section, size
from pipeline.report.terminal import print_sections, terminal_table
from pipeline.results import Answer, Cost, Estimate, ModelReport, Piece, Quality, Result, SpeedPoint, pieces_of
from tests.pipeline.tiny_run import TinyRun

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Structure(HTMLParser):
    """Every tag is closed in order; no tag loads anything."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe", "object", "base"}
        for name, value in attributes:
            assert name not in {"src", "href", "srcset", "action"} and not name.startswith("on")
            assert "url(" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in {"line", "rect", "circle", "polyline"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def structure_of(page: str) -> Structure:
    parsed = Structure()
    parsed.feed(page)
    assert parsed.open == []
    assert not re.search(r"https?://|@import", page)
    return parsed


def test_the_report_of_a_run(finished_run: TinyRun) -> None:
    text = structure_of(finished_run.folder.report.read_text(encoding="utf-8")).text
    headings = (
        "Before and after training",
        "KL to the teacher",
        "Tokens a second, 2 requests at once",
        "Lineage",
        "Environment",
    )
    for words in (*headings, "01-distill", "trainer and server agree", "held out", "student verified by teacher"):
        assert words in text
    assert "complete; " in text


def test_every_chart_is_wellformed_svg(finished_run: TinyRun) -> None:
    page = finished_run.folder.report.read_text(encoding="utf-8")
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) >= 9
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert list(root.iter("title")) and root.get("aria-label")


EVIL = "<script>alert(1)</script>&\"'<img src=x onerror=alert(2)>"


def make_result(**changes: object) -> Result:
    fields = {
        "stage": "01-conversation", "kind": "conversation", "key": "k", "parents": {EVIL: "d" * 64}, "output": None,
        "models": (ModelReport(EVIL, 10, 20, 30),), "cost": Cost(1.0, 1), "gate": (), "versions": {"torch": EVIL},
        "hardware": {"processor": EVIL}, "finished_at": EVIL,
        "answers": (Answer(EVIL, EVIL, (Piece(EVIL, True), Piece(EVIL, False)), 2, 1, 0.1),),
    }  # fmt: skip
    return Result(**(fields | changes))  # type: ignore[arg-type]


def test_nothing_from_a_model_or_a_user_becomes_markup() -> None:
    recipe = parse_recipe("name: x\nmodels: {teacher: {from: '<b>x</b>'}}\n")
    page = render(recipe, [make_result()], {"<i>stage": [{"step": 1, "tokens": 5, "loss": 1.0}]})
    assert EVIL in structure_of(page).text
    assert "<script" not in page and "<img" not in page and "<b>x" not in page and "<i>stage" not in page


def test_the_page_and_the_terminal_show_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    """Every part of it that a terminal can show: title, cells, answers; text from a model is no markup there either."""
    answers = [Answer("[red]why", "own", (Piece("[bold]so", False),), 1, 0, 0.1)]
    table = Table([["[i]first", Cell("1.5", "good")], ["second", "2.5"]], ["row", "value"], note="measured")
    section = Section(
        "Findings", "In short.", tables=[table], charts=[Bars("t", [Bar("a", 1.0, "1")])], answers=answers
    )
    page = structure_of(section_html(section)).text
    print_sections(Console(width=60), [section, Section("Nothing", "to show")])
    shown = capsys.readouterr().out
    for words in ("Findings", "[i]first", "1.5", "second", "2.5", "row", "value", "[red]why", "[bold]so"):
        assert words in page and words in shown
    assert (
        "measured" in page
        and "measured" in shown
        and section_html(Section("Nothing", "to show")) == ""
        and "Nothing" not in shown
    )


def test_a_run_that_has_only_begun_has_a_report() -> None:
    recipe = parse_recipe("name: x\nmodels: {teacher: {from: y}}\n")
    assert "0 of 1 stages finished" in structure_of(render(recipe, [], {})).text


def test_a_cut_log_line_is_left_out_and_steps_count_once(tmp_path: "object") -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2, "total_variation": 0.25}\n{"step": 1, "held_out_kl": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2, "total_variation": 0.25, "acceptance": 0.75, "held_out_kl": 1}]
    assert read_metrics(path.with_name("missing")) == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 97, [0, 20, 40, 60, 80, 100]), (0.0, 0.003, [0, 0.001, 0.002, 0.003]),
     (-3, 4, [-4, -2, 0, 2, 4]), (6.56, 7.01, [6.5, 6.6, 6.7, 6.8, 6.9, 7.0, 7.1])],
)  # fmt: skip
def test_ticks_are_round_and_enclose_the_data(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 1e-12, -5.0, 1e15])
def test_ticks_of_a_single_value(value: float) -> None:
    found = ticks(value, value)
    assert found[0] <= value <= found[-1] and len(found) >= 2 and all(map(math.isfinite, found))


def test_lines_keep_their_ends_and_lose_what_is_not_finite() -> None:
    points = [(float(x), math.sin(x)) for x in range(10_000)] + [(10_000.0, math.nan), (10_001.0, math.inf)]
    chart = Lines("t", [Series("a", points), Series("b", [(1.0, 0.5)])], "x", "y").html()
    drawn = [line.split() for line in re.findall(r'points="([^"]*)"', chart)]
    assert [len(line) for line in drawn] == [MAX_POINTS, 1]
    assert "nan" not in chart and "inf" not in chart and chart.count('class="key"') == 2
    assert Lines("t", [Series("a", [(1.0, math.nan)])], "x", "y").html() == ""
    assert "<svg" in Lines("t", [Series("a", [(160_000.0, 1.0)])], "x", "y").html()
    assert Bars("t", []).html() == "" and "nan" not in Bars("t", [Bar("a", 0.0, "0"), Bar("b", math.nan, "?")]).html()


def test_lines_by_powers_lie_as_far_apart_as_their_ratios() -> None:
    points = [(1.0, 80.0), (2.0, 8.0), (64.0, 0.8)]
    chart = Lines("t", [Series("a", points, marked=True)], "replicas", "seconds", doubling=True).html()
    dots = [(float(x), float(y)) for x, y in re.findall(r'class="dot c1" cx="([\d.]+)" cy="([\d.]+)"', chart)]
    (left, top), (middle, between), (right, bottom) = dots
    assert right - left == pytest.approx(6 * (middle - left), abs=0.3)
    assert bottom - between == pytest.approx(between - top, abs=0.2)
    labels = re.findall(r'text-anchor="middle">(\d+)<', chart)
    assert labels == ["1", "2", "4", "8", "16", "32", "64"]
    assert "a: 80 at 1 replicas" in chart


def test_a_sheet_shows_its_charts_side_by_side_and_below_one_another() -> None:
    charts = [Lines(f"t{n}", [Series("a", [(0.0, 1.0), (1.0, n)])], "x", "y") for n in range(3)]
    root = ElementTree.fromstring(sheet(charts))
    places = [one.get("transform") for one in root if one.tag.endswith("}g")]
    x = {place.split("(")[1].split()[0] for place in places if place}
    assert len(places) == len(set(places)) == 3 and len(x) == 2
    titles = [text.text for text in root.iter() if text.get("class") == "value"]
    assert titles == ["t0", "t1", "t2"]
    _, _, width, height = map(float, root.get("viewBox", "").split())
    assert width > 2 * 560 and height > 2 * 280


def test_named_points_stand_by_powers_of_ten_and_no_name_covers_another() -> None:
    heights = {"rounded": 0.5, "searched": 0.05, "learned": 0.0499, "none": 0.0}
    chart = Points("t", [Point(name, 90.0, y) for name, y in heights.items()], "MB", "KL").html()
    dots = [float(y) for y in re.findall(r'cy="([\d.]+)"', chart)]
    grid = {text: float(y) for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', chart)}
    assert len(dots) == 3 and "none" not in chart
    assert dots[1] - dots[0] == pytest.approx(grid["0.05"] - grid["0.5"], abs=0.2)
    places = re.findall(r'class="name" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">(\w+)<', chart)
    names = {name: (float(x), float(y), side) for x, y, side, name in places}
    assert names.keys() == heights.keys() - {"none"}
    sides = {"searched": names["searched"], "learned": names["learned"]}
    assert abs(sides["searched"][1] - sides["learned"][1]) >= 13 or sides["searched"][2] != sides["learned"][2]
    assert Points("t", [Point("none", 1.0, 0.0)], "MB", "KL").html() == ""


def test_numbers_for_people() -> None:
    assert [short(value) for value in (0, 0.25, 1_000, 150_000, 2e6, 1e-5)] == [
        "0",
        "0.25",
        "1k",
        "150k",
        "2M",
        "1e-05",
    ]
    assert [count(number) for number in (7, 28_830, 134_515_008)] == ["7", "28.83 k", "134.5 M"]
    assert [size(number) for number in (7, 57_700, 269_030_016, 1.6e10)] == ["7 B", "57.7 kB", "269 MB", "16 GB"]
    assert [duration(s) for s in (0.51, 59.96, 185, 7_500)] == ["0.5 s", "60.0 s", "3 min 05 s", "2 h 05 min"]


def quality(kl: float | None) -> Quality:
    found, accepted = (None, None) if kl is None else (Estimate(kl, 0.1), Estimate(1 - kl, 0.1))
    return Quality(9, Estimate(2.0, None), 7.389, Estimate(0.9, None), found, found, accepted)


def test_later_measurements_replace_earlier_ones_in_the_table() -> None:
    first = make_result(
        models=(ModelReport("a", 1, 2, 3, quality(0.5), (SpeedPoint(1, 10.0),)), ModelReport("b", 1, 2, 3))
    )
    second = make_result(
        models=(ModelReport("a", 1, 2, 3, quality(0.25)), ModelReport("c", 1, 2, 3, quality(None), exact=True))
    )
    rows = collect_rows([first, second])
    assert [row.label for row in rows] == ["a", "b", "c"]
    cells = {column.heading: [column.cell(row) for row in rows] for column in columns(rows)}
    assert cells["KL"] == ["0.250", "–", "0"]
    assert cells["agreement"] == ["25.0 %", "–", "100 %"]
    assert cells["tokens/s ×1"] == ["10.0", "–", "–"]
    assert "accepted" not in cells  # nothing was drafted
    (table,) = models_section([first, second]).tables
    assert len(terminal_table(table, width=200).columns) == len(cells) + 1
    assert len(terminal_table(table, width=60).columns) == len(rows) + 1


def test_the_table_says_to_what_each_distance_is_where_that_differs() -> None:
    def measured(reference: str, label: str) -> Result[Any]:
        return make_result(
            models=tuple(ModelReport(one, 1, 2, 3, quality(kl)) for one, kl in ((reference, None), (label, 0.5)))
        )

    def note_of(*results: Result[Any]) -> str:
        (table,) = models_section(results).tables
        return table.note

    told = "KL, agreement and 1 − TV are to teacher, those of small to student."
    assert told in note_of(measured("teacher", "student"), measured("student", "small"))
    assert "1 − TV" not in note_of(measured("teacher", "student"), measured("teacher", "small"))


@pytest.mark.parametrize(("tokens", "few"), [((999,), True), ((1000,), False), ((999, 5000), True)])
def test_the_table_says_where_quality_stands_on_few_tokens(tokens: tuple[int, ...], few: bool) -> None:
    rows = tuple(ModelReport(str(one), 1, 2, 3, replace(quality(None), tokens=one)) for one in tokens)
    (table,) = models_section([make_result(models=rows)]).tables
    assert ("too few to tell models apart" in table.note) == few


def test_speeds_stand_in_the_measure_of_whom_they_were_timed_beside() -> None:
    """The machine was twice as fast when the teacher was timed again."""
    one, other = (
        make_result(
            models=(
                ModelReport("teacher", 1, 2, 3, speed=(SpeedPoint(1, 10.0 * drift), SpeedPoint(8, 40.0 * drift))),
                ModelReport(
                    name, 1, 2, 3, speed=(SpeedPoint(1, 16.0 * drift, beside=1.5), SpeedPoint(8, 44.0 * drift))
                ),
            )
        )
        for name, drift in (("a", 1), ("b", 2))
    )
    speeds = {row.label: [point.tokens_per_s for point in row.speed] for row in collect_rows([one, other])}
    assert speeds == {"teacher": [20.0, 80.0], "a": [30.0, 44.0], "b": [30.0, 88.0]}


def test_a_later_measurement_without_a_reference_keeps_the_distance_to_it() -> None:
    alone = replace(quality(None), perplexity=3.0)
    (row,) = collect_rows([make_result(models=(ModelReport("a", 1, 2, 3, one),)) for one in (quality(0.5), alone)])
    assert row.quality == replace(quality(0.5), perplexity=3.0)


def states(before: Quality, after: Quality) -> tuple[ModelReport, ...]:
    return (
        ModelReport("parent", 1, 2, 3, quality(None)),
        ModelReport("a, before", 1, 2, 3, before, same_shape_as="a"),
        ModelReport("a", 1, 2, 3, after),
    )


def test_a_model_before_training_is_as_fast_as_after_it() -> None:
    fast = (SpeedPoint(1, 10.0),)
    trained = make_result(models=states(quality(0.5), quality(0.25))[1:], cost=Cost(1.0, 1, trained_tokens=8))
    rows = collect_rows([trained, make_result(models=(ModelReport("a", 1, 2, 3, speed=fast),))])
    assert [row.speed for row in rows] == [fast] * 2


@pytest.mark.parametrize(("against", "before"), [("parent", "0.500"), ("teacher", "–")])
def test_states_before_and_after_are_held_against_one_reference(against: str, before: str) -> None:
    trained = make_result(models=states(quality(0.5), quality(0.25)), cost=Cost(1.0, 1, trained_tokens=8))
    again = (ModelReport(against, 1, 2, 3, quality(None)), ModelReport("a", 1, 2, 3, quality(0.875)))
    alone = (ModelReport("a", 1, 2, 3, quality(None)),)
    rows = {
        row.label: row for row in collect_rows([trained, *(make_result(models=models) for models in (again, alone))])
    }
    (kl,) = (column for column in columns(list(rows.values())) if column.heading == "KL")
    assert [kl.cell(rows[label]) for label in ("a, before", "a")] == [before, "0.875"]


def test_a_model_that_nothing_trained_has_one_state() -> None:
    rows = collect_rows([make_result(models=states(quality(0.5), quality(0.5)))])
    assert [row.label for row in rows] == ["parent", "a"]


def test_training_is_shown_against_one_reference() -> None:
    """A later stage that measures the trained model against another one is not what its training did."""
    stage = make_result(models=states(quality(0.5), quality(0.25)), cost=Cost(1.0, 1, trained_tokens=8))
    later = make_result(models=(ModelReport("a", 1, 2, 3, quality(0.875)),))
    recipe = parse_recipe("name: x\nmodels: {m: {from: y}}\n")
    page = render(recipe, [stage, later], {})
    shown = page[page.index("Before and after training") :].split("</h2>")[1]
    assert "KL to parent" in shown and "0.500" in shown and "0.250" in shown and "0.875" not in shown
    assert "worse" not in shown
    worse = replace(stage, models=states(quality(0.25), quality(0.5)))
    assert "made a worse: held-out KL 0.250 became 0.500" in render(recipe, [worse], {})
    untrained = replace(stage, cost=Cost(1.0, 1))
    assert "Before and after training" not in render(recipe, [untrained], {})


def test_pieces_spell_the_text_and_nothing_after_it() -> None:
    word = "é€"
    spelled = word.encode()
    tokens = [
        (b"a", False),
        (b"b", True),
        (spelled[:1], True),
        (spelled[1:3], False),
        (spelled[3:], False),
        (b"<end>", True),
    ]
    pieces = pieces_of(tokens, "ab" + word)
    assert "".join(piece.text for piece in pieces) == "ab" + word
    assert pieces == (Piece("a", False), Piece("b", True), Piece("é€", False))
