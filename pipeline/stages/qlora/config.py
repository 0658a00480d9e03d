"""Settings of the stage `qlora`."""

from dataclasses import dataclass, field

from model.formats.registry import DEFAULT_FORMAT, FORMATS, NO_FORMAT
from pipeline.settings import FRACTION, POSITIVE, setting
from pipeline.stages.shared.config import OPTIMIZERS, Training, unpaged


@dataclass(frozen=True)
class Adapter:
    """What is trained beside a frozen base: a product of two thin matrices a layer (model/lora.py)."""

    rank: int = setting(64, range=(1, 65_536))
    alpha: float = setting(16.0, range=POSITIVE)
    """The update is scaled by alpha / rank."""
    dropout: float = setting(0.05, range=(0.0, 0.99))
    """Chance that an input of the adapter is dropped in training."""
    rslora: bool = False
    """Scale by alpha / √rank instead."""
    dora: bool = False
    """Train the length of each row of the weight apart from its direction."""
    init: str = setting("default", choices=("default", "loftq"))
    """Begin as nothing, or (loftq) as the best low-rank part of the quantization error."""
    targets: tuple[str, ...] = setting(("*_proj",), required=True)
    """Patterns of the layers that carry it, by full name or its end; all linear ones by default."""
    learning_rate_ratio: float = setting(1.0, range=(1.0, 1000.0))
    """LoRA+: the learning rate of B, the matrix that begins at zero, over that of A."""


@dataclass(frozen=True)
class Qlora(Training):
    """Stage: train an adapter on a base frozen in fewer bits, measure both, publish the adapter or the merged model.

    Defaults are those of QLoRA's paper (arXiv 2305.14314).
    """

    model: str = setting(refers="model")
    """The base; it is quantized here."""
    out: str = setting("adapted", weights=False, figures=True)
    adapter: Adapter = field(default_factory=Adapter)
    quantization: str = setting(DEFAULT_FORMAT, choices=(*FORMATS, NO_FORMAT))
    """Of the base, a format of model/formats; none trains the same adapter on the bf16 base."""
    double_quantization: bool = True
    """Quantize the scales of the blocks too: 4.127 instead of 4.5 bits a weight."""
    publish: str = setting("adapter", weights=False, choices=("adapter", "merged", "requantized"))
    """The adapter beside its base, both as one bf16 model, or that model quantized again, which loses most adapters."""
    max_merge_kl: float = setting(0.01, weights=False, range=POSITIVE)
    """KL(base with adapter ‖ merged model), nats a token, above which a merged model is not published."""
    learning_rate: float = setting(2e-4, range=(1e-9, 10.0))
    schedule: str = setting("constant", choices=("cosine", "wsd", "constant"))
    warmup_fraction: float = setting(0.03, range=FRACTION)
    beta2: float = setting(0.999, range=FRACTION)
    max_grad_norm: float = setting(0.3, range=POSITIVE)
    optimizer: str = setting("paged_adamw", choices=OPTIMIZERS, weights=unpaged)
    activation_checkpointing: bool = setting(True, weights=False)

    @property
    def learning_rate_ratio(self) -> float:
        return self.adapter.learning_rate_ratio
