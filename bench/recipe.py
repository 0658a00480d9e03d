"""What a recipe gives on this machine: runs it, or takes the finished run, and keeps its table.

python -m bench.recipe configs/demo.yaml configs/smollm2.yaml
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.common import ROOT, write_result
from pipeline.result import Result
from pipeline.run_folder import RunFolder
from pipeline.table import collect_rows


def summarize(results: list[Result]) -> dict[str, Any]:
    """The rows of the run's table, and what each stage took."""
    return {
        "finished_at": max(result.finished_at for result in results),
        "hardware": results[-1].hardware,
        "models": msgspec.to_builtins(collect_rows(results)),
        "stages": {
            result.stage: {
                "cost": msgspec.to_builtins(result.cost),
                "gate": msgspec.to_builtins(result.gate),
                "parity": msgspec.to_builtins(result.parity),
                "details": {name: found for name, found in result.details.items() if name not in ("picture", "groups")},
            }
            for result in results
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    for path in parser.parse_args().recipes:
        subprocess.run([sys.executable, "-m", "pipeline", "run", str(path)], cwd=ROOT, check=True)
        run = RunFolder(ROOT / "runs" / path.stem)
        kept = write_result(f"{path.stem}-cpu", f"python -m bench.recipe {path}", summarize(run.results(run.recipe())))
        print(f"written to {kept}")


if __name__ == "__main__":
    main()
