"""Quality, memory and speed of a model, beside a reference."""

from collections.abc import Iterator

from pipeline.results import NoDetails
from pipeline.schema import Recipe
from pipeline.stages.base import StageKind
from pipeline.stages.evaluate.config import Evaluate
from pipeline.stages.shared.kind import REFERENCE_BOUNDS, nothing_to_bound


class EvaluateKind(StageKind[Evaluate, NoDetails]):
    """Publishes nothing; what it measures is in the table of models."""

    name, config, details = "evaluate", Evaluate, NoDetails

    def mistakes(self, config: Evaluate, recipe: Recipe) -> Iterator[tuple[str, str]]:
        missing = {} if config.against else dict.fromkeys(REFERENCE_BOUNDS, "`against` is not set")
        yield from nothing_to_bound(config.gate, missing | {"max_kl_ratio": "no KL falls by training here"})


KIND = EvaluateKind()
