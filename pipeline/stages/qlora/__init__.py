"""An adapter trained on a frozen base, quantized or not."""

from pipeline.stages.base import StageKind
from pipeline.stages.qlora.config import Qlora
from pipeline.stages.qlora.report import QloraDetails, sections
from pipeline.stages.shared.config import mistakes

KIND = StageKind("qlora", Qlora, QloraDetails, sections, mistakes, starts_from=lambda config: config.model)
