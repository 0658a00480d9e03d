"""The settings of a training run."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from train.schedule import SCHEDULES, ScheduleName

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]


@dataclass(frozen=True)
class TrainingConfig:
    """How to train; the pipeline's recipes fill it."""

    tokens: int
    """Tokens to train on; the number of steps is this divided by `batch_tokens`, rounded up."""
    batch_tokens: int = 4_096
    """Tokens of one optimizer step, over all processes."""
    micro_batch_tokens: int = 2_048
    """Most tokens that one process computes at a time: decides memory, not results."""
    learning_rate: float = 1e-3
    """The schedule's peak."""
    schedule: ScheduleName = "cosine"
    warmup_fraction: float = 0.05
    """Part of the steps in which the learning rate rises from zero."""
    decay_fraction: float = 0.2
    """Part of the steps in which `wsd` decays."""
    min_learning_rate_fraction: float = 0.1
    """Where the decay ends, as a fraction of the peak."""
    learning_rate_ratio: float = 1.0
    """LoRA+ (arXiv 2402.12354): the learning rate of an adapter's B over that of all others."""
    optimizer: OptimizerName = "adamw"
    """As in train/optimizer.py: moments in 32 or 8 bits; `paged` keeps them in host memory and the GPU free of them."""
    weight_decay: float = 0.0
    """On matrices only; norms and biases have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of the matrix products; weights, gradients and moments are fp32 either way."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more work."""
    evaluate_every_tokens: int | None = None
    """Tokens between evaluations during training; None evaluates after the last step only."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints; the last step and a stop always save one."""
    keep_checkpoints: int = 2
    seed: int = 0
    """Decides the order of the data."""

    def __post_init__(self) -> None:
        for name in (
            "tokens",
            "batch_tokens",
            "micro_batch_tokens",
            "learning_rate",
            "learning_rate_ratio",
            "max_grad_norm",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.batch_tokens % self.micro_batch_tokens:
            raise ValueError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of micro_batch_tokens "
                f"({self.micro_batch_tokens}): a step is a whole number of micro-batches"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; known schedules are {', '.join(SCHEDULES)}")
        if self.optimizer not in get_args(OptimizerName):
            raise ValueError(f"optimizer is {self.optimizer!r}; it can be {', '.join(get_args(OptimizerName))}")
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision is {self.precision!r}; it can be bf16 or fp32")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints must be at least 1, not {self.keep_checkpoints}")

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.batch_tokens)

    @property
    def micro_batches_per_step(self) -> int:
        return self.batch_tokens // self.micro_batch_tokens
