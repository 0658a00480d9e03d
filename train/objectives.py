"""What a batch costs: language modelling, or distillation from a teacher, either of them with routers to train.

An objective is called with a model and a batch and returns sums over the batch's labels, never means: the loop adds
them up over micro-batches and processes and divides once. Both losses work on hidden states and the output projection,
so the logits of a whole batch never exist.

Legend: T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.losses.linear_cross_entropy import linear_cross_entropy
from kernels.losses.linear_distillation import DivergenceKind, linear_distillation
from kernels.losses.linear_sparse_distillation import linear_sparse_distillation
from model.attention import AttentionOf, PackedAttention
from model.context import ContextAttention
from model.layers import Routing
from model.routed import ExpertChoice
from model.trained_split import take_rows
from model.transformer import Transformer
from train.config import Loss
from train.packing import IGNORE_LABEL, Batch


class ObjectiveOutput(NamedTuple):
    """Sums over the labels of one batch."""

    loss_sum: Tensor
    """fp32 scalar, differentiable."""
    num_labels: int
    metrics: dict[str, Tensor]
    """fp32 scalars without gradient; the same names in every batch."""


class Objective(Protocol):
    """Called once a micro-batch, in the trainer's precision. `progress`: how much of training is done, from 0 to 1."""

    def __call__(self, model: Transformer, batch: Batch, progress: float) -> ObjectiveOutput: ...


class ObjectiveOfModel(nn.Module):
    """Model and objective as one module, so that everything differentiable happens inside the wrapped `forward`."""

    def __init__(self, model: Transformer, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch, progress: float) -> ObjectiveOutput:
        return self.objective(self.model, batch, progress)


def hidden_states(
    model: Transformer,
    batch: Batch,
    routing: Routing | None = None,
    attention: AttentionOf = PackedAttention,
    states: list[Tensor] | None = None,
) -> Tensor:
    """Final hidden states `[T, D]` of a packed batch; `states` takes those behind each layer.

    Of a part of one `attention` is that over what all processes have of it. Where losses are divided: of its own rows.
    """
    config, part = model.config, batch.part
    over = attention(config, batch.cu_seqlens) if part is None else ContextAttention(config, part)
    hidden = model(batch.tokens, batch.positions, over, routing, states=states)
    if (sharers := batch.sharers) is None:
        return hidden
    if states is not None:
        states[:] = [take_rows(one, sharers) for one in states]
    return take_rows(hidden, sharers)


class LanguageModelling:
    """Cross-entropy of the next token."""

    def __call__(
        self, model: Transformer, batch: Batch, progress: float = 1.0, routing: Routing | None = None
    ) -> ObjectiveOutput:
        hidden, cap = hidden_states(model, batch, routing), model.config.logit_soft_cap
        loss = linear_cross_entropy(hidden, model.head_weight, batch.labels, soft_cap=cap)
        return ObjectiveOutput(loss, batch.num_labels, {"cross_entropy": loss.detach()})


class Distillation:
    """A divergence from the teacher's distribution at every labelled position.

    The teacher sees the same flat batch in its own dtype (bf16 is enough: its rounding is far below the divergence of
    a student worth training) and never gets a gradient. It must lie on the student's device.
    """

    def __init__(self, teacher: Transformer, loss: Loss | None = None, matching: Sequence[int] | None = None) -> None:
        """`matching`: of each of the student's layers the teacher's behind which the stream is as it shall be there.

        By default they are spread evenly.
        """
        self.teacher, self.loss, self.matching = teacher.requires_grad_(False).eval(), loss or Loss(), matching
        if self.loss.kind == "cross_entropy":
            raise ValueError("cross_entropy is no divergence from a teacher; train with LanguageModelling")
        self.kind: DivergenceKind = self.loss.kind

    def __call__(
        self, model: Transformer, batch: Batch, progress: float = 1.0, routing: Routing | None = None
    ) -> ObjectiveOutput:
        learnt: list[Tensor] | None = [] if self.loss.hidden_weight else None
        taught: list[Tensor] | None = [] if self.loss.hidden_weight else None
        sums = linear_distillation(
            hidden_states(model, batch, routing, states=learnt),
            model.head_weight,
            teacher_states(self.teacher, batch, taught),
            self.teacher.head_weight,
            batch.labels,
            kind=self.kind,
            temperature=self.loss.temperature,
            alpha=self.loss.alpha,
            hard_weight=self.loss.hard_weight,
            soft_caps=(model.config.logit_soft_cap, self.teacher.config.logit_soft_cap),
        )
        metrics = {
            "kl": sums.kl,
            "cross_entropy": sums.cross_entropy,
            "total_variation": sums.total_variation,
            "agreement": sums.agreement,
        }
        if learnt is None or taught is None:
            return ObjectiveOutput(sums.loss, batch.num_labels, metrics)
        matching = self.matching or evenly(len(learnt), len(taught))
        distance = hidden_distance(learnt, [taught[layer] for layer in matching], batch.labels)
        loss = sums.loss + self.loss.hidden_weight * distance
        return ObjectiveOutput(loss, batch.num_labels, metrics | {"hidden_distance": distance.detach()})


