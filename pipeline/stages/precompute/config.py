"""Settings of the stage `precompute`."""

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.schema import DataSource, Recipe
from pipeline.settings import setting
from pipeline.stages.shared.config import Server


@dataclass(frozen=True)
class Precompute:
    """Stage: run a teacher once over a data set, and store some tokens of its distribution at every position.

    Stages that train towards that teacher on the data set `out` do not run it while they train. It may run behind a
    server, which lists its most probable tokens; then `distill` needs no `teacher`.
    """

    model: str = setting(refers="model")
    """The teacher; with `server` any model of its tokenizer, like the student that is to learn: it does not run."""
    data: str = setting(refers="data")
    """Text or conversations; what is held out stays as it is."""
    draws: int = setting(50, range=(1, 255))
    """Tokens drawn at each position; equal ones are stored once, with their number."""
    server: Server | None = setting(None, later=True)
    """Where the teacher runs instead: vLLM or `potstill serve`, with `prompt_logprobs` in /v1/completions."""
    top: int = setting(20, later=True, range=(1, 1_000))
    """Most probable tokens that a server is asked for at each position, in place of `draws`. Both allow 20; vLLM more
    with --max-logprobs."""
    seed: int = 0
    out: str = setting("taught", makes="data")
    """Name of the same documents with their distributions."""

    def data_set(self, recipe: Recipe, run: Path, folder: Path) -> DataSource:
        """The same documents, with what it made."""
        return replace(recipe.data_set(self.data, run), distributions=str(folder))
