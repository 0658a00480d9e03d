"""report.html: what a run made and what it cost, on one page that needs no network and no script.

The page is built from files alone (recipe.yaml, each result.json, each metrics.jsonl), so it can be made again at any
time, also of a run that stopped half-way.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.files import write_atomically
from pipeline.measure.gates import describe, describe_loss, describe_parity
from pipeline.recipe import recipe_to_yaml
from pipeline.report.charts import Bar, Bars, Lines, Series
from pipeline.report.front import compare_sections, run_sections
from pipeline.report.section import Cell, Curves, Section, Table
from pipeline.report.style import CSS
from pipeline.report.table import collect_rows, count, duration, models_section, reference_of, size, speed
from pipeline.results import Answer, ModelReport, Result
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe
from pipeline.stages.base import sections_of

CURVES = (
    ("loss", "Training loss", "nats a token"),
    ("kl", "KL to the teacher", "nats a token"),
    ("acceptance", "1 − TV (acceptance)", "fraction"),
    ("agreement", "Top-1 agreement", "fraction"),
    ("cross_entropy", "Cross-entropy on the text", "nats a token"),
    ("hidden_distance", "Distance of hidden states", "2 − 2 cos, mean of layers"),
    ("learning_rate", "Learning rate", "learning rate"),
    ("gradient_norm", "Gradient norm", "before clipping"),
)
"""Logged name, title, unit of each curve, in the order of the page."""
HELD_OUT = "held_out_"
"""What the loop puts in front of the name of a quantity measured on held-out text."""


def write_report(run: RunFolder) -> Path:
    """Writes the run's report.html and returns its path. Raises UserError where there is no run."""
    recipe = run.recipe()
    results = run.results(recipe)
    write_atomically(run.report, render(recipe, results, logged_curves(run, recipe)).encode())
    return run.report


def render(recipe: Recipe, results: Sequence[Result[Any]], curves: Curves) -> str:
    """The page as text. `curves` maps a stage's name to its logged rows."""
    rows = collect_rows(results)
    sections = [
        *run_sections(recipe, results),
        models_section(results),
        _before_and_after(results),
        *sections_of(results, curves),
        *(_training(stage, logged) for stage, logged in curves.items()),
        _speed(rows),
        _gates(results),
        _lineage(recipe, results),
        _environment(results),
    ]
    parts = [_header(recipe, results), _tiles(rows), *map(section_html, sections), _recipe(recipe)]
    footer = "Made by potstill from the files of the run. Hover over a curve to read its values."
    return _page(recipe.name, parts, footer)


def compare_runs(runs: Sequence[RunFolder]) -> tuple[list[Section], str]:
    """Runs side by side, as sections and as a page. Raises UserError for a folder that is none."""
    names = [run.path.resolve().name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run.path) for run in runs]
    recipes = {name: (run, run.recipe()) for name, run in zip(names, runs, strict=True)}
    sections = compare_sections({name: (recipe, run.results(recipe)) for name, (run, recipe) in recipes.items()})
    return sections, sections_page(", ".join(names), sections)


def sections_page(title: str, sections: Sequence[Section]) -> str:
    """A page of these sections alone."""
    return _page(title, [f"<header><h1>{escape(title)}</h1></header>", *map(section_html, sections)], "")


def _page(title: str, parts: Sequence[str], footer: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – potstill</title><style>{CSS}</style></head><body><main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>{escape(footer)}</footer></main></body></html>\n"
    )


# --- a section as HTML ------------------------------------------------------------------------------------------------


def section_html(section: Section) -> str:
    """Empty for a section that has nothing to show."""
    shown = [_table(table) for table in section.tables]
    for layout, charts in groupby(section.charts, key=lambda chart: chart.layout):
        drawn = "".join(chart.html() for chart in charts)
        shown.append(f'<div class="charts {layout}">{drawn}</div>' if layout and drawn else drawn)
    shown += [_talk(prompt, section.answers) for prompt in dict.fromkeys(one.prompt for one in section.answers)]
    if not any(shown):
        return ""
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    return f"<h2>{escape(section.title)}</h2>{text}{''.join(shown)}"


