"""AWQ and SmoothQuant: folded scales change nothing before rounding, and make rounding cost less."""

import copy

import pytest
import torch
from torch import Tensor

from compress.quantize.awq import awq_scales
from compress.quantize.gptq import output_error
from compress.quantize.grid import min_max
from compress.quantize.inputs import InputMoments, consumers_in, input_moments, projection
from compress.quantize.scaling import fold, shared_by_heads
from compress.quantize.smoothquant import smoothing_scales
from compress.residual_stream import ResidualStream, layers_of
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.compress.conversions import difference, texts
from tests.compress.quantizing import Scheme
from tests.tiny import tiny_model


def moments_of(x: Tensor) -> InputMoments:
    moments = InputMoments(x.shape[1], x.device)
    moments.add(x)
    return moments


def outliers(tokens: int = 300, columns: int = 64) -> Tensor:
    """Inputs of which two features are far larger than the others."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(0))
    x[:, [3, 40]] *= 30
    return x


def rounded(weight: Tensor) -> Tensor:
    grid = min_max(weight, Scheme(4, 32))
    return grid.values(grid.levels(weight))


def fold_everywhere(model: Transformer) -> None:
    """Random scales into every place of every layer that takes some."""
    chance = torch.Generator().manual_seed(2)
    for layer in layers_of(model):
        for name, consumers in consumers_in(layer).items():
            readers = [projection(layer, consumer) for consumer in consumers]
            scales = torch.rand(readers[0].in_features, generator=chance) * 4 + 0.2
            if name == "self_attn.o_proj":
                scales = shared_by_heads(scales, layer)
            fold(layer, name, scales, readers)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "smollm3", "mistral", "granite", "gemma2", "gemma3_text"]
)
def test_folding_leaves_the_outputs_as_they_are(family: str) -> None:
    model = tiny_model(family, output_bias=family == "llama", mlp_bias=family == "llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    scaled = copy.deepcopy(model)
    fold_everywhere(scaled)
    for before, after in zip(model.parameters(), scaled.parameters(), strict=True):
        assert before.shape == after.shape
    assert not torch.equal(model.model.layers[1].mlp.down_proj.weight, scaled.model.layers[1].mlp.down_proj.weight)
    assert difference(model, scaled) < 5e-6


def test_scales_shared_by_heads_are_means_over_a_group_of_heads() -> None:
    layer = layers_of(tiny_model())[0]  # 4 query heads, 2 KV heads, 16 wide
    features = torch.rand(64, generator=torch.Generator().manual_seed(0))
    heads = features.view(4, 16)
    expected = torch.stack([(heads[0] + heads[1]) / 2] * 2 + [(heads[2] + heads[3]) / 2] * 2)
    torch.testing.assert_close(shared_by_heads(features, layer), expected.flatten())


def test_moments_are_sums_over_the_tokens() -> None:
    x, y = outliers(50), outliers(20)
    moments = moments_of(x)
    moments.add(y)
    both = torch.cat((x, y))
    assert moments.tokens == 70
    assert relative_rms(moments.hessian, both.T @ both) < 1e-6
    assert relative_rms(moments.magnitudes, both.abs().sum(0)) < 1e-6
    assert torch.equal(moments.largest, both.abs().amax(0))


def test_moments_of_a_layer_are_those_of_what_its_projections_read() -> None:
    """Collected by hooks of this test on a plain forward pass, for each input of the second layer."""
    model, text = tiny_model(), texts(40, 30)[0]
    read: dict[str, Tensor] = {}
    layer = layers_of(model)[1]
    for name in consumers_in(layer):
        projection(layer, name).register_forward_pre_hook(
            lambda _, arguments, name=name: read.__setitem__(name, arguments[0])
        )
    stream = ResidualStream(model, text)
    for one in layers_of(model):
        stream.pass_on(one)
    again = ResidualStream(model, text)
    again.pass_on(layers_of(model)[0])
    expected = {name: x.T @ x for name, x in read.items()}
    found = input_moments([again], layer, list(consumers_in(layer)))
    assert found.keys() == expected.keys()
    for name, moments in found.items():
        assert moments.tokens == 70 and relative_rms(moments.hessian, expected[name]) < 1e-6


def test_awq_scales_up_what_large_inputs_go_through() -> None:
    x = outliers()
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)) * 0.05
    moments = moments_of(x)
    scales = awq_scales([(weight, rounded)], moments)
    others = torch.ones(64, dtype=torch.bool).index_fill(0, torch.tensor([3, 40]), False)
    assert scales[[3, 40]].min() > 1.5 * scales[others].max()
    plain = output_error(weight, rounded(weight), moments.hessian)
    assert output_error(weight, rounded(weight * scales) / scales, moments.hessian) < 0.55 * plain


def test_awq_never_errs_more_than_rounding() -> None:
    """Of all that read the input together; and with inputs all alike it changes nothing."""
    for seed in range(5):
        chance = torch.Generator().manual_seed(seed)
        weights = [torch.randn(16, 64, generator=chance) for _ in range(3)]
        moments = moments_of(torch.randn(200, 64, generator=chance) * torch.rand(64, generator=chance))
        scales = awq_scales([(weight, rounded) for weight in weights], moments)
        before = sum(output_error(w, rounded(w), moments.hessian) for w in weights)
        assert sum(output_error(w, rounded(w * scales) / scales, moments.hessian) for w in weights) <= before
    alike = moments_of(torch.ones(10, 64))
    assert torch.equal(awq_scales([(weights[0], rounded)], alike), torch.ones(64))


def test_awq_keeps_features_that_the_text_never_excites() -> None:
    x = outliers()
    x[:, 7] = 0
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    scales = awq_scales([(weight, rounded)], moments_of(x))
    assert torch.isfinite(scales).all() and scales.min() > 0


def test_smoothing_makes_inputs_and_weights_equally_hard() -> None:
    """At α = 1/2 the largest of each feature is the same before and behind the product."""
    x = outliers()
    weights = [torch.randn(48, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    scales = smoothing_scales(weights, x.abs().amax(0))
    columns = torch.cat(weights).abs().amax(0)
    torch.testing.assert_close((x / scales).abs().amax(0), columns * scales)
    expected = x.abs().amax(0) ** 0.85 / columns**0.15
    torch.testing.assert_close(smoothing_scales(weights, x.abs().amax(0), 0.85), expected)


def test_smoothing_helps_activations_rounded_token_by_token() -> None:
    x, weight = outliers(), torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    scales = smoothing_scales([weight], x.abs().amax(0))

    def by_eight(a: Tensor, w: Tensor) -> Tensor:
        a_step, w_step = (m.abs().amax(1, keepdim=True) / 127 for m in (a, w))
        return ((a / a_step).round() * a_step) @ ((w / w_step).round() * w_step).T

    plain, smooth = by_eight(x, weight), by_eight(x / scales, weight * scales)
    assert relative_rms(smooth, x @ weight.T) < 0.6 * relative_rms(plain, x @ weight.T)
