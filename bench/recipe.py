"""What a recipe gives on this machine: runs it, or takes the finished run, and keeps its table.

They are also drawn: those made from nothing by the compute that training took, others by their quality and speed.

python -m bench.recipe configs/demo.yaml configs/smollm2.yaml
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.common import ROOT, write_result
from pipeline.files import write_atomically
from pipeline.recipe import recipe_to_yaml
from pipeline.report.front import latency_chart
from pipeline.report.page import logged_curves
from pipeline.report.table import collect_rows
from pipeline.results import Result
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe
from pipeline.stages.pretrain.report import PretrainDetails, compute_chart

KEPT, TOO_LONG = ("cost", "gate", "parity", "details"), ("groups", "picture", "errors", "costs")


def summarize(results: list[Result[Any]]) -> dict[str, Any]:
    """The rows of the run's table, and what each stage took."""
    stages = {result.stage: {name: msgspec.to_builtins(getattr(result, name)) for name in KEPT} for result in results}
    for stage in stages.values():
        stage["details"] = {name: found for name, found in stage["details"].items() if name not in TOO_LONG}
    return {
        "finished_at": max(result.finished_at for result in results),
        "hardware": results[-1].hardware,
        "models": msgspec.to_builtins(collect_rows(results)),
        "stages": stages,
    }


def finish(recipe: Path) -> int:
    """The exit code of the run, which Ctrl-C reaches as well: it saves where it is, and is waited for."""
    process = subprocess.Popen([sys.executable, "-m", "pipeline", "run", str(recipe)], cwd=ROOT)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def results_of(recipe: Recipe) -> list[Result[Any]]:
    """What a recipe that is in no file gives; exits with the code of a run that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"{recipe.name}.yaml")
        path.write_text(recipe_to_yaml(recipe))
        if code := finish(path):
            sys.exit(code)
    return RunFolder(ROOT / "runs" / recipe.name).results(recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    for path in parser.parse_args().recipes:
        if code := finish(path):
            sys.exit(code)
        run = RunFolder(ROOT / "runs" / path.stem)
        recipe = run.recipe()
        results = run.results(recipe)
        kept = write_result(f"{path.stem}-cpu", f"python -m bench.recipe {path}", summarize(results))
        pretrained = [result for result in results if isinstance(result.details, PretrainDetails)]
        by_compute = compute_chart(pretrained, logged_curves(run, recipe)).html(alone=True)
        if drawn := by_compute or latency_chart(collect_rows(results)).html(alone=True):
            write_atomically(kept.with_suffix(".svg"), drawn.encode())
            print(f"and drawn in {kept.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
