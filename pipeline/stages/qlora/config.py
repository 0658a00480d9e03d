"""Settings of the stage `qlora`."""

from dataclasses import dataclass, field

from model.formats.registry import DEFAULT_FORMAT, FORMATS, NO_FORMAT
from pipeline.settings import POSITIVE, redeclared, setting
from pipeline.stages.shared.config import Adapter, Training
from train.config import OptimizerName, ScheduleName


@dataclass(frozen=True)
class Qlora(Training):
    """Stage: train an adapter on a base frozen in fewer bits, measure both, publish the adapter or the merged model.

    Defaults are those of QLoRA's paper (arXiv 2305.14314).
    """

    model: str = setting(refers="model")
    """The base; it is quantized here."""
    out: str = redeclared(Training, "out", "adapted")
    adapter: Adapter = field(default_factory=Adapter)
    quantization: str = setting(DEFAULT_FORMAT, choices=(*FORMATS, NO_FORMAT))
    """Of the base, a format of model/formats; none trains the same adapter on the bf16 base."""
    double_quantization: bool = True
    """Quantize the scales of the blocks too: 4.127 instead of 4.5 bits a weight."""
    publish: str = setting("adapter", weights=False, choices=("adapter", "merged", "requantized"))
    """The adapter beside its base, both as one bf16 model, or that model quantized again, which loses most adapters."""
    max_merge_kl: float = setting(0.01, weights=False, range=POSITIVE)
    """KL(base with adapter ‖ merged model), nats a token, above which a merged model is not published."""
    learning_rate: float = redeclared(Training, "learning_rate", 2e-4)
    schedule: ScheduleName = "constant"
    warmup_fraction: float = redeclared(Training, "warmup_fraction", 0.03)
    beta2: float = redeclared(Training, "beta2", 0.999)
    max_grad_norm: float = redeclared(Training, "max_grad_norm", 0.3)
    optimizer: OptimizerName = redeclared(Training, "optimizer", "paged_adamw")
    activation_checkpointing: bool = redeclared(Training, "activation_checkpointing", True)

    @property
    def learning_rate_ratio(self) -> float:
        return self.adapter.learning_rate_ratio

    @property
    def held_out_passes(self) -> int:
        """The model and its base; base with adapter twice, and each way of merging them; what is published."""
        return 6 + (self.quantization != NO_FORMAT)
