"""Settings that several kinds of stages have in common."""

from dataclasses import dataclass, field

from pipeline.settings import COUNTS, FRACTION, POSITIVE, setting


@dataclass(frozen=True)
class Loss:
    """What the student learns at each position; temperature², mixing and kinds as in train/."""

    kind: str = setting(
        "forward_kl",
        choices=("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "cross_entropy"),
    )
    """A divergence from the teacher's distribution, or `cross_entropy`: the text alone, which needs no teacher's pass.
    The settings below belong to the divergences."""
    temperature: float = setting(1.0, range=(0.01, 100.0))
    alpha: float = setting(0.1, range=FRACTION)
    """Weight of the mixture in `jsd` and in the skewed divergences."""
    hard_weight: float = setting(0.0, range=FRACTION)
    """Weight of the text's own next token beside the teacher's distribution."""


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


OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit")


def unpaged(optimizer: str) -> str:
    """Where the moments lie changes no weight."""
    return optimizer.removeprefix("paged_")


@dataclass(frozen=True)
class Training:
    """The settings of every stage that trains a model, measures it, and publishes it."""

    tokens: int = setting(grows=True, count=True, range=COUNTS)
    """Tokens to train on, in all."""
    batch_tokens: int = setting(4_096, count=True, range=COUNTS)
    """Tokens of one optimizer step, over all processes."""
    micro_batch_tokens: int = setting(2_048, count=True, range=COUNTS)
    """Tokens that one process computes at a time: decides memory, and which texts are packed together."""
    learning_rate: float = setting(1e-3, range=(1e-9, 10.0))
    """The schedule's peak."""
    schedule: str = setting("cosine", choices=("cosine", "wsd", "constant"))
    """After the warm-up: cosine decay; stable, then linear decay (wsd); or constant."""
    warmup_fraction: float = setting(0.05, range=FRACTION)
    """Part of the steps in which the learning rate rises from zero."""
    decay_fraction: float = setting(0.2, range=FRACTION)
    """Part of the steps in which `wsd` decays."""
    min_learning_rate_fraction: float = setting(0.1, range=FRACTION)
    """Where the decay ends, as a fraction of the peak."""
    optimizer: str = setting("adamw", choices=OPTIMIZERS, weights=unpaged)
    """Moments in 32 or 8 bits; `paged` keeps them in host memory, where there is a GPU to keep free of them."""
    weight_decay: float = setting(0.0, range=(0.0, 10.0))
    beta1: float = setting(0.9, range=FRACTION)
    beta2: float = setting(0.95, range=FRACTION)
    max_grad_norm: float = setting(1.0, range=POSITIVE)
    """Gradients of a larger norm are scaled down to it."""
    precision: str = setting("bf16", choices=("bf16", "fp32"))
    """Of the matrix products; the weights being trained stay in fp32."""
    activation_checkpointing: bool = setting(False, weights=False)
    """Recompute each layer in the backward pass: less memory, a third more work."""
    evaluate_every_tokens: int | None = setting(None, weights=False, count=True, range=COUNTS)
    """Measure the held-out loss this often; nothing measures only before and after."""
    checkpoint_every_s: float = setting(300.0, weights=False, range=(0.0, 1e9))
    """Seconds between checkpoints."""
    seed: int = 0
    """Decides the order of the documents."""
    data: str = setting(refers="data")
    held_out_tokens: int = setting(8_192, weights=False, figures=True, count=True, range=(16, 1e12))
    """Held-out tokens that quality is measured on, before and after."""
    gate: Gate = field(default_factory=Gate, metadata={"weights": False})
    out: str = setting("student", weights=False, figures=True)
    """Name under which later stages find the result."""

    @property
    def learning_rate_ratio(self) -> float:
        """Learning rate of the second matrix of adapters over that of all else that is trained."""
        return 1.0


@dataclass(frozen=True)
class Recovery(Training):
    """What stages share that train a smaller model towards a larger one."""

    loss: Loss = field(default_factory=Loss)


@dataclass(frozen=True)
class Decoding:
    """Decoding with prompts in the cache."""

    context_tokens: int = setting(1024, count=True, range=(1, 1e7))
    """Length of each prompt."""
    new_tokens: int = setting(32, count=True, range=(2, 1e6))
    """Tokens generated after it; the time of the first, which the prompt takes, does not count."""
    batch_sizes: tuple[int, ...] = setting((1, 8), range=(1, 4096))


@dataclass(frozen=True)
class Speed:
    """How generation speed is measured: greedy, on held-out prompts, with the serving engine."""

    batch_sizes: tuple[int, ...] = setting((1, 8), range=(1, 4096))
    """Requests at once; one measurement each."""
    prompt_tokens: int = setting(64, count=True, range=(1, 1e6))
    new_tokens: int = setting(64, count=True, range=(1, 1e6))
    """Tokens generated for each request."""
