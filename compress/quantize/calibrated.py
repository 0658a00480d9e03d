"""A model quantized layer by layer on calibration text, each layer on what the quantized ones before it make of it.

Of each layer, in the order of computation, the inputs of its projections are summed up (`inputs.py`), and these
projections rounded, so that o_proj is rounded for what rounded q, k and v give. AWQ and SmoothQuant first scale the
whole layer (`scaling.py`). Weights may first be moved to make up for the layers before (`propagation.py`). Learned
rounding goes on from there, for a whole layer at once (`learned.py`). Memory holds one layer's sums above the
model and the residual streams; where weights are moved, also what one layer read of the text before rounding.

Legend: N output features, K input features.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.prune.depth import PackedBatch
from compress.quantize.awq import awq_scales
from compress.quantize.gptq import gptq_levels, output_error
from compress.quantize.grid import covered, diagonal_blocks, group_size, min_max, searched
from compress.quantize.inputs import (
    InputMoments,
    consumers_in,
    independent_inputs,
    input_moments,
    is_of_expert,
    projection,
)
from compress.quantize.learned import learn_rounding, output_errors
from compress.quantize.methods import Method
from compress.quantize.propagation import corrected, moments_and_shift
from compress.quantize.round_to_nearest import QuantizationError
from compress.quantize.scaling import BEHIND_NORMS, fold, shared_by_heads
from compress.quantize.smoothquant import smoothing_scales
from compress.residual_stream import ResidualStream, layers_of
from model.collectives import ALONE, Group
from model.formats.base import IntegerFormat, QuantizedMatrix, WeightFormat
from model.layers import DecoderLayer
from model.linear import Linear
from model.lora import adapted_layers
from model.quantized import quantized_layers, set_quantized
from model.routed import RoutedLayer
from model.transformer import Transformer

Choose = Callable[[str], WeightFormat[Any] | None]
"""The format of a linear layer by its name; None leaves it dense."""
log = logging.getLogger(__name__)
FEWEST_TOKENS = 128
_LONGEST_BLOCK = 256


@dataclass(frozen=True)
class QuantizedLayerReport:
    """One layer, done."""

    number: int
    errors: dict[str, float]
    """Of each quantized projection by its name in the model: squared error of its outputs over their square."""
    seconds: float


@torch.no_grad()
def quantize_layers(
    model: Transformer,
    batches: Sequence[PackedBatch],
    choose: Choose,
    method: Method,
    *,
    group: Group = ALONE,
    load_layer: Callable[[int], None] | None = None,
    restore: Callable[[int], bool] | None = None,
    on_layer: Callable[[QuantizedLayerReport], None] | None = None,
) -> Transformer:
    """Quantizes the decoder's projections of a model in memory, in place, and returns it.

    `group`: the processes that do the same, each with the batches dealt to it, of which it may have none; rounding that
    is learned wants all batches in one.
    `load_layer` is called before each layer, whose weights may lie on the meta device until then, so that memory holds
    one dense layer. `restore` is asked then, to go on after a break: it gives a layer that was quantized before its
    quantized weights and its other parameters, which scaling changes too, and returns whether it has. `on_layer` is
    called behind each layer that is quantized now. Raises QuantizationError for a model, text or choice that does not
    fit.
    """
    _check_model(model, method)
    _check_choice(model, choose, method)
    _check_text(batches, method, group, model.device)
    streams = [ResidualStream(model, batch) for batch in batches]
    dense_streams = [ResidualStream(model, batch) for batch in batches] if method.needs_parent else []
    rounding = _Rounding(choose, method, method.scale_dtype or model.dtype, group)
    for number in range(model.config.num_layers):
        if load_layer is not None:
            load_layer(number)
        layer = layers_of(model)[number]
        parent = _pass_on_parent(layer, dense_streams, method)
        if restore is None or not restore(number):
            report = _quantize_layer(layer, number, streams, rounding, parent)
            if on_layer is not None:
                on_layer(report)
        for stream in streams:
            stream.pass_on(layers_of(model)[number])
    return model


def _check_model(model: Transformer, method: Method) -> None:
    if model.config.experts is not None and method.scaling != "none":
        raise QuantizationError("Scales that a norm is divided by would change which experts are chosen.")
    if any(quantized_layers(layer) for layer in layers_of(model)):
        raise QuantizationError("The model is quantized already; quantize the one that it was made from.")
    if adapted_layers(model):
        raise QuantizationError("The model has an unmerged adapter; merge it before you quantize.")


def _check_choice(model: Transformer, choose: Choose, method: Method) -> None:
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear) or not name.endswith("_proj"):
            continue
        format = choose(name)
        if isinstance(format, IntegerFormat):
            _check_groups(name, layer, format)
        elif format is not None and method.needs_levels:
            raise QuantizationError(f"{name} is to be {format.title}, whose levels cannot be chosen; only round it.")


def _check_groups(name: str, layer: Linear, format: IntegerFormat) -> None:
    try:
        format.num_groups(layer.in_features)
    except ValueError as error:
        raise QuantizationError(f"{name} cannot be quantized: {error}") from error


def _check_text(batches: Sequence[PackedBatch], method: Method, group: Group, device: torch.device) -> None:
    if group.count > 1 and method.rounding == "learned":
        raise QuantizationError("Rounding is learned by one process.")
    tokens = int(group.sum(torch.tensor(sum(len(batch.tokens) for batch in batches), device=device)))
    if tokens < FEWEST_TOKENS:
        raise QuantizationError(
            f"The calibration text has {tokens} tokens; at least {FEWEST_TOKENS} are needed, and thousands are better."
        )


@dataclass(frozen=True)
class _Rounding:
    """How the layers of a model are rounded."""

    choose: Choose
    method: Method
    dtype: torch.dtype
    """Of scales in files."""
    group: Group


@dataclass(frozen=True)
class _Parent:
    """What a layer made of the text before any was rounded; one entry for each stream."""

    moved: Sequence[str]
    """The projections whose weights are moved."""
    inputs: Sequence[dict[str, Tensor]]
    """What those read, by name."""
    streams: Sequence[ResidualStream]
    """Behind the layer."""

    def outputs(self) -> list[Tensor]:
        """Fp32 [T, D]."""
        return [stream.value.float() for stream in self.streams]


def _pass_on_parent(layer: DecoderLayer, streams: Sequence[ResidualStream], method: Method) -> _Parent:
    """Not behind a router are weights moved: it chooses other tokens than it did."""
    moves = method.propagation and not isinstance(layer, RoutedLayer)
    names = [name for name in consumers_in(layer) if moves and not is_of_expert(name)]
    return _Parent(names, [stream.pass_on(layer, names) for stream in streams], streams)


def _quantize_layer(
    layer: DecoderLayer,
    number: int,
    streams: Sequence[ResidualStream],
    rounding: _Rounding,
    parent: _Parent,
) -> QuantizedLayerReport:
    began, prefix = time.monotonic(), f"model.layers.{number}."
    formats = {name: rounding.choose(prefix + name) for consumers in consumers_in(layer).values() for name in consumers}
    if rounding.method.scaling != "none":
        _scale_layer(layer, streams, formats, rounding)
    if rounding.method.rounding == "learned":
        dense = {name: projection(layer, name).weight.detach() for name, format in formats.items() if format}
        _quantize_projections(layer, prefix, formats, streams, rounding, parent)
        iterations = rounding.method.iterations
        learn_rounding(layer, dense, streams, parent.outputs(), iterations=iterations, scale_dtype=rounding.dtype)
        errors = {prefix + name: error for name, error in output_errors(layer, dense, streams).items()}
    else:
        errors = _quantize_projections(layer, prefix, formats, streams, rounding, parent)
    return QuantizedLayerReport(number, errors, time.monotonic() - began)


def _quantize_projections(
    layer: DecoderLayer,
    prefix: str,
    formats: dict[str, WeightFormat[Any] | None],
    streams: Sequence[ResidualStream],
    rounding: _Rounding,
    parent: _Parent,
) -> dict[str, float]:
    """Replaces them one input after another; returns the relative squared error of each, by its name in the model."""
    errors, consumers = {}, consumers_in(layer)
    for group in independent_inputs(layer):
        wanted = [name for name in group if any(formats[reader] for reader in consumers[name])]
        for name, inputs in _inputs_of(wanted, layer, prefix, streams, parent, rounding.group):
            for reader in consumers[name]:
                if (format := formats[reader]) is not None:
                    errors[prefix + reader] = _quantize_projection(layer, prefix, reader, format, inputs, rounding)
    return errors


@dataclass(frozen=True)
class _Inputs:
    """What some projections of a layer read."""

    moments: InputMoments
    shift: Tensor | None
    """By how much it is not what it was before rounding, as in `propagation.py`; None moves no weight."""

    def moved(self, weight: Tensor) -> Tensor:
        return weight if self.shift is None else corrected(weight, self.shift, self.moments.compensation)


def _inputs_of(
    names: Sequence[str],
    layer: DecoderLayer,
    prefix: str,
    streams: Sequence[ResidualStream],
    parent: _Parent,
    group: Group,
) -> Iterator[tuple[str, _Inputs]]:
    """Of inputs that do not depend on one another, each given away when its turn comes."""
    moved = [name for name in names if name in parent.moved]
    others = [name for name in names if name not in moved]
    for name in moved:
        inputs = _Inputs(*moments_and_shift(name, layer, streams, [read[name] for read in parent.inputs], group))
        yield name, _seen(name, inputs, layer, prefix)
    found = input_moments(streams, layer, others, group) if others else {}
    while found:
        name = next(iter(found))
        yield name, _seen(name, _Inputs(found.pop(name), None), layer, prefix)


def _seen(name: str, inputs: _Inputs, layer: DecoderLayer, prefix: str) -> _Inputs:
    """The same if any token was there. An expert may have had none, and is rounded for itself."""
    if inputs.moments.tokens:
        return inputs
    if not is_of_expert(name):
        raise QuantizationError(f"No token of the calibration text passes {prefix}{name}; it needs more text.")
    log.warning("No token of the calibration text passes %s%s, so it is rounded for itself.", prefix, name)
    linear = projection(layer, name)
    return _Inputs(InputMoments.of_none(linear.in_features, linear.device), None)


def _quantize_projection(
    layer: DecoderLayer, prefix: str, name: str, format: WeightFormat[Any], inputs: _Inputs, rounding: _Rounding
) -> float:
    """Replaces a projection; returns its relative squared error."""
    weight, moments = projection(layer, name).weight, inputs.moments
    if not torch.isfinite(weight).all():
        raise QuantizationError(f"{prefix}{name} has weights that are not finite.")
    try:
        weight = inputs.moved(weight)
        rounded = quantized_matrix(weight, format, moments, rounding.method, rounding.dtype)
    except ValueError as error:
        raise QuantizationError(f"{prefix}{name} cannot be quantized: {error}.") from error
    set_quantized(layer, name, rounded, format)
    whole = output_error(weight, torch.zeros_like(weight), moments.hessian)
    return output_error(weight, rounded.dequantize(), moments.hessian) / whole if whole else 0.0


def quantized_matrix(
    weight: Tensor, format: WeightFormat[Any], moments: InputMoments, method: Method, dtype: torch.dtype
) -> QuantizedMatrix:
    """A weight [N, K] in `format`; scales are numbers of `dtype`."""
    if not isinstance(format, IntegerFormat):
        return format.quantize(weight.to(dtype))
    if method.rounding == "gptq":
        importance = moments.compensation.importance
        grid = (
            searched(weight, format, importance, dtype) if method.grid == "searched" else min_max(weight, format, dtype)
        )
        return format.pack(gptq_levels(weight, grid, moments.compensation), grid.scales, grid.zeros)
    if method.grid == "searched":
        grid = searched(weight, format, _moments_of_groups(moments, format), dtype)
    else:
        grid = min_max(weight, format, dtype)
    return format.pack(grid.levels(weight), grid.scales, grid.zeros)


def _moments_of_groups(moments: InputMoments, format: IntegerFormat) -> Tensor:
    """As `searched` takes them; of long groups the diagonal alone, for the time that they take."""
    size = group_size(format, len(moments.hessian))
    return moments.importance if size > _LONGEST_BLOCK else diagonal_blocks(moments.hessian, size)


def _scale_layer(
    layer: DecoderLayer,
    streams: Sequence[ResidualStream],
    formats: dict[str, WeightFormat[Any] | None],
    rounding: _Rounding,
) -> None:
    """Folds scales into the layer for every input of which some reader is quantized."""
    inputs, method = consumers_in(layer), rounding.method
    for name, moments in input_moments(streams, layer, list(inputs), rounding.group).items():
        readers = [projection(layer, consumer) for consumer in inputs[name]]
        chosen = [formats[consumer] for consumer in inputs[name]]
        scales = None
        if not moments.tokens or not any(chosen):
            continue
        if method.scaling == "awq":
            pairs = zip(readers, chosen, strict=True)
            rounded = [(reader.weight, _plain(format)) for reader, format in pairs if format is not None]
            magnitudes = shared_by_heads(moments.magnitudes, layer) if name == "self_attn.o_proj" else None
            scales = awq_scales(rounded, moments, magnitudes)
        elif name in BEHIND_NORMS:
            scales = smoothing_scales([reader.weight for reader in readers], moments.largest)
        if scales is not None:
            fold(layer, name, scales, readers)


def _plain(format: WeightFormat[Any]) -> Callable[[Tensor], Tensor]:
    if isinstance(format, IntegerFormat):
        return lambda weight: covered(weight, format)
    return lambda weight: format.quantize(weight).dequantize()
