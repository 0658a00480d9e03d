"""The settings of a training run, known without torch: recipes are checked before a model is there."""

import math
from dataclasses import dataclass
from typing import Literal

from model.settings import COUNTS, FRACTION, POSITIVE, check, setting

ScheduleName = Literal["cosine", "wsd", "constant"]
OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
LossName = Literal[
    "forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "total_variation", "acceptance",
    "cross_entropy",
]  # fmt: skip
PreferenceLossName = Literal["sigmoid", "ipo"]


def unpaged(optimizer: str) -> str:
    """The optimizer without where its moments lie, which changes no weight."""
    return optimizer.removeprefix("paged_")


@dataclass(frozen=True)
class TrainingConfig:
    """How to train. The stages of a recipe that train have these settings, and what they train on beside them."""

    tokens: int = setting(grows=True, count=True, range=COUNTS)
    """Tokens to train on, in all; the number of steps is this divided by `batch_tokens`, rounded up."""
    batch_tokens: int = setting(4_096, count=True, range=COUNTS)
    """Tokens of one optimizer step, over all processes."""
    micro_batch_tokens: int = setting(2_048, count=True, range=COUNTS)
    """Most tokens that one process computes at a time: decides memory, and which texts are packed together."""
    learning_rate: float = setting(1e-3, range=(1e-9, 10.0))
    """The schedule's peak."""
    schedule: ScheduleName = "cosine"
    """After the warm-up: cosine decay; stable, then decay (wsd); or constant."""
    warmup_fraction: float = setting(0.05, range=FRACTION)
    """Part of the steps in which the learning rate rises from zero."""
    decay_fraction: float = setting(0.2, range=FRACTION)
    """Part of the steps in which `wsd` decays."""
    min_learning_rate_fraction: float = setting(0.1, range=FRACTION)
    """Where the decay ends, as a fraction of the peak."""
    optimizer: OptimizerName = setting("adamw", weights=unpaged)
    """Moments in 32 or 8 bits; `paged` keeps them in host memory, where there is a GPU to keep free of them."""
    weight_decay: float = setting(0.0, range=(0.0, 10.0))
    """On matrices only; norms and biases have none."""
    beta1: float = setting(0.9, range=FRACTION)
    beta2: float = setting(0.95, range=FRACTION)
    max_grad_norm: float = setting(1.0, range=POSITIVE)
    """Gradients of a larger norm are scaled down to it."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the matrix products; weights that are trained, gradients and moments are fp32 either way.

    On a CPU without bf16 instructions products are in fp32, which is many times faster there.
    """
    activation_checkpointing: bool = setting(False, weights=False)
    """Recompute each layer in the backward pass: less memory, a third more work."""
    dp_shard_size: int | None = setting(None, result=False, later=True, range=(1, 1e6))
    """Processes that share one copy of weights, gradients and moments (FSDP); nothing: as many as the launcher's FSDP
    configuration says, and one where it has none."""
    deterministic: bool = setting(False, weights=False, later=True)
    """On a GPU: the same bits in every run, as far as torch has such algorithms; attention's backward pass then takes
    seven products instead of five. On a CPU runs repeat their bits either way."""
    evaluate_every_tokens: int | None = setting(None, weights=False, count=True, range=COUNTS)
    """Measure the held-out loss this often; nothing measures only before and after."""
    checkpoint_every_s: float = setting(300.0, result=False, range=(0.0, 1e9))
    """Seconds between checkpoints; the last step and a stop always save one."""
    seed: int = 0
    """Decides the order of the documents."""

    def __post_init__(self) -> None:
        check(self)
        if self.batch_tokens % self.micro_batch_tokens:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens:,}; it must be a multiple of micro_batch_tokens, "
                f"which is {self.micro_batch_tokens:,}"
            )

    @property
    def learning_rate_ratio(self) -> float:
        """LoRA+ (arXiv 2402.12354): the learning rate of an adapter's B over that of all others."""
        return 1.0

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.batch_tokens)

    @property
    def compared_steps(self) -> int:
        """Steps of other models, which are trained briefly to be compared."""
        return 0

    @property
    def micro_batches_per_step(self) -> int:
        return self.batch_tokens // self.micro_batch_tokens

    def check_shared_by(self, processes: int, context: int = 1) -> None:
        """Raises ValueError where groups of `context` of so many processes cannot get as many micro-batches each."""
        groups = processes // context
        if self.micro_batches_per_step % groups == 0:
            return
        who = f"{processes} processes" if context == 1 else f"{groups} groups of {context} processes"
        raise ValueError(
            f"batch_tokens {self.batch_tokens:,} in micro-batches of micro_batch_tokens {self.micro_batch_tokens:,} "
            f"are {self.micro_batches_per_step} a step, which {who} cannot share evenly; batch_tokens can be "
            f"{groups * self.micro_batch_tokens:,} or a multiple of it, or micro_batch_tokens smaller"
        )


