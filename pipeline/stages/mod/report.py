"""The report's section on mixture of depths: what it cost, what it saves and by which clock, who skips what."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report.charts import WIDTH, Bar, bar_chart, figure
from pipeline.report.table import html_table, speed
from pipeline.results import ModelReport, Result

_GAINS = ("prefill", "decoding")
_COLUMNS = ("held-out text", "loss", "KL to the parent", "tokens selected")


def mixture_of_depths(results: Sequence[Result]) -> str:
    """HTML of every stage `mod` that finished, several of them side by side first; empty without one."""
    lines = ways_to_route(results)
    side_by_side = f"<h2>Ways to route</h2>{html_table(lines)}" if lines else ""
    return side_by_side + "".join(_stage(result) for result in results if result.kind == "mod")


def ways_to_route(results: Sequence[Result]) -> list[list[str]]:
    """A line for each stage `mod`, beginning with the headings: what it routes and trains, what that cost and saved.

    None with fewer than two of them.
    """
    own = [result for result in results if result.kind == "mod"]
    if len(own) < 2:
        return []
    lines = [["model", "routed", "trained", "loss", "to the parent's", "at random", "operations", *_GAINS]]
    for result in own:
        details, (parent, _, after) = result.details, result.models
        loss, flops = _numbers(after)[0], details["flops"]
        lines.append(
            [
                after.label,
                f"{details['route']} of {len(details['layers'])} layers",
                details["train"],
                f"{loss:.3f}",
                f"{(loss / _numbers(parent)[0] - 1) * 100:+.1f} %",
                f"{_kept(details['random']['trained'])[0]:.3f}",
                f"{flops['executed'] / flops['parent']:.3f}×",
                *_gains(details.get("speeds")),
            ]
        )
    return lines


def _gains(speeds: Mapping[str, Any] | None) -> list[str]:
    """By the clock, beside the parent: prefill, and decoding at the largest batch."""
    if speeds is None or not all(speeds["decoding"].values()):
        return ["–"] * len(_GAINS)
    before, after = speeds["prefill"].values()
    slow, fast = speeds["decoding"].values()
    most = max(slow, key=int)
    return [f"{after / before:.2f}×", f"{fast[most] / slow[most]:.2f}× ({most} at once)"]


def routing_lines(result: Result) -> list[list[str]]:
    """Lines of the table, beginning with its headings; none for other stages."""
    if result.kind != "mod":
        return []
    details = result.details
    parent, before, after = result.models
    realised = _mean(details["realised"])
    rows = [
        _line(parent.label, _numbers(parent), "all"),
        _line("converted", _numbers(before), f"{details['capacity']:.3f}"),
        _line("converted, at random", _kept(details["random"]["converted"]), f"{details['capacity']:.3f}"),
        _line(f"{after.label}, trained", _numbers(after), f"{realised:.3f}"),
        _line(f"{after.label}, at random", _kept(details["random"]["trained"]), f"{realised:.3f}"),
    ]
    return [list(_COLUMNS), *rows]


def _line(name: str, numbers: tuple[float, float | None], selected: str) -> list[str]:
    loss, kl = numbers
    return [name, f"{loss:.3f}", "" if kl is None else f"{kl:.3f}", selected]


def _numbers(row: ModelReport) -> tuple[float, float | None]:
    quality = row.quality
    if quality is None:
        return 0.0, None
    return quality.nll.value, quality.kl.value if quality.kl else None


def _kept(quality: Mapping[str, Any]) -> tuple[float, float | None]:
    """The same of a quality that was kept among the details."""
    return quality["nll"]["value"], quality["kl"]["value"] if quality["kl"] else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _stage(result: Result) -> str:
    details = result.details
    charts = [*_speeds(details.get("speeds")), _capacities(details)]
    return (
        f"<h2>Mixture of depths: {escape(result.stage)}</h2><p>{escape(_summary(result))}</p>"
        f"{html_table(routing_lines(result))}"
        '<p class="note">At random: the same weights, with as many tokens selected by chance.</p>'
        f'<div class="charts bars">{"".join(charts)}</div>{_picture(details)}'
    )


def _summary(result: Result) -> str:
    """Loss beside the parent's, operations beside the target, and the clock."""
    details, flops = result.details, result.details["flops"]
    parent, _, after = result.models
    losses = [row.quality.nll.value for row in (parent, after) if row.quality]
    skipped = {"attention": "skip the attention", "mlp": "skip the MLP", "block": "skip all"}[details["route"]]
    sentence = f"In {len(details['layers'])} layers, tokens that the router does not select {skipped}. "
    if len(losses) == 2:
        sentence += f"The held-out loss is {(losses[1] / losses[0] - 1) * 100:+.1f} % of the parent's. "
    sentence += (
        f"In a text of {flops['context']:,} tokens, one takes {flops['executed'] / 1e6:.0f} million operations in the "
        f"layers, {flops['executed'] / flops['target']:.3f} times the target and "
        f"{flops['executed'] / flops['parent']:.3f} times the parent's. "
        f"Thresholds as learned would select {_mean(details['learned']):.3f} of the tokens, calibrated ones select "
        f"{_mean(details['realised']):.3f} (target {details['capacity']:g})."
    )
    return sentence + _clock(details.get("speeds"))