def _table(table: Table) -> str:
    meanings = ["", *table.meanings] if table.meanings else [""] * len(table.head)
    titles = [f' title="{escape(meaning)}"' if meaning else "" for meaning in meanings]
    head = "".join(_cell(cell, "th", title) for cell, title in zip(table.head, titles, strict=True))
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = "".join(_row(row, max(len(table.head), len(row))) for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="card scroll"><table>{head}<tbody>{body}</tbody></table></div>{note}'


def _row(row: Sequence[str | Cell], width: int) -> str:
    first, *others = row
    spans = [""] * len(others)
    if len(row) < width:
        spans[-1] = f' colspan="{width - len(row) + 1}"'
    cells = "".join(_cell(cell, "td", span) for cell, span in zip(others, spans, strict=True))
    return f"<tr>{_cell(first, 'th')}{cells}</tr>"


def _cell(cell: str | Cell, tag: str, more: str = "") -> str:
    if isinstance(cell, Cell):
        return f'<{tag} class="{cell.look}"{more}>{escape(cell.text)}</{tag}>'
    return f"<{tag}{more}>{escape(cell)}</{tag}>"


def _talk(prompt: str, answers: Iterable[Answer]) -> str:
    given = "".join(_answer(answer) for answer in answers if answer.prompt == prompt)
    return f'<div class="card talk"><p class="asked">{escape(prompt)}</p><div class="answers">{given}</div></div>'


def _answer(answer: Answer) -> str:
    text = "".join(
        f"<mark>{escape(piece.text)}</mark>" if piece.drafted else escape(piece.text) for piece in answer.pieces
    )
    facts = f"{answer.tokens} tokens in {answer.seconds:.1f} s"
    if any(piece.drafted for piece in answer.pieces):
        facts += f", {answer.drafted_tokens} of them drafted"
    return f'<div><h3>{escape(answer.served)} – {facts}</h3><p class="answer">{text}</p></div>'


# --- sections that every run has --------------------------------------------------------------------------------------


def _header(recipe: Recipe, results: Sequence[Result[Any]]) -> str:
    done, planned = len(results), len(recipe.plan())
    state = "complete" if done == planned else f"{done} of {planned} stages finished"
    if not all(result.passed for result in results):
        state = "stopped at a gate"
    spent = sum(result.cost.seconds for result in results)
    when = f", last stage finished {escape(results[-1].finished_at)}" if results else ""
    return f"<header><h1>{escape(recipe.name)}</h1><p>{state}; {duration(spent)} of work{when}</p></header>"


def _tiles(rows: Sequence[ModelReport]) -> str:
    """The four numbers that say whether the run was worth it."""
    pair = next((row for row in rows if row.exact), None)
    students = [row for row in rows if row.quality and row.quality.kl and not row.exact and row.speed]
    teacher = next((row for row in rows if row.quality and not row.quality.kl and not row.exact), None)
    if not students or teacher is None:
        return ""
    student = students[-1]
    tiles = [(f"{teacher.weight_bytes / student.weight_bytes:.2f}×", f"smaller than {teacher.label}: {student.label}")]
    if student.quality and student.quality.kl:
        tiles.append((f"{student.quality.kl.value:.2f}", f"KL to {teacher.label}, nats a token: {student.label}"))
    if student.quality and student.quality.acceptance:
        accepted = f"1 − TV, drafted tokens {teacher.label} would accept: {student.label}"
        tiles.append((f"{student.quality.acceptance.value:.2f}", accepted))
    for row in (student, pair):
        if row and row.speed and teacher.speed:
            gain = row.speed[0].tokens_per_s / teacher.speed[0].tokens_per_s
            tiles.append((f"{gain:.2f}×", f"the speed of {teacher.label}: {row.label}"))
    cells = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in tiles)
    return f'<section class="tiles">{cells}</section>'


def _before_and_after(results: Sequence[Result[Any]]) -> Section:
    """Bars for each student that was trained, measured before and after it against the same reference."""
    charts, worse = [], []
    for result in results:
        by_label = {row.label: row for row in result.models}
        for before in result.models if result.cost.trained_tokens else ():
            after = by_label.get(before.same_shape_as or "")
            if after is None or not before.quality or not after.quality:
                continue
            charts += _bars_of(before, after, reference_of(result))
            if lost := describe_loss(before.quality, after.quality):
                worse.append(f" Training made {after.label} worse: {lost}.")
    note = "Held-out text; ± is the 95 % confidence interval, from the spread between batches."
    return Section("Before and after training", note + "".join(worse), charts=charts)


def _bars_of(before: ModelReport, after: ModelReport, reference: str) -> list[Bars]:
    charts = []
    for name, title in (("kl", f"KL to {reference}"), ("acceptance", "1 − TV"), ("agreement", "Top-1 agreement")):
        states = ((before, 2), (after, 1))
        found = [(row.label, getattr(row.quality, name, None), color) for row, color in states]
        bars = [Bar(label, one.value, _with_margin(one), color) for label, one, color in found if one]
        if len(bars) == len(states):
            charts.append(Bars(title, bars))
    return charts


