"""A new model, trained on text from fresh weights."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.report.section import Curves, Section
from pipeline.results import Result
from pipeline.schema import Recipe
from pipeline.stages.pretrain.config import Pretrain
from pipeline.stages.pretrain.report import PretrainDetails, sections
from pipeline.stages.shared.kind import REFERENCE_BOUNDS, TrainingKind, nothing_to_bound

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.text.tokenizer import Tokenizer
    from train.memory import Setup


class PretrainKind(TrainingKind[Pretrain, PretrainDetails]):
    """Reads the tokenizer of another model, or the most common part of it."""

    name, config, details = "pretrain", Pretrain, PretrainDetails

    def tokenizer(self, config: Pretrain, folders: Mapping[str, Path]) -> "Tokenizer":
        from pipeline.stages.pretrain.run import tokenizer_of

        return tokenizer_of(config, folders[config.tokenizer])

    def mistakes(self, config: Pretrain, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().mistakes(config, recipe)
        missing = dict.fromkeys(REFERENCE_BOUNDS, "it has no teacher")
        yield from nothing_to_bound(config.gate, missing | {"max_kl_ratio": "no KL falls by training here"})

    def setup(self, config: Pretrain, shapes: "Mapping[str, ModelConfig]") -> "Setup":
        from pipeline.stages.pretrain.run import model_config
        from train.memory import Setup

        return Setup(model_config(config.architecture, shapes[config.tokenizer]), config)

    def sections(self, results: Sequence[Result[PretrainDetails]], curves: Curves) -> list[Section]:
        return sections(results, curves)


KIND = PretrainKind()