def _clock(speeds: Mapping[str, Any] | None) -> str:
    if speeds is None:
        return ""
    parent, ours = speeds["prefill"].values()
    gains = [f"{ours / parent:.2f}× in prefill of {speeds['prefill_tokens']:,} tokens"]
    before, after = speeds["decoding"].values()
    gains += [f"{after[size] / before[size]:.2f}× decoding {size} at once" for size in before]
    return f" By the clock, beside the parent: {', '.join(gains)}."


def _capacities(details: Mapping[str, Any]) -> str:
    bars = [
        Bar(f"layer {layer}", share, f"{share:.3f}")
        for layer, share in zip(details["layers"], details["realised"], strict=True)
    ]
    return bar_chart(f"Part of the held-out tokens that each layer selects; target {details['capacity']:g}", bars)


def _speeds(speeds: Mapping[str, Any] | None) -> list[str]:
    if speeds is None:
        return []
    charts = [_speed_chart(f"Prefill of {speeds['prefill_tokens']:,} tokens", speeds["prefill"])]
    for size in next(iter(speeds["decoding"].values())):
        title = f"Decoding, {size} at once, {speeds['context_tokens']:,} tokens in the cache each"
        charts.append(_speed_chart(title, {name: points[size] for name, points in speeds["decoding"].items()}))
    return charts


def _speed_chart(title: str, by_model: Mapping[str, float]) -> str:
    return bar_chart(title, [Bar(name, value, f"{speed(value)} tokens/s") for name, value in by_model.items()])


def _picture(details: Mapping[str, Any]) -> str:
    """The text, each token darker the more layers select it, above a map of layers and tokens."""
    picture = details["picture"]
    tokens, rows = picture["tokens"], picture["selected"]
    shares = [sum(row[place] == "1" for row in rows) / len(rows) for place in range(len(tokens))]
    text = "".join(
        f'<span style="background: hsl(210 80% 50% / {0.6 * share:.2f})" title="{share * len(rows):.0f} of {len(rows)} '
        f'routed layers">{escape(token)}</span>'
        for token, share in zip(tokens, shares, strict=True)
    )
    width, height = WIDTH / max(len(tokens), 1), 9
    cells = [
        f'<rect x="{place * width:.2f}" y="{number * height}" width="{width:.2f}" height="{height - 1}" '
        f'fill="hsl(210 80% 50%)"><title>layer {layer}: {escape(repr(tokens[place]))}</title></rect>'
        for number, (layer, row) in enumerate(zip(details["layers"], rows, strict=True))
        for place, chosen in enumerate(row)
        if chosen == "1"
    ]
    layers = f"layers {details['layers'][0]} (top) to {details['layers'][-1]}"
    chart = figure(f"Who passes where: {layers}, tokens from left to right", cells, box=(WIDTH, len(rows) * height))
    return (
        f'<div class="card"><pre style="white-space: pre-wrap">{text}</pre><p class="note">Held-out text; the more '
        f'routed layers select a token, the darker it is.</p></div><div class="charts">{chart}</div>'
    )
