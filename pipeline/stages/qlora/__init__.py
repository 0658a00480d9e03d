"""An adapter trained on a frozen base, quantized or not."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.report.section import Curves, Section
from pipeline.results import Result
from pipeline.stages.qlora.config import Qlora
from pipeline.stages.qlora.report import QloraDetails, sections
from pipeline.stages.shared.kind import TrainingKind

if TYPE_CHECKING:
    from model.config import ModelConfig
    from train.memory import Setup


class QloraKind(TrainingKind[Qlora, QloraDetails]):
    """Publishes the adapter beside its base, or both merged."""

    name, config, details = "qlora", Qlora, QloraDetails

    def setup(self, config: Qlora, shapes: "Mapping[str, ModelConfig]") -> "Setup":
        from train.memory import Setup

        return Setup(
            shapes[config.model],
            config,
            adapter=config.adapter,
            quantization=config.quantization,
            double_quantization=config.double_quantization,
        )

    def sections(self, results: Sequence[Result[QloraDetails]], curves: Curves) -> list[Section]:
        return sections(results, curves)


KIND = QloraKind()