def evenly(layers: int, of: int) -> tuple[int, ...]:
    """The last layer of each part, where so many layers are cut into parts of about equal size."""
    return tuple((number + 1) * of // layers - 1 for number in range(layers))


def hidden_distance(learnt: Sequence[Tensor], taught: Sequence[Tensor], labels: Tensor) -> Tensor:
    """How far streams `[T, D]` are from others, summed over the labelled positions: the mean over layers of 2 - 2 cos.

    That is the squared distance, a channel, of what the next layer's norm makes of both: their sizes, which differ by
    orders of magnitude between tokens and layers, do not count.
    """

    def of_layer(learnt: Tensor, taught: Tensor) -> Tensor:
        return (2 - 2 * F.cosine_similarity(learnt.float(), taught.float(), dim=-1)).where(labelled, 0.0).sum()

    labelled = labels != IGNORE_LABEL
    parts = [
        cast("Tensor", checkpoint(of_layer, *pair, use_reentrant=False)) for pair in zip(learnt, taught, strict=True)
    ]
    return torch.stack(parts).mean()


class StoredDistillation:
    """Forward KL from the distributions that a teacher has left beside the text; no teacher runs."""

    def __init__(self, loss: Loss | None = None) -> None:
        """Raises ValueError for a loss that is not linear in the teacher's distribution."""
        self.loss = loss or Loss()
        if not self.loss.is_linear:
            raise ValueError("stored distributions teach forward_kl at temperature 1 alone")

    def __call__(
        self, model: Transformer, batch: Batch, progress: float = 1.0, routing: Routing | None = None
    ) -> ObjectiveOutput:
        if batch.targets is None:
            raise ValueError("the batch has no stored distributions")
        sums = linear_sparse_distillation(
            hidden_states(model, batch, routing),
            model.head_weight,
            batch.labels,
            batch.targets,
            hard_weight=self.loss.hard_weight,
            soft_cap=model.config.logit_soft_cap,
        )
        return ObjectiveOutput(sums.loss, batch.num_labels, {"kl": sums.kl, "cross_entropy": sums.cross_entropy})


RoutableObjective = LanguageModelling | Distillation | StoredDistillation
"""Those that pass on how routers choose."""


def objective_of(
    loss: Loss, teacher: Transformer, matching: Sequence[int] | None = None
) -> LanguageModelling | Distillation:
    """The objective that `loss` names: the text alone, or a teacher's distribution at each of its positions."""
    return LanguageModelling() if loss.kind == "cross_entropy" else Distillation(teacher, loss, matching)


@torch.no_grad()
def teacher_states(teacher: Transformer, batch: Batch, states: list[Tensor] | None = None) -> Tensor:
    """Final hidden states `[T, D]` of a frozen model, in its own dtype whatever the precision around it.

    `states` takes those behind each layer.
    """
    with torch.autocast(batch.tokens.device.type, enabled=False):
        return hidden_states(teacher, batch, states=states)


@dataclass(frozen=True)
class RoutingConfig:
    """How routers learn; the algorithm is in `model.routed`."""

    capacity: float
    """The part of each document's tokens that a routed layer selects, once annealed."""
    anneal_fraction: float = 0.3
    """The part of training in which the capacity falls from 1, linearly."""
    auxiliary_weight: float = 0.1
    """Weight of the loss that teaches each router's `score > 0` to predict the selection."""

    def at(self, progress: float) -> float:
        """The capacity when this much of training is done."""
        annealed = min(1.0, progress / self.anneal_fraction) if self.anneal_fraction else 1.0
        return 1 - (1 - self.capacity) * annealed


class RoutedTraining:
    """Another objective under expert choice, plus the loss that makes its choice foreseeable token by token."""

    def __init__(self, objective: RoutableObjective, config: RoutingConfig) -> None:
        self.objective, self.config = objective, config

    def __call__(self, model: Transformer, batch: Batch, progress: float = 1.0) -> ObjectiveOutput:
        capacity = self.config.at(progress)
        choice = ExpertChoice(batch.cu_seqlens, len(batch.tokens), capacity)
        output = self.objective(model, batch, routing=choice)
        # Means over tokens, weighted by labels: what the loop divides by.
        auxiliary, share = choice.auxiliary_loss() / len(batch.tokens), output.num_labels
        metrics = {
            "capacity": torch.tensor(capacity),
            "auxiliary": auxiliary.detach(),
            "router_accuracy": choice.accuracy(),
        }
        metrics |= {f"passing_{layer}": (logits > 0).float().mean() for layer, logits in choice.logits.items()}
        return ObjectiveOutput(
            output.loss_sum + self.config.auxiliary_weight * share * auxiliary,
            output.num_labels,
            output.metrics | {name: (value * share).to(output.loss_sum.device) for name, value in metrics.items()},
        )
