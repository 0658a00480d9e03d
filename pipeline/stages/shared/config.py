"""Settings that several kinds of stages have in common."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from model.lora_config import LoraConfig
from pipeline.schema import Recipe
from pipeline.settings import FRACTION, POSITIVE, redeclared, setting
from train.config import Loss, TrainingConfig

CURVE_TOKENS = 4_096
"""Held-out tokens of each point of the curve during training: enough to see it, cheap enough to do often."""


@dataclass(frozen=True)
class Gate:
    """Bounds on the held-out quality. A stage that may be outside one (95 % confidence) does not publish."""

    max_kl: float | None = setting(None, range=POSITIVE)
    """KL(teacher ‖ student), nats a token."""
    max_kl_ratio: float | None = setting(None, range=POSITIVE)
    """The same, divided by its value before training."""
    min_acceptance: float | None = setting(None, range=FRACTION)
    """1 − total variation: the chance that the teacher accepts a token that the student drafted."""
    min_agreement: float | None = setting(None, range=FRACTION)
    """Fraction of positions where both put the same token first."""
    max_bits_per_byte: float | None = setting(None, range=POSITIVE)
    """Loss on the text itself, bits a UTF-8 byte."""


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server behind which a model runs; the key that it may want is in OPENAI_API_KEY."""

    url: str = setting(result=False, pattern=re.compile(r"https?://\S+"), meaning="an address like http://host:8000/v1")
    """It may move, and what it has said stays."""
    model: str = setting()
    """What the server calls the model."""


@dataclass(frozen=True)
class Training(TrainingConfig):
    """The settings of every stage that trains a model, measures it, and publishes it."""

    data: str = setting(refers="data")
    held_out_tokens: int = setting(8_192, weights=False, figures=True, count=True, range=(16, 1e12))
    """Held-out tokens that quality is measured on, before and after."""
    gate: Gate = field(default_factory=Gate, metadata={"weights": False})
    out: str = setting("student", weights=False, figures=True)
    """Name under which later stages find the result."""

    @property
    def measured_tokens(self) -> int:
        """Held-out tokens that the model passes: before and after training, and at each point of its curve."""
        return self.held_out_passes * self.held_out_tokens + self._curve_points * self._curve_tokens

    @property
    def teacher_tokens(self) -> int:
        """Tokens that a teacher passes, if there is one, besides those of training."""
        return self.held_out_tokens + self._curve_tokens * (self._curve_points > 0)

    @property
    def held_out_passes(self) -> int:
        return 2

    @property
    def _curve_tokens(self) -> int:
        return min(CURVE_TOKENS, self.held_out_tokens)

    @property
    def _curve_points(self) -> int:
        """One behind each step that crosses a multiple of the interval, and one behind the last."""
        if self.evaluate_every_tokens is None or not self.steps:
            return 0
        crossed = (self.steps - 1) * self.batch_tokens // self.evaluate_every_tokens
        return min(self.steps, crossed + 1)


@dataclass(frozen=True)
class Adapter(LoraConfig):
    """What is trained beside a frozen base: a product of two thin matrices a layer (model/lora.py)."""

    dropout: float = redeclared(LoraConfig, "dropout", 0.05)
    learning_rate_ratio: float = setting(1.0, range=(1.0, 1000.0))
    """LoRA+: the learning rate of B, the matrix that begins at zero, over that of A."""


@dataclass(frozen=True)
class Recovery(Training):
    """What stages share that train a smaller model towards a larger one."""

    learning_rate: float = redeclared(Training, "learning_rate", 1e-4)
    """The schedule's peak. Weights that were trained lose what they know at the 1e-3 of a model from nothing; one that
    has lost most of its layers learns faster at that."""
    loss: Loss = field(default_factory=Loss)


@dataclass(frozen=True)
class Decoding:
    """Decoding with prompts in the cache, no more of them than the models know positions for."""

    context_tokens: int = setting(1024, count=True, range=(1, 1e7))
    """Length of each prompt."""
    new_tokens: int = setting(32, count=True, range=(2, 1e6))
    """Tokens generated after it; the time of the first, which the prompt takes, does not count."""
    batch_sizes: tuple[int, ...] = setting((1, 8), range=(1, 4096))


@dataclass(frozen=True)
class Speed:
    """How generation speed is measured: greedy, on held-out prompts, with the serving engine.

    Texts are shorter where the models know fewer positions.
    """

    batch_sizes: tuple[int, ...] = setting((1, 8), range=(1, 4096))
    """Requests at once; one measurement each."""
    prompt_tokens: int = setting(64, count=True, range=(1, 1e6))
    new_tokens: int = setting(64, count=True, range=(1, 1e6))
    """Tokens generated for each request."""


REFERENCE_BOUNDS = ("max_kl", "min_acceptance", "min_agreement")
"""Bounds of a gate that need a model to compare with."""
NO_FALL = {"max_kl_ratio": "no KL falls by training here"}


def mistakes(config: Training, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """A micro-batch too small for its sequences. That batch_tokens is a multiple of it, TrainingConfig checks."""
    source, micro_batch = recipe.data_set(config.data), config.micro_batch_tokens
    length = source.sequence_length
    if micro_batch < length:
        least = f"it must be at least the sequence_length of its data, which is {length:,}"
        yield "micro_batch_tokens", f"is {micro_batch:,}; {least}"
    loss = config.loss if isinstance(config, Recovery) else Loss()
    if loss.hidden_weight and loss.kind == "cross_entropy":
        yield (
            "loss.hidden_weight",
            f"is {loss.hidden_weight:g}, but cross_entropy runs no teacher whose states to learn",
        )
    if source.has_distributions and not loss.is_linear and loss.kind != "cross_entropy":
        yield "loss", f"is more than the stored distributions of {config.data} can teach: forward_kl at temperature 1"


def nothing_to_bound(gate: Gate, missing: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Mistakes of a gate that sets one of the `missing` bounds, each of which is mapped to why."""
    for name, reason in missing.items():
        if getattr(gate, name) is not None:
            yield f"gate.{name}", f"has nothing to bound: {reason}"
