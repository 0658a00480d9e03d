"""report.html: what a run made and what it cost, on one page that needs no network and no script.

The page is built from files alone (recipe.yaml, each result.json, each metrics.jsonl), so it can be made again at any
time, also of a run that stopped half-way.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from pipeline.measure.gates import describe
from pipeline.recipe import recipe_to_yaml
from pipeline.report.charts import Bar, Series, bar_chart, line_chart
from pipeline.report.style import CSS
from pipeline.report.table import collect_rows, columns, count, duration, size, speed
from pipeline.results import Answer, ModelReport, Result, write_atomically
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe
from pipeline.stages.gqa.report import grouped_heads
from pipeline.stages.mod.report import mixture_of_depths
from pipeline.stages.pretrain.report import training_compute
from pipeline.stages.qlora.report import adapters

CURVES = (
    ("loss", "Training loss", "nats a token"),
    ("kl", "KL to the teacher", "nats a token"),
    ("acceptance", "1 − TV (acceptance)", "fraction"),
    ("agreement", "Top-1 agreement", "fraction"),
    ("cross_entropy", "Cross-entropy on the text", "nats a token"),
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


def render(recipe: Recipe, results: Sequence[Result], curves: dict[str, list[dict[str, float]]]) -> str:
    """The page as text. `curves` maps a stage's name to its logged rows."""
    rows = collect_rows(results)
    sections = [
        _header(recipe, results),
        _tiles(rows),
        _models(rows),
        _before_and_after(rows),
        training_compute(results, curves),
        grouped_heads(results),
        adapters(results),
        mixture_of_depths(results),
        *(_training(stage, logged) for stage, logged in curves.items()),
        _speed(rows),
        _conversation([answer for result in results for answer in result.answers]),
        _gates(results),
        _lineage(recipe, results),
        _environment(results),
        _recipe(recipe),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(recipe.name)} – potstill</title><style>{CSS}</style></head><body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n<footer>Made by potstill from the files of the run. Hover over a curve to read its values.</footer>"
        "</main></body></html>\n"
    )


def _header(recipe: Recipe, results: Sequence[Result]) -> str:
    done, planned = len(results), len(recipe.plan())
    state = "complete" if done == planned else f"{done} of {planned} stages finished"
    if not all(result.passed for result in results):
        state = "stopped at a gate"
    spent = sum(result.cost.seconds for result in results)
    when = f", last stage finished {escape(results[-1].finished_at)}" if results else ""
    return f"<header><h1>{escape(recipe.name)}</h1><p>{state}; {duration(spent)} of work{when}</p></header>"


def _tiles(rows: list[ModelReport]) -> str:
    """The four numbers that say whether the run was worth it."""
    by_label = {row.label: row for row in rows}
    pair = next((row for row in rows if row.exact), None)
    students = [row for row in rows if row.quality and row.quality.kl and not row.exact and row.speed]
    teacher = next((row for row in rows if row.quality and not row.quality.kl and not row.exact), None)
    if not students or teacher is None:
        return ""
    student = students[-1]
    before = by_label.get(f"{student.label}, before")
    tiles = [(f"{teacher.weight_bytes / student.weight_bytes:.2f}×", f"smaller than {teacher.label}")]
    if student.quality and student.quality.kl:
        was = f", {before.quality.kl.value:.2f} before" if before and before.quality and before.quality.kl else ""
        tiles.append((f"{student.quality.kl.value:.2f}", f"KL to {teacher.label}, nats a token{was}"))
    if student.quality and student.quality.acceptance:
        tiles.append(
            (f"{student.quality.acceptance.value:.2f}", f"1 − TV: drafted tokens {teacher.label} would accept")
        )
    for row in (student, pair):
        if row and row.speed and teacher.speed:
            gain = row.speed[0].tokens_per_s / teacher.speed[0].tokens_per_s
            tiles.append((f"{gain:.2f}×", f"the speed of {teacher.label}: {row.label}"))
    cells = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in tiles)
    return f'<section class="tiles">{cells}</section>'


