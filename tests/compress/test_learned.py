"""Learned rounding of a layer: where it starts, what it may change, and what that brings."""

import copy
from dataclasses import replace

import pytest
import torch

from compress.quantize.calibrated import QuantizedLayerReport, quantize_layers
from compress.quantize.grid import Grid
from compress.quantize.learned import LearnedLinear, learn_rounding
from compress.quantize.methods import METHODS, Method
from compress.quantize.round_to_nearest import quantize_model
from compress.residual_stream import ResidualStream, layers_of
from model.config import MixtureOfDepths
from model.formats.base import IntegerFormat
from model.formats.compressed_tensors import Int4
from model.quantized import QuantizedLinear, quantized_layers
from model.transformer import Transformer
from tests.compress.conversions import texts
from tests.tiny import tiny_model

TEXT = [text for length in (150, 100, 150, 100) for text in texts(length)]
LEARNED, NEAREST = METHODS["autoround"], METHODS["weighted"]
FORMATS = pytest.mark.parametrize("format", [Int4(32), Int4(32, symmetric=False)])


def quantized(model: Transformer, method: Method, format: IntegerFormat) -> Transformer:
    return quantize_layers(copy.deepcopy(model), TEXT, lambda _: format, method)


def stream_errors(model: Transformer, rounded: Transformer) -> list[float]:
    """Squared distances of the two residual streams behind each layer, both from the same text."""
    pairs = [(ResidualStream(model, text), ResidualStream(rounded, text)) for text in TEXT]
    errors = []
    for dense_layer, layer in zip(layers_of(model), layers_of(rounded), strict=True):
        for dense, stream in pairs:
            dense.pass_on(dense_layer)
            stream.pass_on(layer)
        errors.append(sum(float((dense.value - stream.value).square().sum()) for dense, stream in pairs))
    return errors


@FORMATS
def test_without_steps_it_is_what_it_starts_from(format: IntegerFormat) -> None:
    model = tiny_model()
    learned, nearest = (quantized(model, method, format) for method in (replace(LEARNED, iterations=0), NEAREST))
    others = quantized_layers(nearest)
    assert all(
        torch.equal(one.weight.codes, others[name].weight.codes) for name, one in quantized_layers(learned).items()
    )


@FORMATS
def test_layers_come_closer_to_what_they_were(format: IntegerFormat) -> None:
    model = tiny_model()
    learned, nearest = (quantized(model, m, format) for m in (replace(LEARNED, iterations=100), NEAREST))
    pairs = zip(stream_errors(model, learned), stream_errors(model, nearest), strict=True)
    assert all(after < 0.7 * before for after, before in pairs)


@FORMATS
def test_no_level_is_further_than_one_from_the_nearest(format: IntegerFormat) -> None:
    model = tiny_model()
    moved = 0
    for name, layer in quantized_layers(quantized(model, replace(LEARNED, iterations=50), format)).items():
        levels, scales, zeros = format.unpack(layer.weight)
        nearest = Grid(scales, zeros, 16, 32).levels(model.get_parameter(f"{name}.weight"))
        distance = (levels.int() - nearest.int()).abs()
        assert distance.max() <= 1
        moved += int(distance.sum())
    assert moved > 1000


def test_a_start_that_cannot_be_improved_is_kept() -> None:
    """What is to come out is what comes out: any step away costs."""
    layer = layers_of(quantize_model(tiny_model(), Int4(32)))[0]
    before = {name: one.weight for name, one in quantized_layers(layer).items()}
    streams = [ResidualStream(tiny_model(), text) for text in TEXT]
    targets = [stream.behind(layer).detach() for stream in streams]
    dense = {name: weight.dequantize() for name, weight in before.items()}
    learn_rounding(layer, dense, streams, targets, iterations=5, scale_dtype=torch.float32)
    for name, one in quantized_layers(layer).items():
        kept = one.format.tensors(one.weight)
        assert all(torch.equal(kept[part], tensor) for part, tensor in one.format.tensors(before[name]).items())


@FORMATS
def test_what_is_learned_with_is_what_comes_out(format: IntegerFormat) -> None:
    chance = torch.Generator().manual_seed(0)
    dense = torch.randn(24, 64, generator=chance)
    linear = LearnedLinear(QuantizedLinear(format.quantize(dense), format), dense, torch.bfloat16)
    for parameter in linear.learned:
        parameter.data.add_(torch.rand(parameter.shape, generator=chance) - 0.5)
    with torch.no_grad():
        product = linear(torch.eye(64)).T
    exported = linear.exported()
    assert torch.equal(product, exported.dequantize())
    assert torch.equal(exported.scales, exported.scales.bfloat16().float())


def test_layers_in_other_formats_stay() -> None:
    model = tiny_model()
    reports: list[QuantizedLayerReport] = []
    mixed = quantize_layers(
        copy.deepcopy(model),
        TEXT,
        lambda name: Int4(32) if name.endswith("q_proj") else None,
        replace(LEARNED, iterations=5),
        on_layer=reports.append,
    )
    assert {name.split(".")[-1] for name in quantized_layers(mixed)} == {"q_proj"}
    assert all(0 < error < 0.1 for report in reports for error in report.errors.values())
    assert torch.equal(mixed.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("route", ["block", "attention", "mlp"])
def test_layers_with_routers_learn_too(route: str) -> None:
    routed = MixtureOfDepths(layers=(1,), capacity=0.5, thresholds=(0.0,), route=route)
    model = tiny_model(mixture_of_depths=routed)
    learned, nearest = (quantized(model, m, Int4(32)) for m in (replace(LEARNED, iterations=50), NEAREST))
    assert stream_errors(model, learned)[1] < stream_errors(model, nearest)[1]
