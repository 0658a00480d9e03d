"""Training through rounding: the exported product to the bit, the published gradients, and learning."""

import copy
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from compress.quantize.calibrated import quantize_layers
from compress.quantize.methods import METHODS
from compress.quantize.qat import (
    FakeQuantizedLinear,
    LowRankRoundedLinear,
    RoundedLinear,
    Trained,
    fake_quantize,
    quantized_copy,
    to_quantized,
    train_through_rounding,
)
from compress.quantize.round_to_nearest import QuantizationError, quantize_model
from kernels.linear.quantization import quantize_int4
from model.formats.base import GridFormat, IntegerFormat
from model.formats.bitnet import Ternary
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4, Int8
from model.layers import RMSNorm
from model.quantized import QuantizedLinear, quantized_layers
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.compress.conversions import TOKENS, texts
from tests.tiny import full_logits, tiny_model

TRAINED = get_args(Trained)
FOUND = {"levels", "zeros", "start"}
"""What rounding has found, and is the same however long a layer is trained."""
FORMATS = [Int4(32), Int4(16, False), Int4(), Int8(), Ternary()]


def a_layer(format: GridFormat[Any], rows: int = 24, columns: int = 96, *, bias: bool = True) -> QuantizedLinear:
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=chance) * 0.05
    offset = torch.nn.Parameter(torch.randn(rows, generator=chance)) if bias else None
    return QuantizedLinear(format.quantize(weight), format, offset)


def trainable(layer: QuantizedLinear, format: GridFormat[Any], trained: Trained) -> FakeQuantizedLinear:
    if trained == "scales":
        return FakeQuantizedLinear(layer, format, torch.float32)
    kind = RoundedLinear if trained == "all" else LowRankRoundedLinear
    return kind(layer, format, torch.float32)


def shaken(layer: FakeQuantizedLinear) -> FakeQuantizedLinear:
    """As training might leave it."""
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (one for name, one in layer.named_parameters() if name not in FOUND):
            size = parameter.abs().mean() + 0.01
            parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.2 * size)
    return layer


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_trained_is_what_is_exported(format: GridFormat[Any], trained: Trained) -> None:
    """The product bit for bit, before training and after."""
    layer = a_layer(format)
    x = torch.randn(17, 96, generator=torch.Generator().manual_seed(2))
    fake = trainable(layer, format, trained)
    assert torch.equal(fake(x), layer(x))
    y = shaken(fake)(x)
    assert relative_rms(y, layer(x)) > 0.05
    exported = QuantizedLinear(fake.exported(), format, fake.bias)
    assert torch.equal(exported(x), y)
    rounds_activations = not isinstance(format, IntegerFormat)
    assert relative_rms(x @ exported.weight.dequantize().T + fake.bias, y) < (0.02 if rounds_activations else 1e-6)


def test_products_in_several_blocks_are_the_exported_ones_too() -> None:
    """Above the size that the CPU expands at once."""
    layer = a_layer(Int4(64), 2200, 1024)
    x = torch.randn(40, 1024, generator=torch.Generator().manual_seed(2))
    assert torch.equal(trainable(layer, Int4(64), "all")(x), layer(x))


def test_scales_in_use_are_numbers_of_the_dtype_that_stores_them() -> None:
    format = Int4(32)
    fake = shaken(FakeQuantizedLinear(a_layer(format), format, torch.bfloat16))
    scales = format.unpack(fake.exported())[1]
    assert torch.equal(scales, scales.bfloat16().float()) and not torch.equal(scales, fake.scales)
    assert relative_rms(scales, fake.scales.detach()) < 4e-3


@pytest.mark.parametrize("symmetric", [True, False])
def test_rounded_values_are_those_of_the_kernels(symmetric: bool) -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    expected = quantize_int4(weight, group=32, symmetric=symmetric)
    zeros = torch.full((8, 3), 8.0) if expected.zeros is None else expected.zeros.float()
    found = fake_quantize(weight.view(8, 3, 32), expected.scales[..., None], zeros[..., None], 16).flatten(1)
    assert torch.equal(found, expected.dequantize())


def test_gradients_are_the_published_ones() -> None:
    """Straight through for what is not cut off; LSQ's for scales, written down element by element."""
    chance = torch.Generator().manual_seed(3)
    weight = (torch.randn(4, 2, 16, generator=chance)).requires_grad_()
    scales = (torch.rand(4, 2, 1, generator=chance) * 0.1 + 0.08).requires_grad_()
    zeros = torch.randint(5, 11, (4, 2, 1), generator=chance).float()
    grad = torch.randn(4, 32, generator=chance)
    fake_quantize(weight, scales, zeros, 16).backward(grad.view(4, 2, 16))
    assert weight.grad is not None and scales.grad is not None
    to_scales = torch.zeros(4, 2, 1)
    cut = 0
    for n in range(4):
        for g in range(2):
            for i in range(16):
                v, z, d = (weight[n, g, i] / scales[n, g, 0]).item(), float(zeros[n, g, 0]), grad[n, g * 16 + i]
                inside = -z <= v <= 15 - z
                cut += not inside
                assert weight.grad[n, g, i] == pytest.approx(float(d) if inside else 0.0, abs=1e-6)
                to_scales[n, g, 0] += d * (round(v) - v if inside else (-z if v < 0 else 15 - z))
    assert cut > 5
    assert relative_rms(scales.grad, to_scales) < 1e-5


