"""Settings of the stage `precompute`."""

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.schema import DataSource, Recipe
from pipeline.settings import setting


@dataclass(frozen=True)
class Precompute:
    """Stage: run a teacher once over a data set, and store some tokens of its distribution at every position.

    Stages that train towards that teacher on the data set `out` do not run it while they train.
    """

    model: str = setting(refers="model")
    """The teacher."""
    data: str = setting(refers="data")
    """Text or conversations; what is held out stays as it is."""
    draws: int = setting(50, range=(1, 255))
    """Tokens drawn at each position; equal ones are stored once, with their number."""
    seed: int = 0
    out: str = setting("taught", makes="data")
    """Name of the same documents with their distributions."""

    def data_set(self, recipe: Recipe, run: Path, folder: Path) -> DataSource:
        """The same documents, with what it made."""
        return replace(recipe.data_set(self.data, run), distributions=str(folder))