@dataclass(frozen=True)
class Loss:
    """What a model learns at each position; formulas in `kernels.losses.linear_distillation`."""

    kind: LossName = "forward_kl"
    """A divergence from the teacher's distribution, or `cross_entropy`: the text alone, which needs no teacher's pass.
    `acceptance`, which goes over from KL to total variation, is for drafts: 1 − total variation is the rate at which
    their tokens are accepted. The settings below belong to the divergences."""
    temperature: float = setting(1.0, range=(0.01, 100.0))
    """τ of both distributions; the loss is multiplied by τ² so that its gradient keeps its size."""
    alpha: float = setting(0.1, range=FRACTION)
    """Weight of the mixture in `jsd` and in the skewed divergences."""
    hard_weight: float = setting(0.0, range=FRACTION)
    """Weight of the text's own next token beside the teacher's distribution."""
    hidden_weight: float = setting(0.0, range=(0.0, 1e3), later=True)
    """Weight of the distance between the residual streams behind the student's layers and those of the teacher, beside
    the divergence: for students that have lost many layers."""

    @property
    def is_linear(self) -> bool:
        """Whether it is linear in the teacher's distribution, as what stored ones can teach must be."""
        return self.kind == "forward_kl" and self.temperature == 1 and not self.hidden_weight

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class PreferenceLoss:
    """What a model learns of two answers; formulas in `train.preference`."""

    kind: PreferenceLossName = "sigmoid"
    beta: float = setting(0.1, range=(1e-6, 1e3))
    """How dear it is to leave the reference."""
    label_smoothing: float = setting(0.0, range=(0.0, 0.5))
    """Of `sigmoid`: the part of the pairs whose answers are taken to stand the wrong way round."""
    nll_weight: float = setting(0.0, range=(0.0, 1e3), later=True)
    """Of the chosen answer's negative log-likelihood, a mean over its tokens, beside the preference: what keeps it
    likely while the two are driven apart (TRL's `rpo_alpha`)."""

    def __post_init__(self) -> None:
        check(self)
        if self.label_smoothing and self.kind != "sigmoid":
            raise ValueError(f"label_smoothing is {self.label_smoothing:g}, but {self.kind} knows none; sigmoid does")


@dataclass(frozen=True)
class OnPolicy:
    """How much of its training text a student writes itself, graded by the teacher (`train.rollouts`)."""

    share: float = setting(0.0, range=FRACTION)
    """Of the batches; 0 trains on the data alone."""
    prompt_tokens: int = setting(32, count=True, range=COUNTS)
    """Of a plain text, the first tokens that it goes on from; of a conversation, all before the first answer."""
    max_tokens: int = setting(128, count=True, range=(1, 1e6))
    """Of what it writes after each prompt."""
    temperature: float = setting(1.0, range=(0.0, 100.0))
    """At which it writes; 0 is greedy."""

    def __post_init__(self) -> None:
        check(self)
