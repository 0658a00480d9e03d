"""How much each layer's rounding would cost the model, and a bit width for each layer under a budget.

    KL to the model as it is, nats a token ≈ ½ Σ_n mean(g_n²) · (Δ H Δᵀ)_nn,   H = mean of x xᵀ,   Δ = W − Ŵ

g are gradients of log p(y) by the outputs of the layer, y drawn from the model's own predictions: their second moments
are its Fisher information, here without its correlations between tokens and outputs. One way back through the layers
gives each its g, one walk forward its H. Layers that read one input are served as one product, so they get one format.

Legend: T tokens, N output features, K input features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.backward import draws, layers_backwards
from compress.prune.depth import PackedBatch
from compress.quantize.inputs import InputMoments, consumers_in, consumers_of, input_moments, projection, reads_first
from compress.residual_stream import ResidualStream, passed_layers
from kernels.losses.linear_cross_entropy import linear_cross_entropy
from model.attention import PackedAttention
from model.collectives import ALONE, Group
from model.formats.base import WeightFormat
from model.layers import DecoderLayer
from model.linear import Linear
from model.tensor_parallel import LAYERS
from model.transformer import Transformer

Format = WeightFormat[Any]
Costs = Mapping[str, Mapping[Format, float]]
"""Nats a token by name of a projection and format."""
_ROWS_AT_ONCE = 256


def rounding_costs(
    model: Transformer, batches: Sequence[PackedBatch], candidates: Sequence[Format], group: Group = ALONE
) -> dict[str, dict[Format, float]]:
    """What the decoder's projections of a dense model would each cost alone, plainly rounded to each candidate.

    `group`: the processes that do the same, each with every n-th batch, of which it may have none.
    """
    gradients = output_gradients(model, batches, group)
    streams = [ResidualStream(model, batch) for batch in batches]
    costs: dict[str, dict[Format, float]] = {}
    for number, layer in enumerate(passed_layers(model)):
        for first, moments in input_moments(streams, layer, list(consumers_in(layer)), group).items():
            for name in consumers_of(first):
                full, weight = f"{LAYERS}{number}.{name}", projection(layer, name).weight.detach()
                costs[full] = {one: _cost(weight, one, moments, gradients[full]) for one in candidates}
        for stream in streams:
            stream.pass_on(layer)
    return costs


def _cost(weight: Tensor, format: Format, moments: InputMoments, gradients: Tensor) -> float:
    difference = weight.float() - format.quantize(weight).dequantize()
    errors = ((difference @ moments.hessian) * difference).sum(1) / max(moments.tokens, 1)
    return 0.5 * float(errors @ gradients)


def output_gradients(
    model: Transformer, batches: Sequence[PackedBatch], group: Group = ALONE, *, seed: int = 0
) -> dict[str, Tensor]:
    """Mean squares of g, fp32 [N], of each of the decoder's projections by name; over the tokens that it has seen."""
    layers = _projections(model)
    sums = {name: torch.zeros(layer.out_features, device=model.device) for name, layer in layers.items()}
    tokens = {name: torch.zeros((), device=model.device) for name in layers}

    def add(name: str, grad: Tensor) -> None:
        sums[name] += grad.float().square().sum(0)
        tokens[name] += len(grad)

    with _frozen(model):
        for turn, batch in enumerate(batches):
            attention = PackedAttention(model.config, batch.cu_seqlens.to(model.device))
            surprise = partial(_surprise, model, generator=draws(model, turn, group, seed))
            backwards = layers_backwards(model, batch, attention, surprise)
            for index, (layer, pass_back) in zip(range(model.config.num_layers)[::-1], backwards, strict=True):
                with _output_gradients(layer, f"{LAYERS}{index}.", add):
                    pass_back(attention)
    return {name: group.sum(sums[name]) / group.sum(tokens[name]).clamp(min=1) for name in layers}


def _projections(part: nn.Module) -> dict[str, Linear]:
    return {name: m for name, m in part.named_modules() if isinstance(m, Linear) and name.endswith("_proj")}


@contextmanager
def _output_gradients(layer: DecoderLayer, prefix: str, add: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within it, `add` is given the gradient by the output of each projection of the layer, and its name."""

    def observe(name: str, _: Any, __: Any, output: Tensor) -> None:
        output.register_hook(partial(add, prefix + name))

    hooks = [m.register_forward_hook(partial(observe, name)) for name, m in _projections(layer).items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _frozen(model: Transformer) -> Iterator[None]:
    """No gradients for weights meanwhile: they would take the memory of the model again."""
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, wanted in trained.items():
            parameter.requires_grad_(wanted)


def _surprise(model: Transformer, hidden: Tensor, *, generator: torch.Generator) -> Tensor:
    """−Σ log p(y) over the tokens, with y drawn from p, by hidden states `[T, D]`."""
    with torch.no_grad():
        pieces = [model.logits(piece).float().softmax(-1) for piece in hidden.split(_ROWS_AT_ONCE)]
        drawn = torch.cat([torch.multinomial(p, 1, generator=generator)[:, 0] for p in pieces])
    return linear_cross_entropy(hidden, model.head_weight, drawn, soft_cap=model.config.logit_soft_cap)


def choose_formats(costs: Costs, shapes: Mapping[str, tuple[int, int]], average_bits: float) -> dict[str, Format]:
    """A format for each projection, so that all cost little in at most `average_bits` a weight, scales included.

    `shapes` [N, K] by name. From the smallest format on, those that gain most for a byte get a larger one. ValueError
    where even the smallest take more.
    """
    budget = average_bits / 8 * sum(rows * columns for rows, columns in shapes.values())
    units = _units(costs)
    chosen = [min(costs[unit[0]], key=lambda format: _bytes(unit, format, shapes)) for unit in units]
    used = sum(_bytes(unit, format, shapes) for unit, format in zip(units, chosen, strict=True))
    if used > budget:
        least = average_bits * used / budget
        raise ValueError(f"{average_bits} bits a weight are less than the smallest formats take, {least:.2f}")
    while (step := _best_step(units, chosen, costs, shapes, budget - used)) is not None:
        number, format = step
        used += _bytes(units[number], format, shapes) - _bytes(units[number], chosen[number], shapes)
        chosen[number] = format
    return {name: format for unit, format in zip(units, chosen, strict=True) for name in unit}


def _units(costs: Costs) -> list[tuple[str, ...]]:
    """Projections that read one input, by their names in the model."""
    return [consumers_of(name) for name in costs if reads_first(name)]


def _bytes(unit: Sequence[str], format: Format, shapes: Mapping[str, tuple[int, int]]) -> int:
    return sum(format.num_bytes(shapes[name]) for name in unit)


def _best_step(
    units: Sequence[Sequence[str]],
    chosen: Sequence[Format],
    costs: Costs,
    shapes: Mapping[str, tuple[int, int]],
    left_bytes: float,
) -> tuple[int, Format] | None:
    """Which unit to give which larger format; None if none gains within the bytes that are left."""
    best, most = None, 0.0
    for number, (unit, now) in enumerate(zip(units, chosen, strict=True)):
        for format in costs[unit[0]]:
            more = _bytes(unit, format, shapes) - _bytes(unit, now, shapes)
            gain = sum(costs[name][now] - costs[name][format] for name in unit)
            if 0 < more <= left_bytes and gain / more > most:
                best, most = (number, format), gain / more
    return best