def _models(rows: list[ModelReport]) -> str:
    if not rows:
        return ""
    shown = columns(rows)
    head = "".join(f'<th title="{escape(column.meaning)}">{escape(column.heading)}</th>' for column in shown)
    body = "".join(
        f"<tr><th>{escape(row.label)}</th>"
        + "".join(f"<td>{escape(column.cell(row))}</td>" for column in shown)
        + "</tr>"
        for row in rows
    )
    measured = sorted({row.quality.tokens for row in rows if row.quality})
    notes = [f"Quality on {' and '.join(f'{tokens:,}' for tokens in measured)} held-out tokens."] if measured else []
    if any(row.exact for row in rows):
        notes.append(
            "A verified pair has its verifier's own distribution by construction; it costs both models' memory."
        )
    return (
        f'<h2>Models</h2><div class="card scroll"><table><thead><tr><th>model</th>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="note">{escape(" ".join(notes))}</p>'
    )


def _before_and_after(rows: list[ModelReport]) -> str:
    """Bars for each student that was measured before and after training."""
    charts = []
    by_label = {row.label: row for row in rows}
    for before in rows:
        label = before.label.removesuffix(", before")
        after = by_label.get(label)
        if label == before.label or after is None or not before.quality or not after.quality:
            continue
        for name, title in (("kl", "KL to the teacher"), ("acceptance", "1 − TV"), ("agreement", "Top-1 agreement")):
            pair = [getattr(row.quality, name) for row in (before, after)]
            if all(pair):
                bars = zip((before, after), pair, (2, 1), strict=True)
                charts.append(
                    bar_chart(title, [Bar(row.label, one.value, _with_margin(one), color) for row, one, color in bars])
                )
    note = "Held-out text; ± is the 95 % confidence interval, from the spread between batches."
    return _section("Before and after training", note, charts, kind="bars")


def _training(stage: str, logged: list[dict[str, float]]) -> str:
    charts = []
    for name, title, unit in CURVES:
        if name == "loss" and _points(logged, "loss") == _points(logged, "kl"):
            continue  # the loss is the divergence itself
        lines = [Series("training", _points(logged, name)), Series("held out", _points(logged, HELD_OUT + name), True)]
        lines = [line for line in lines if line.points]
        charts.append(line_chart(title, lines, x_label="tokens", y_label=unit, from_zero=name != "cross_entropy"))
    return _section(f"Training: {stage}", "", charts)


def _speed(rows: list[ModelReport]) -> str:
    charts = []
    sizes = sorted({point.batch_size for row in rows for point in row.speed})
    for batch_size in sizes:
        bars = []
        for row in (row for row in rows if row.same_shape_as is None):
            for point in row.speed:
                if point.batch_size == batch_size:
                    bars.append(Bar(row.label, point.tokens_per_s, speed(point.tokens_per_s), 3 if row.exact else 1))
        requests = "one request" if batch_size == 1 else f"{batch_size} requests at once"
        charts.append(bar_chart(f"Tokens a second, {requests}", bars))
    note = "New tokens a second by the serving engine, prompts included, greedy: medians of turns that alternate."
    return _section("Speed", note, charts, kind="bars")


def _conversation(answers: Sequence[Answer]) -> str:
    if not answers:
        return ""
    talks = []
    for prompt in dict.fromkeys(answer.prompt for answer in answers):
        given = "".join(_answer(answer) for answer in answers if answer.prompt == prompt)
        talks.append(
            f'<div class="card talk"><p class="asked">{escape(prompt)}</p><div class="answers">{given}</div></div>'
        )
    return (
        "<h2>Conversation</h2><p>Asked over HTTP. <mark>Marked</mark> tokens were proposed by the draft and accepted "
        f"by the model being served; the others are its own.</p>{''.join(talks)}"
    )


