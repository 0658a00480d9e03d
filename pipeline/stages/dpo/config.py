"""Settings of the stage `dpo`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from model.formats.registry import FORMATS, NO_FORMAT
from pipeline.schema import Recipe
from pipeline.settings import FRACTION, redeclared, setting
from pipeline.stages.qlora.config import Qlora
from pipeline.stages.shared import config as shared
from pipeline.stages.shared.config import Gate, Training
from train.config import PreferenceLoss, PreferenceLossName, ScheduleName


@dataclass(frozen=True)
class PreferenceGate(Gate):
    """Bounds on the held-out quality of chosen answers, beside the model before training, and on held-out pairs."""

    min_reward_accuracy: float | None = setting(None, range=FRACTION)
    """Part of the pairs whose chosen answer became likelier, against the reference, than the rejected one."""


@dataclass(frozen=True)
class Dpo(Qlora):
    """Stage: train an adapter to prefer chosen answers to rejected ones, and publish it as `qlora` publishes one.

    The reference is the model without the adapter. Its data are pairs: `preference: true`.
    """

    out: str = redeclared(Training, "out", "preferred")
    quantization: str = redeclared(Qlora, "quantization", NO_FORMAT, choices=(*FORMATS, NO_FORMAT))
    """Of the base; none trains the adapter on the model as it is."""
    loss: PreferenceLossName = "sigmoid"
    """`sigmoid` is DPO's, `ipo` bounds how far answers are driven apart (train/preference.py)."""
    beta: float = redeclared(PreferenceLoss, "beta", 0.1)
    """How dear it is to leave the reference: a larger one stays nearer to it."""
    label_smoothing: float = redeclared(PreferenceLoss, "label_smoothing", 0.0)
    nll_weight: float = redeclared(PreferenceLoss, "nll_weight", 0.0)
    """Of the chosen answers' negative log-likelihood beside the preference, which alone makes them less likely too."""
    gate: PreferenceGate = field(default_factory=PreferenceGate, metadata={"weights": False})
    held_out_tokens: int = redeclared(Training, "held_out_tokens", 32_768)
    """Of chosen answers and their prompts; the rejected ones are measured beside them."""
    learning_rate: float = redeclared(Training, "learning_rate", 5e-5)
    schedule: ScheduleName = "cosine"
    warmup_fraction: float = redeclared(Training, "warmup_fraction", 0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.preference_loss

    @property
    def held_out_passes(self) -> int:
        """With the base's of the same answers; of both answers of all pairs the base's, and of what is published."""
        return super().held_out_passes + 1 + 2 * 2

    @property
    def measured_tokens(self) -> int:
        """With the base's pass over the curve's text, and both answers of all pairs at each of its points."""
        points = self._curve_points
        return super().measured_tokens + self._curve_tokens * (points > 0) + 2 * points * self.held_out_tokens

    @property
    def preference_loss(self) -> PreferenceLoss:
        """Raises ValueError for label smoothing where the loss knows none."""
        return PreferenceLoss(self.loss, self.beta, self.label_smoothing, self.nll_weight)


def mistakes(config: Dpo, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """A micro-batch too small for a pair, and bounds of its gate that nothing is measured for."""
    length, micro_batch = recipe.data_set(config.data).sequence_length, config.micro_batch_tokens
    if micro_batch < 2 * length:
        least = f"it must be at least twice the sequence_length of its data, which is {length:,}"
        yield "micro_batch_tokens", f"is {micro_batch:,}; both answers of a pair go into one: {least}"
    yield from shared.nothing_to_bound(config.gate, shared.NO_FALL)
