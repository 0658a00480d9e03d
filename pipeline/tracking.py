"""What wandb shows of a run: a group with a run for each stage, and in it what the stage's part of the report shows.

The variables that its users set hold here too: WANDB_MODE and WANDB_DISABLED decide whether anything is sent where the
recipe tracks, WANDB_RUN_GROUP and WANDB_NAME stand for the recipe's name, WANDB_RUN_ID (which a sweep's agent sets) is
the last stage's, WANDB_LOG_MODEL uploads models; else an artifact only names the folder.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pipeline.errors import UserError
from pipeline.report.section import Table
from pipeline.results import ModelReport, Result
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe, Stage
from pipeline.settings import to_plain
from train.wandb_run import WandbMode, WandbRun

MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": None}
"""What WANDB_MODE may say."""
YES = ("1", "true", "yes", "on")
UPLOADING = ("end", "checkpoint", *YES)
"""What WANDB_LOG_MODEL may say, as transformers takes it."""
UPLOAD_S = 3600.0
"""How long a stage waits for the upload of its model, where one was asked for."""
log = logging.getLogger(__name__)


def wandb_mode(recipe: Recipe) -> WandbMode | None:
    """What the recipe asks for and the environment allows; UserError for a WANDB_MODE that is none."""
    asked = recipe.tracking.wandb
    said = os.environ.get("WANDB_MODE") or asked
    if said not in MODES:
        raise UserError(f"WANDB_MODE is {said!r}; it can be {', '.join(MODES)}")
    if asked == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in YES:
        return None
    return cast("WandbMode | None", MODES[said])


def wandb_run(recipe: Recipe, stage: Stage, folder: Path, part: str = "") -> WandbRun | None:
    """The stage's run, or that of a `part` of it; None where nothing is tracked."""
    mode = wandb_mode(recipe)
    if mode is None:
        return None
    name = f"{stage.name}-{part}" if part else stage.name
    run_id = os.environ.get("WANDB_RUN_ID")
    if run_id is not None and (part or stage.index != recipe.plan()[-1].index):
        run_id = f"{run_id}-{name}"
    return WandbRun(
        folder,
        mode=mode,
        name=f"{os.environ.get('WANDB_NAME', recipe.name)}-{name}",
        job_type=stage.kind,
        group=os.environ.get("WANDB_RUN_GROUP", recipe.name),
        config=to_plain(stage.config),
        run_id=run_id,
    )


@contextmanager
def tracked(recipe: Recipe, stage: Stage, folder: Path, part: str = "") -> Iterator[WandbRun | None]:
    """`wandb_run`, ended as failed by whatever goes wrong within."""
    run = wandb_run(recipe, stage, folder, part)
    try:
        yield run
    except BaseException:
        if run is not None:
            run.finish(exit_code=1)
        raise
    if run is not None:
        run.finish(patience_s=UPLOAD_S if uploads_models() else None)


def uploads_models() -> bool:
    """Whether artifacts hold models, and do not only name their folders."""
    return os.environ.get("WANDB_LOG_MODEL", "").lower() in UPLOADING


def show_result(run: WandbRun, recipe: Recipe, folder: Path, result: Result[Any]) -> None:
    """Figures of all models, gates, the tables of the stage, the run's report up to it, and the model."""
    from pipeline.report.page import logged_curves, render
    from pipeline.report.table import models_section
    from pipeline.stages.base import sections_of

    home = RunFolder(folder.parent)
    curves = logged_curves(home, recipe)
    sections = [models_section([result]), *sections_of([result], curves)]
    page = render(recipe, home.results(recipe), curves)
    tables = {
        f"{section.title} {number}" if number else section.title: _plain(table)
        for section in sections
        for number, table in enumerate(section.tables)
    }

    def show(wandb_run: Any) -> None:
        import wandb

        wandb_run.summary.update(summary_of(result))
        shown: dict[str, Any] = {"report": wandb.Html(page)}
        for title, (columns, rows) in tables.items():
            shown[title] = wandb.Table(columns=columns, data=rows)
        wandb_run.log(shown)

    run.do(show)
    if result.output is not None and (folder / "model").is_dir():
        run.do(lambda wandb_run: _log_artifact(wandb_run, recipe, folder / "model", result))


def summary_of(result: Result[Any]) -> dict[str, float | bool]:
    """Figures by the path that wandb's tables name them with: MODEL/perplexity, gate/kl, passed."""
    found: dict[str, float | bool] = {"passed": result.passed, "seconds": result.cost.seconds}
    for report in result.models:
        found |= {f"{report.label}/{name}": value for name, value in _figures(report).items()}
    found |= {f"gate/{check.name}": check.value for check in result.gate}
    found |= {f"gate/{check.name}/passed": check.passed for check in result.gate}
    if result.parity is not None:
        found["parity"] = result.parity.difference
    return found


def _figures(report: ModelReport) -> dict[str, float]:
    found: dict[str, float] = {"parameters": report.parameters, "weight_bytes": report.weight_bytes}
    if report.quality is not None:
        found |= {"perplexity": report.quality.perplexity, "nll": report.quality.nll.value}
        estimates = {"kl": report.quality.kl, "agreement": report.quality.agreement}
        estimates["acceptance"] = report.quality.acceptance
        found |= {name: one.value for name, one in estimates.items() if one is not None}
    return found | {f"tokens_per_s/{point.batch_size}": point.tokens_per_s for point in report.speed}


def _plain(table: Table) -> tuple[list[Any], list[list[str]]]:
    """Names of columns, and rows of as many cells, each as text."""
    rows = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in (table.head, *table.rows)]
    width = max(map(len, rows))
    head, *body = ([*row, *[""] * (width - len(row))] for row in rows)
    return [name or f"column {number}" for number, name in enumerate(head)], body


def _log_artifact(wandb_run: Any, recipe: Recipe, model: Path, result: Result[Any]) -> None:
    """The model under its name in the recipe, made from its parents; wandb looks those up only where it is online."""
    import wandb

    outs = {stage.name: stage.out for stage in recipe.plan() if stage.out}
    artifact = wandb.Artifact(
        f"{recipe.name}-{outs[result.stage]}",
        type="model",
        metadata={"digest": result.output, "parents": dict(result.parents), "stage": result.stage},
    )
    if uploads_models():
        artifact.add_dir(str(model))
    else:
        artifact.add_reference(model.resolve().as_uri(), checksum=False)
    for parent in () if wandb_run.offline else result.parents:
        try:
            wandb_run.use_artifact(f"{recipe.name}-{parent}:latest")
        except Exception as error:  # a stage that was finished before the run was tracked has left none
            log.info("wandb does not know %s, which %s was made from (%s)", parent, result.stage, error)
    wandb_run.log_artifact(artifact, aliases=["latest", result.key[:12], "passed" if result.passed else "refused"])