def _training(stage: str, logged: Sequence[Mapping[str, float]]) -> Section:
    charts = []
    for name, title, unit in CURVES:
        if name == "loss" and _points(logged, "loss") == _points(logged, "kl"):
            continue  # the loss is the divergence itself
        lines = [Series("training", _points(logged, name)), Series("held out", _points(logged, HELD_OUT + name), True)]
        lines = [line for line in lines if line.points]
        charts.append(Lines(title, lines, "tokens", unit, from_zero=name != "cross_entropy"))
    return Section(f"Training: {stage}", charts=charts)


def _speed(rows: Sequence[ModelReport]) -> Section:
    charts = []
    for batch_size in sorted({point.batch_size for row in rows for point in row.speed}):
        bars = [
            Bar(row.label, point.tokens_per_s, speed(point.tokens_per_s), 3 if row.exact else 1)
            for row in rows
            for point in row.speed
            if row.same_shape_as is None and point.batch_size == batch_size
        ]
        requests = "one request" if batch_size == 1 else f"{batch_size} requests at once"
        charts.append(Bars(f"Tokens a second, {requests}", bars))
    note = "New tokens a second by the serving engine, prompts included, greedy: medians of turns that alternate."
    return Section("Speed", note, charts=charts)


def _gates(results: Sequence[Result[Any]]) -> Section:
    rows = []
    for result in results:
        found = [(describe(check), check.passed) for check in result.gate]
        if result.parity is not None:
            found.append((describe_parity(result.parity), result.parity.passed))
        for text, passed in found:
            verdict = Cell("passed", "good") if passed else Cell("refused", "bad")
            rows.append((result.stage, Cell(text, "text"), verdict))
        rows += [(result.stage, Cell(text, "text"), Cell("not measured", "bad")) for text in result.skipped]
    return Section("Gates", tables=[Table(rows)] if rows else [])


def _lineage(recipe: Recipe, results: Sequence[Result[Any]]) -> Section:
    by_stage = {result.stage: result for result in results}
    rows: list[Sequence[str | Cell]] = []
    for stage in recipe.plan():
        result = by_stage.get(stage.name)
        if result is None:
            rows.append((stage.name, Cell("not finished", "text")))
            continue
        parents = ", ".join(f"{name} {digest[:12]}" for name, digest in result.parents.items()) or "–"
        trained = f"{count(result.cost.trained_tokens)} tokens" if result.cost.trained_tokens else "–"
        digests = (Cell(text, "text digest") for text in (parents, (result.output or "–")[:12]))
        cost = (trained, duration(result.cost.seconds), size(result.cost.peak_memory_bytes))
        rows.append((stage.name, *digests, *cost))
    head = ("stage", Cell("from", "text"), Cell("made", "text"), "trained on", "time", "peak memory")
    return Section("Lineage", tables=[Table(rows, head)])


def _environment(results: Sequence[Result[Any]]) -> Section:
    if not results:
        return Section("Environment")
    machine, versions = results[-1].hardware, results[-1].versions
    facts = {
        "processor": f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('threads')} threads",
        "memory": size(machine.get("memory_bytes", 0)),
        "GPU": ", ".join(machine.get("gpus", ())) or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return Section("Environment", tables=[Table([(name, Cell(text, "text")) for name, text in facts.items()])])


def _recipe(recipe: Recipe) -> str:
    return (
        "<h2>Recipe</h2><details><summary>resolved, every default written out</summary>"
        f'<div class="card"><pre>{escape(recipe_to_yaml(recipe))}</pre></div></details>'
    )


# --- what was logged --------------------------------------------------------------------------------------------------


def _with_margin(estimate: Any) -> str:
    return f"{estimate.value:.3f}" + (f" ± {estimate.margin:.3f}" if estimate.margin is not None else "")


def _points(logged: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(row["tokens"], row[name]) for row in logged if name in row and "tokens" in row]


def _with_acceptance(row: dict[str, float]) -> dict[str, float]:
    """The loop logs total variation; readers think in what is left of it."""
    return row | ({"acceptance": 1 - row["total_variation"]} if "total_variation" in row else {})


def logged_curves(run: RunFolder, recipe: Recipe) -> dict[str, list[dict[str, float]]]:
    """Logged rows of each stage that trains; a step logged twice, before and after a resume, counts once."""
    curves = {}
    for stage in recipe.plan():
        rows = read_metrics(run.stage(stage) / "metrics.jsonl")
        if rows:
            curves[stage.name] = rows
    return curves


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The numbers of a metrics.jsonl by line; a line that a kill cut short is left out."""
    if not path.is_file():
        return []
    rows: dict[float, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            logged = json.loads(line)
        except json.JSONDecodeError:
            continue
        numbers = {name: value for name, value in logged.items() if isinstance(value, int | float)}
        rows.setdefault(numbers.get("step", len(rows)), {}).update(numbers)
    return [_with_acceptance(rows[step]) for step in sorted(rows)]
