"""Weights moved to make up for the rounded layers before them."""

import copy

import pytest
import torch

from compress.quantize.calibrated import quantize_layers
from compress.quantize.gptq import compensation
from compress.quantize.methods import METHODS
from compress.quantize.propagation import corrected, moments_and_shift
from compress.quantize.round_to_nearest import QuantizationError
from compress.residual_stream import ResidualStream, layers_of
from model.config import MixtureOfDepths
from model.formats.compressed_tensors import Int4
from model.transformer import Transformer
from tests.compress.conversions import texts
from tests.tiny import tiny_model

CALIBRATION, OTHER = [*texts(300, 200), *texts(400, 100)], texts(250, 250)
FORMAT = Int4(32)


def inputs(tokens: int = 400, size: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """x° and x = x° with an error that depends on it and some that does not."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(tokens, size, generator=generator)
    mixed = dense @ (torch.eye(size) + 0.1 * torch.randn(size, size, generator=generator))
    return dense, mixed + 0.05 * torch.randn(tokens, size, generator=generator)


def test_at_full_strength_it_is_the_least_squares_solution() -> None:
    """Of W* x ≈ W x°; both sides in fp64 but ours, and with the damping added as rows of an identity."""
    dense, x = inputs()
    weight = torch.randn(7, 24, generator=torch.Generator().manual_seed(1))
    hessian, shift = x.T @ x, (dense - x).T @ x
    damping = (0.01 * hessian.diagonal().mean()).sqrt() * torch.eye(24)
    rows = torch.cat([x, damping]).double()
    wanted = torch.cat([dense @ weight.T, damping @ weight.T]).double()
    expected = torch.linalg.lstsq(rows, wanted).solution.T
    torch.testing.assert_close(
        corrected(weight, shift, compensation(hessian), 1.0).double(), expected, rtol=1e-4, atol=1e-4
    )


def test_strength_goes_from_the_weight_itself_to_there() -> None:
    dense, x = inputs()
    weight, inverse, shift = torch.ones(3, 24), compensation(x.T @ x), (dense - x).T @ x
    whole = corrected(weight, shift, inverse, 1.0)
    torch.testing.assert_close(corrected(weight, shift, inverse), (weight + whole) / 2)
    assert torch.equal(corrected(weight, torch.zeros_like(shift), inverse, 1.0), weight)


def test_text_that_overflows_is_refused() -> None:
    model = tiny_model()
    layers_of(model)[0].input_layernorm.weight.data.fill_(3e38)
    with pytest.raises(QuantizationError, match="not finite"):
        quantize_layers(model, CALIBRATION, lambda _: FORMAT, METHODS["qep+gptq"])


def test_the_shift_is_that_of_both_models_inputs() -> None:
    model = tiny_model()
    rounded = quantize_layers(
        copy.deepcopy(model), CALIBRATION, lambda n: FORMAT if ".0." in n else None, METHODS["round"]
    )
    streams = [[ResidualStream(one, text) for text in CALIBRATION] for one in (rounded, model)]
    for one, its_streams in zip((rounded, model), streams, strict=True):
        for stream in its_streams:
            stream.pass_on(layers_of(one)[0])
    x, dense = (
        torch.cat([stream.normed(layers_of(one)[1]) for stream in its_streams])
        for one, its_streams in zip((rounded, model), streams, strict=True)
    )
    name = "self_attn.q_proj"
    read = [stream.pass_on(layers_of(model)[1], [name])[name] for stream in streams[1]]
    moments, shift = moments_and_shift(name, layers_of(rounded)[1], streams[0], read)
    torch.testing.assert_close(moments.hessian, x.T @ x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shift, (dense - x).T @ x, rtol=1e-4, atol=1e-4)


def stream_error(model: Transformer, dense: Transformer) -> float:
    """Of what both have made of text that no method has seen, relative and squared."""
    error = total = 0.0
    for text in OTHER:
        streams = ResidualStream(model, text), ResidualStream(dense, text)
        for layer, dense_layer in zip(layers_of(model), layers_of(dense), strict=True):
            streams[0].pass_on(layer)
            streams[1].pass_on(dense_layer)
        error += float((streams[0].value - streams[1].value).square().sum())
        total += float(streams[1].value.square().sum())
    return error / total


def test_the_model_comes_closer_to_its_parent() -> None:
    dense = tiny_model(num_layers=4)
    errors = {
        method: stream_error(
            quantize_layers(copy.deepcopy(dense), CALIBRATION, lambda _: FORMAT, METHODS[method]), dense
        )
        for method in ("gptq", "qep+gptq")
    }
    assert errors["qep+gptq"] < 0.95 * errors["gptq"], errors


def test_layers_with_routers_are_left_as_they_are() -> None:
    routed = MixtureOfDepths(layers=(0, 1), capacity=0.5, thresholds=(0.0, 0.0), route="block")
    model = tiny_model(mixture_of_depths=routed)
    results = [
        quantize_layers(copy.deepcopy(model), CALIBRATION, lambda _: FORMAT, METHODS[method])
        for method in ("gptq", "qep+gptq")
    ]
    assert stream_error(results[1], results[0]) == 0.0