def _answer(answer: Answer) -> str:
    text = "".join(
        f"<mark>{escape(piece.text)}</mark>" if piece.drafted else escape(piece.text) for piece in answer.pieces
    )
    facts = f"{answer.tokens} tokens in {answer.seconds:.1f} s"
    if any(piece.drafted for piece in answer.pieces):
        facts += f", {answer.drafted_tokens} of them drafted"
    return f'<div><h3>{escape(answer.served)} – {facts}</h3><p class="answer">{text}</p></div>'


def _gates(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for check in result.gate:
            rows.append((result.stage, describe(check), check.passed))
        if result.parity is not None:
            parity = result.parity
            text = (
                f"trainer and server agree to {parity.max_difference:.1e} nats (tolerance {parity.tolerance:.0e}) "
                f"and in {parity.same_top * 100:.1f} % of first choices, over {parity.tokens:,} tokens"
            )
            rows.append((result.stage, text, parity.passed))
    if not rows:
        return ""
    body = "".join(
        f'<tr><th>{escape(stage)}</th><td class="text">{escape(text)}</td>'
        f'<td class="{"good" if passed else "bad"}">{"passed" if passed else "refused"}</td></tr>'
        for stage, text, passed in rows
    )
    return f'<h2>Gates</h2><div class="card scroll"><table><tbody>{body}</tbody></table></div>'


def _lineage(recipe: Recipe, results: Sequence[Result]) -> str:
    by_stage = {result.stage: result for result in results}
    body = []
    for stage in recipe.plan():
        result = by_stage.get(stage.name)
        if result is None:
            body.append(f'<tr><th>{stage.name}</th><td class="text" colspan="5">not finished</td></tr>')
            continue
        parents = ", ".join(f"{name} {digest[:12]}" for name, digest in result.parents.items()) or "–"
        trained = f"{count(result.cost.trained_tokens)} tokens" if result.cost.trained_tokens else "–"
        body.append(
            f'<tr><th>{stage.name}</th><td class="text digest">{escape(parents)}</td>'
            f'<td class="text digest">{escape((result.output or "–")[:12])}</td><td>{trained}</td>'
            f"<td>{duration(result.cost.seconds)}</td><td>{size(result.cost.peak_memory_bytes)}</td></tr>"
        )
    return (
        '<h2>Lineage</h2><div class="card scroll"><table><thead><tr><th>stage</th><th class="text">from</th>'
        '<th class="text">made</th><th>trained on</th><th>time</th><th>peak memory</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _environment(results: Sequence[Result]) -> str:
    if not results:
        return ""
    machine, versions = results[-1].hardware, results[-1].versions
    gpus = ", ".join(machine.get("gpus", ())) or "none"
    facts = {
        "processor": f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('threads')} threads",
        "memory": size(machine.get("memory_bytes", 0)),
        "GPU": gpus,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    body = "".join(f'<tr><th>{name}</th><td class="text">{escape(text)}</td></tr>' for name, text in facts.items())
    return f'<h2>Environment</h2><div class="card scroll"><table><tbody>{body}</tbody></table></div>'


def _recipe(recipe: Recipe) -> str:
    return (
        "<h2>Recipe</h2><details><summary>resolved, every default written out</summary>"
        f'<div class="card"><pre>{escape(recipe_to_yaml(recipe))}</pre></div></details>'
    )


def _section(heading: str, introduction: str, charts: Sequence[str], *, kind: str = "lines") -> str:
    charts = [chart for chart in charts if chart]
    if not charts:
        return ""
    text = f"<p>{escape(introduction)}</p>" if introduction else ""
    return f'<h2>{escape(heading)}</h2>{text}<div class="charts {kind}">{"".join(charts)}</div>'


def _with_margin(estimate: Any) -> str:
    return f"{estimate.value:.3f}" + (f" ± {estimate.margin:.3f}" if estimate.margin is not None else "")


def _points(logged: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
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
