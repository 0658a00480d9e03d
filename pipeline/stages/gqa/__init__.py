"""Fewer KV heads, converted on calibration text and recovered by training."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.report.section import Curves, Section
from pipeline.results import Result
from pipeline.stages.gqa.config import Gqa
from pipeline.stages.gqa.report import GqaDetails, sections
from pipeline.stages.shared.kind import TrainingKind

if TYPE_CHECKING:
    from model.config import ModelConfig
    from train.memory import Setup


class GqaKind(TrainingKind[Gqa, GqaDetails]):
    """Trained towards its unconverted parent, whole or through adapters that are merged in the end."""

    name, config, details = "gqa", Gqa, GqaDetails
    kept_figures = ("start.json", "compared")

    def setup(self, config: Gqa, shapes: "Mapping[str, ModelConfig]") -> "Setup":
        from model.lora import LoraConfig
        from train.memory import Setup

        parent = shapes[config.model]
        narrow = parent.with_kv_heads(config.layer_kv_heads(parent.num_layers))
        adapter = LoraConfig(rank=config.adapter_rank) if config.train == "adapters" else None
        return Setup(narrow, config, teacher=parent, adapter=adapter, fp32_base=True)

    def sections(self, results: Sequence[Result[GqaDetails]], curves: Curves) -> list[Section]:
        return sections(results, curves)


KIND = GqaKind()
