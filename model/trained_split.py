"""A model whose layers are divided among ranks, as they are served (model/tensor_parallel.py), and trained.

    into attention and MLP      the same in all ranks; a gradient is the sum of what theirs are
    out of o and down           the sum of what ranks have computed; its gradient is everybody's
    final hidden states         each rank takes its share of rows, and their losses; gradients are gathered

So the residual stream is the same in all ranks, to the bit, and so are its gradients. Embedding and head are whole, and
the losses divided by rows. Of what all compute with (norms, routers) each rank has the whole gradient; of what only a
part of attention or MLP, or of the rows, has gone through (norms of heads, the shared side of adapters, KV heads that
several ranks hold, embedding and head) its share of a sum.

Source: Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.

Legend: T tokens, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.collectives import Group
from model.config import ModelConfig
from model.formats.base import WeightFormat
from model.layers import Routing
from model.linear import Linear
from model.lora import adapted_layers
from model.mesh import MeshError
from model.quantized import QuantizedLinear, quantized_layers
from model.tensor_parallel import LAYERS, Part, Split, obstacle, rank_config
from model.transformer import Transformer


class TrainedSplit(Split):
    """One rank's part of a model that is trained, or that teaches: of its layers."""

    def __init__(self, group: Group, config: ModelConfig) -> None:
        """`config` of the whole model; MeshError, one sentence, where the ranks do not divide it."""
        check_trained_split(config, group.count)
        super().__init__(group, config)

    def arrange(self, model: Transformer) -> Transformer:
        """Whoever has loaded it calls `connect`: quantized weights come with layers of their own."""
        return Transformer(part_config(self.config, self.group))

    def part(self, name: str, shape: Sequence[int]) -> Part:
        return super().part(name, shape) if name.startswith(LAYERS) else Part()

    def check_cut(self, layer: str, shape: Sequence[int], format: WeightFormat[Any]) -> None:
        """Raise MeshError where a block of a layer's weight [N, K] in the format would be cut."""
        try:
            self.part(f"{layer}.weight", shape).check(shape, format)
        except ValueError as reason:
            raise MeshError(f"tp_size {self.group.count} cannot cut {layer}: {reason}") from None


def part_config(config: ModelConfig, group: Group) -> ModelConfig:
    """Of the model that a rank's layers are, with the whole vocabulary."""
    return replace(rank_config(config, group), vocab_size=config.vocab_size)


def check_trained_split(config: ModelConfig, count: int, *, dora: bool = False, rounds: bool = False) -> None:
    """Raise MeshError, one sentence, unless so many ranks can train a model together, each a part of every layer.

    `dora`: beside it such an adapter is trained; `rounds`: it is trained through rounding.
    """
    reason = obstacle(config, count)
    if config.experts is not None:
        reason = "does not divide the experts of a model that is trained"
    if config.kind.joins_projections:
        reason = f"does not divide the joined projections of {config.family} in training"
    if dora:
        reason = "cuts the rows whose norms DoRA divides by"
    if rounds:
        reason = "cuts weights whose rounding is trained, which needs them whole"
    if reason is not None and count > 1:
        raise MeshError(f"tp_size {count} {reason}; shard over more processes instead (dp_shard_size)")


def check_parts(model: Transformer, count: int) -> None:
    """As `check_trained_split`, of a model with what it carries."""
    dora = any(layer.lora.magnitude is not None for layer in adapted_layers(model).values())
    rounds = any(getattr(part, "needs_whole_weight", False) for part in model.modules())
    check_trained_split(model.config, count, dora=dora, rounds=rounds)


def take_part(layer: nn.Module, prefix: str, split: TrainedSplit) -> None:
    """Leaves a layer of the model, whose names begin with `prefix`, with this rank's part of it; in place."""
    for name, parameter in layer.named_parameters(prefix):
        if (part := split.part(name, parameter.shape)) != Part():
            parameter.data = part.of(parameter.data).clone(memory_format=torch.contiguous_format)
    for name, linear in quantized_layers(layer).items():
        split.check_cut(f"{prefix}.{name}", linear.shape, linear.format)
        part = split.part(f"{prefix}.{name}.weight", linear.shape)
        linear.weight = weight = part.of_quantized(linear.weight, linear.format)
        linear.shape, linear.format = weight.shape, linear.format.of(weight)
    for part_of in layer.modules():
        if isinstance(part_of, Linear | QuantizedLinear):
            shape = part_of.weight.shape if isinstance(part_of, Linear) else part_of.shape
            part_of.out_features, part_of.in_features = shape


def connect(model: Transformer, group: Group) -> None:
    """Have the parts of a model compute together what the whole one does, and its gradients."""

    def enter(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_Entered.apply(arguments[0], group), *arguments[1:])

    def leave(linear: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor:
        if (bias := cast("Tensor | None", linear.bias)) is not None:  # each rank's share of it
            y = y - (bias * (1 - 1 / group.count)).to(y.dtype)
        return cast("Tensor", _Summed.apply(y, group))

    def share(module: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor:
        return cast("Tensor", _Scaled.apply(y, 1 / group.count))

    def route(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, positions, attention, *rest = arguments
        rest[:1] = [_entering(rule, group) for rule in rest[:1]]
        return tokens, positions, attention, *rest

    for layer in cast("Any", model.model.layers):
        for block, last in ((layer.self_attn, layer.self_attn.o_proj), (layer.mlp, layer.mlp.down_proj)):
            block.register_forward_pre_hook(enter)
            last.register_forward_hook(leave)
    model.model.embed_tokens.register_forward_hook(share)
    model.register_forward_pre_hook(route)


def taken_rows(group: Group, count: int) -> slice:
    """Of so many rows those that this rank takes; the last ones may get fewer."""
    width = -(-count // group.count)
    return slice(min(group.index * width, count), min((group.index + 1) * width, count))


def take_rows(rows: Tensor, group: Group) -> Tensor:
    """Of rows [T, D], the same in all ranks, those that this one takes; differentiable where all ranks call it."""
    return cast("Tensor", _Taken.apply(rows, group))


def is_everywhere(name: str) -> bool:
    """Whether all ranks have the whole gradient of a parameter, rather than shares of it."""
    shared = ("model.embed_tokens.", "lm_head.")
    return not name.startswith(shared) and ".self_attn." not in name and ".mlp." not in name


def _entering(rule: Routing | None, group: Group) -> Routing | None:
    """What a rule of routing makes of scores ends in the losses of all rows."""
    return None if rule is None else lambda layer, scores: rule(layer, cast("Tensor", _Entered.apply(scores, group)))


class _Entered(torch.autograd.Function):
    """Itself; its gradient is the sum of those in all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    """The sum of what all ranks have; its gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        return group.sum(y.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Scaled(torch.autograd.Function):
    """Itself; of its gradient a part."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, part: float) -> Tensor:
        ctx.part = part
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.part, None


class _Taken(torch.autograd.Function):
    """A rank's rows; their gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.count = group, len(rows)
        return rows[taken_rows(group, len(rows))].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        width = -(-ctx.count // ctx.group.count)
        padded = F.pad(grads[0], (0, 0, 0, width - len(grads[0])))
        return ctx.group.gather(padded).flatten(0, 1)[: ctx.count], None