@pytest.mark.parametrize("trained", TRAINED)
def test_gradients_of_a_layer_are_those_of_its_values(trained: Trained) -> None:
    """Of x, bias and everything trained: what autograd makes of a plain product with ŵ."""
    layer = shaken(trainable(a_layer(Int4(32)), Int4(32), trained))
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(4)).requires_grad_()
    inputs = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    weights = torch.randn(9, 24, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad((layer(x) * weights).sum(), inputs)
    expected = torch.autograd.grad(((x @ layer.values(layer.scales).T + layer.bias) * weights).sum(), inputs)
    assert len(found) == {"scales": 3, "all": 4, "low_rank": 5}[trained]
    for one, other in zip(found, expected, strict=True):
        assert relative_rms(one, other) < 1e-5


def test_gradients_of_scales_shrink_with_the_size_of_their_group() -> None:
    """LSQ: over √(g · highest level), so that scales move about as fast as weights."""
    layer = trainable(a_layer(Int4(32)), Int4(32), "all")
    scales = layer.scales.detach().requires_grad_()
    layer.values(scales).square().sum().backward()
    plain = layer.scales.detach().requires_grad_()
    zeros = torch.full_like(plain, 8.0)[..., None]
    assert isinstance(layer, RoundedLinear)
    fake_quantize(
        layer.before_rounding().detach().view(24, 3, 32), plain[..., None], zeros, 16
    ).square().sum().backward()
    assert scales.grad is not None and plain.grad is not None
    assert relative_rms(scales.grad * (32 * 15) ** 0.5, plain.grad) < 1e-6


def test_weights_start_as_near_to_the_dense_ones_as_the_levels_found_allow() -> None:
    """GPTQ's levels are kept, and most weights are where they were."""
    dense = tiny_model()
    model = quantize_layers(copy.deepcopy(dense), texts(200, 200), lambda _: Int4(32), METHODS["gptq"])
    rounded = {name: layer.weight.dequantize() for name, layer in quantized_layers(model).items()}
    before = full_logits(model, TOKENS)
    train_through_rounding(model, "all", dense=dense.get_parameter)
    assert torch.equal(full_logits(model, TOKENS), before)
    name = "model.layers.1.mlp.gate_proj"
    weight, layer = dense.get_parameter(f"{name}.weight"), model.get_submodule(name)
    assert isinstance(layer, RoundedLinear)
    start = layer.before_rounding()
    assert weight.isclose(start, rtol=1e-6).float().mean() > 0.4
    assert relative_rms(start, weight) < 0.7 * relative_rms(rounded[name], weight)


@pytest.mark.parametrize("trained", TRAINED)
def test_what_is_asked_for_is_trained_and_nothing_else(trained: Trained) -> None:
    model = train_through_rounding(quantize_model(tiny_model("qwen3"), Int4(32)), trained)
    wanted = {id(p) for part in model.modules() if isinstance(part, RMSNorm) for p in part.parameters()}
    for part in model.modules():
        if isinstance(part, FakeQuantizedLinear):
            fixed = FOUND if trained == "all" else FOUND | {"steps"}
            wanted |= {id(p) for name, p in part.named_parameters() if name not in fixed}
    assert {id(p) for p in model.parameters() if p.requires_grad} == wanted


def divergence(model: Transformer, targets: Tensor) -> Tensor:
    from model.attention import PackedAttention

    text = texts(60)[0]
    hidden = model(text.tokens, text.positions, PackedAttention(model.config, text.cu_seqlens))
    return torch.nn.functional.kl_div(model.logits(hidden).log_softmax(-1), targets, log_target=True, reduction="sum")


@pytest.mark.parametrize("trained", TRAINED)
def test_the_parent_teaches_back_what_rounding_lost(trained: Trained) -> None:
    """A few steps on one text; the exported model is what was trained, bit for bit."""
    parent = tiny_model()
    text = texts(60)[0].tokens.tolist()
    targets = full_logits(parent, text).log_softmax(-1)
    model = train_through_rounding(
        quantize_model(copy.deepcopy(parent), Int4(32)), trained, dense=parent.get_parameter, rank=4
    )
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    losses = []
    for _ in range(15):
        loss = divergence(model, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    after = full_logits(model, TOKENS)
    copied = quantized_copy(model).to(torch.float64).to(torch.float32)
    assert len(quantized_layers(copied)) == 14 and torch.equal(full_logits(copied, TOKENS), after)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in copied.parameters()}
    exported = to_quantized(model)
    assert len(quantized_layers(exported)) == 14
    assert torch.equal(full_logits(exported, TOKENS), after)


def test_what_cannot_be_trained_through_rounding_is_refused() -> None:
    with pytest.raises(QuantizationError, match="no quantized layers"):
        train_through_rounding(tiny_model(), "all")
    with pytest.raises(QuantizationError, match="only integers can be trained"):
        train_through_rounding(quantize_model(tiny_model(), NF4()), "scales")
