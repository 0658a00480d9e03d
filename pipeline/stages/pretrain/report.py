"""The report's section on models made from nothing: held-out loss against training, in operations and in time."""

from collections.abc import Mapping, Sequence

from pipeline.report.charts import Series, line_chart
from pipeline.report.table import count, duration, html_table
from pipeline.results import Result

Curves = Mapping[str, Sequence[Mapping[str, float]]]
"""What each stage logged, by its name."""

_COLUMNS = ("model", "parameters", "tokens", "operations", "training time", "held-out loss", "tokens selected")


def training_compute(results: Sequence[Result], curves: Curves) -> str:
    """HTML of the stages `pretrain` that finished; empty without one."""
    lines = compute_lines(results)
    if not lines:
        return ""
    return (
        "<h2>From nothing, by training compute</h2><p>Operations count forward and backward passes with the output "
        "head; of routed layers only what their capacity lets through. Losses are those of the served rule.</p>"
        f'{html_table(lines)}<div class="charts lines">{compute_chart(results, curves)}</div>'
    )


def compute_lines(results: Sequence[Result]) -> list[list[str]]:
    """Lines of the table, beginning with its headings; none without a stage `pretrain`."""
    lines = [list(_COLUMNS)]
    for result in results:
        if result.kind != "pretrain":
            continue
        (model,), cost, realised = result.models, result.cost, result.details.get("realised")
        loss = model.quality.nll if model.quality else None
        margin = f" ± {loss.margin:.3f}" if loss and loss.margin is not None else ""
        lines.append(
            [
                model.label,
                count(model.parameters),
                count(cost.trained_tokens),
                f"{result.details['training_flops']['total']:.3g}",
                duration(cost.training_seconds),
                f"{loss.value:.3f}{margin}" if loss else "",
                f"{sum(realised) / len(realised):.3f} in {len(realised)} layers" if realised else "all",
            ]
        )
    return lines if len(lines) > 1 else []


def compute_chart(results: Sequence[Result], curves: Curves, *, alone: bool = False) -> str:
    """The held-out loss of each model on its way, as SVG; `alone` as in `line_chart`. Empty if nothing was logged."""
    series = []
    for result in results:
        if result.kind == "pretrain":
            per_token = result.details["training_flops"]["per_token"]
            points = [
                (per_token * row["tokens"], row["held_out_cross_entropy"])
                for row in curves.get(result.stage, ())
                if "held_out_cross_entropy" in row
            ]
            series.append(Series(result.models[0].label, points, marked=True))
    return line_chart(
        "Held-out loss by training compute", series, x_label="operations", y_label="nats a token", alone=alone
    )
