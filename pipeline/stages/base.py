"""The stages of a run, one module each, named after its key in a recipe; `teacher` imports a model.

A module has `run(context) -> Result | None`. Every process calls it; the main one returns the result. It publishes
through `context.publish` or not at all, and goes on from what it finds in its folder after an interruption.
"""

import importlib
from collections.abc import Callable

from pipeline.results import Result
from pipeline.stages.shared.context import StageContext


def runner(kind: str) -> Callable[[StageContext], Result | None]:
    """The `run` of a kind of stage; torch and the rooms below are imported now and not before."""
    return importlib.import_module(f"pipeline.stages.{'import_model' if kind == 'teacher' else kind}.run").run
