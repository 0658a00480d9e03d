"""Mixture of depths: routers that let only part of the tokens into some layers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.report.section import Curves, Section
from pipeline.results import Result
from pipeline.stages.mod.config import Mod
from pipeline.stages.mod.report import ModDetails, sections
from pipeline.stages.shared.kind import TrainingKind

if TYPE_CHECKING:
    from model.config import ModelConfig
    from train.memory import Setup


class ModKind(TrainingKind[Mod, ModDetails]):
    """Trained towards its dense parent: routers alone, adapters beside them, or everything."""

    name, config, details = "mod", Mod, ModDetails

    def setup(self, config: Mod, shapes: "Mapping[str, ModelConfig]") -> "Setup":
        """Layers keep as much as without routers: early in training every token passes."""
        from model.lora import LoraConfig
        from pipeline.stages.mod.run import named_layers
        from train.memory import Setup

        parent, alone = shapes[config.model], config.train == "router"
        routers = config.least_important or len(named_layers(config, parent.num_layers))
        return Setup(
            parent,
            config,
            teacher=parent,
            adapter=LoraConfig(rank=config.adapter_rank) if config.train == "adapters" else None,
            routers=routers if alone else 0,
            fp32_base=True,
        )

    def sections(self, results: Sequence[Result[ModDetails]], curves: Curves) -> list[Section]:
        return sections(results, curves)


KIND = ModKind()
