"""Adapters against the formulas written out with dense matrices."""

import math

import pytest
import torch
from torch import Tensor

from compress.lora import inject
from compress.quantize.round_to_nearest import quantize_model
from model.attention import PackedAttention
from model.formats.bitsandbytes import NF4
from model.linear import Embedding, Linear
from model.lora import EmbeddingLora, Lora, LoraConfig, LoraError, adapted_layers, attach_lora, detach_lora
from model.quantized import QuantizedLinear
from model.transformer import Transformer
from tests.tiny import full_logits, tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
KINDS = pytest.mark.parametrize("kind", ["dense", "nf4"])
DORA = pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])


def base(kind: str, family: str = "llama") -> Transformer:
    model = tiny_model(family)
    return model if kind == "dense" else quantize_model(model, NF4(kind == "nf4"))


def weight_of(layer: Linear | QuantizedLinear) -> Tensor:
    return layer.weight.dequantize() if isinstance(layer, QuantizedLinear) else layer.weight.detach()


def disturb(model: Transformer, size: float = 0.1) -> None:
    """An adapter as training leaves it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            for parameter in layer.lora.parameters():
                parameter += size * torch.randn(parameter.shape, generator=generator)


@KINDS
@DORA
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_fresh_adapter_changes_no_bit(kind: str, dora: bool, family: str) -> None:
    model = base(kind, family)
    before = full_logits(model, TOKENS)
    names = inject(model, LoraConfig(rank=4, dora=dora, dropout=0.5), seed=3)
    assert len(names) == 7 * model.config.num_layers
    assert torch.equal(full_logits(model, TOKENS), before)
    model.train()
    assert torch.equal(full_logits(model, TOKENS), before)


@KINDS
@pytest.mark.parametrize(("rslora", "scale"), [(False, 3 / 4), (True, 3 / 2)])
def test_an_adapted_layer_is_the_formula(kind: str, rslora: bool, scale: float) -> None:
    model = base(kind, "qwen2")
    attach_lora(model, LoraConfig(rank=4, alpha=3, rslora=rslora))
    disturb(model)
    layer = model.model.layers[0].self_attn.k_proj
    x = torch.randn(5, 64)
    update = scale * layer.lora.b @ layer.lora.a
    expected = x @ (weight_of(layer) + update).t() + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.lora.merged(weight_of(layer)), weight_of(layer) + update)


@KINDS
def test_dora_is_the_formula_and_its_norm_has_no_gradient(kind: str) -> None:
    model = base(kind, "qwen2")
    inject(model, LoraConfig(rank=4, alpha=3, dora=True))
    disturb(model)
    layer = model.model.layers[0].self_attn.k_proj
    a, b, m = (p.detach().clone().requires_grad_() for p in (layer.lora.a, layer.lora.b, layer.lora.magnitude))
    x = torch.randn(5, 64)
    whole = weight_of(layer) + 0.75 * b @ a
    merged = whole * (m / whole.norm(dim=1).detach())[:, None]
    expected = x @ merged.t() + layer.bias
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.lora.merged(weight_of(layer)), merged)
    weights = torch.randn(y.shape)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    for own, other in zip((layer.lora.a, layer.lora.b, layer.lora.magnitude), (a, b, m), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_dora_of_a_fresh_adapter_begins_with_the_row_norms() -> None:
    layer = Linear(64, 30, bias=False)
    lora = Lora(LoraConfig(rank=4, dora=True), 64, 30)
    lora.reset(torch.Generator())
    lora.reset_magnitude(layer)
    assert lora.magnitude is not None
    torch.testing.assert_close(lora.magnitude.detach(), layer.weight.detach().norm(dim=1))


def test_the_start_of_a_linear_adapter_is_kaiming_uniform() -> None:
    lora = Lora(LoraConfig(rank=64), 400, 30)
    lora.reset(torch.Generator().manual_seed(0))
    bound = math.sqrt(6 / ((1 + 5) * 400))
    assert bound * 0.99 < lora.a.abs().max() <= bound and not lora.b.any()
    assert lora.a.detach().std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_an_embedding_adapter_is_the_formula() -> None:
    embedding = Embedding(50, 16)
    embedding.lora = EmbeddingLora(LoraConfig(rank=4, alpha=2), 50, 16)
    tokens = torch.tensor([3, 49, 0, 3])
    before = embedding.weight[tokens]
    embedding.lora.reset(torch.Generator().manual_seed(0))
    assert torch.equal(embedding(tokens), before) and not embedding.lora.a.any()
    assert embedding.lora.b.std().item() == pytest.approx(1.0, abs=0.3)
    torch.nn.init.normal_(embedding.lora.a)
    merged = embedding.weight + 0.5 * (embedding.lora.b @ embedding.lora.a).t()
    torch.testing.assert_close(embedding(tokens), merged[tokens])
    torch.testing.assert_close(embedding.lora.merged(embedding.weight), merged)


def test_an_adapted_head_is_trained_through_its_weight() -> None:
    model = tiny_model()
    inject(model, LoraConfig(rank=4, targets=("lm_head",)))
    disturb(model)
    model.head_weight.square().sum().backward()
    assert model.lm_head is not None and model.lm_head.lora is not None
    assert model.lm_head.lora.b.grad.any() and model.lm_head.weight.grad is None
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(model.logits(hidden), model.lm_head(hidden), rtol=1e-5, atol=1e-5)


@DORA
def test_only_the_adapter_is_trained_and_training_reaches_every_part(dora: bool) -> None:
    model = base("nf4")
    inject(model, LoraConfig(rank=4, dora=dora, targets=("*_proj", "embed_tokens") if not dora else ("*_proj",)))
    disturb(model)
    model.train()
    logits = full_logits_with_gradient(model)
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora." in name)
        assert not parameter.requires_grad or (parameter.dtype == torch.float32 and parameter.grad.any()), name


def full_logits_with_gradient(model: Transformer) -> Tensor:
    attention = PackedAttention(model.config, torch.tensor([0, len(TOKENS)], dtype=torch.int32))
    return model.logits(model(torch.tensor(TOKENS), torch.arange(len(TOKENS)), attention))


@KINDS
def test_checkpointed_activations_give_the_same_gradients(kind: str) -> None:
    model = base(kind)
    inject(model, LoraConfig(rank=4))
    disturb(model)
    gradients = []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        full_logits_with_gradient(model).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 28
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@KINDS
@DORA
def test_autocast_trains_fp32_adapters_in_bf16(kind: str, dora: bool) -> None:
    model = base(kind)
    inject(model, LoraConfig(rank=4, dora=dora))
    disturb(model, 0.02)
    exact = full_logits_with_gradient(model).detach()
    with torch.autocast("cpu", torch.bfloat16):
        rough = full_logits_with_gradient(model)
        layer = model.model.layers[0].mlp.gate_proj
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16
    rough.float().square().mean().backward()
    assert (rough - exact).norm() / exact.norm() < 0.05
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ["dense", "nf4", "nf4 that stacks"])
@DORA
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("targets", [("*_proj",), ("q_proj", "v_proj", "lm_head"), ("model.layers.1.*",)])
def test_the_serving_form_keeps_the_logits(kind: str, dora: bool, family: str, targets: tuple[str, ...]) -> None:
    model = base(kind, family)
    attach_lora(model, LoraConfig(rank=4, dora=dora, targets=targets))
    disturb(model)
    expected = full_logits(model, TOKENS)
    torch.testing.assert_close(full_logits(model.fuse(), TOKENS), expected, rtol=1e-4, atol=1e-4)
    qkv = model.model.layers[0].self_attn.qkv
    assert qkv is not None and len(qkv.products) == (3 if kind == "nf4" else 1)


def test_bf16_serving_with_an_adapter_stays_close() -> None:
    model = base("nf4")
    attach_lora(model, LoraConfig(rank=4, dora=True))
    disturb(model, 0.02)
    expected = full_logits(model, TOKENS)
    rough = full_logits(model.to(torch.bfloat16).fuse(), TOKENS)
    assert 0.001 < (rough - expected).norm() / expected.norm() < 0.05


def test_patterns_select_layers() -> None:
    def names(*targets: str) -> list[str]:
        return attach_lora(tiny_model(), LoraConfig(rank=1, targets=targets))

    attention = "model.layers.{}.self_attn.{}_proj"
    assert names("q_proj") == [attention.format(n, "q") for n in (0, 1)]
    assert names("self_attn.[qk]_proj") == [attention.format(n, p) for n in (0, 1) for p in "qk"]
    assert names("model.layers.1.mlp.*", "lm_head") == [
        *(f"model.layers.1.mlp.{p}_proj" for p in ("gate", "up", "down")),
        "lm_head",
    ]
    assert names("embed_tokens") == ["model.embed_tokens"]
    with pytest.raises(LoraError, match=r"The target 'w1' matches no layer; there are .*q_proj"):
        names("q_proj", "w1")
    with pytest.raises(LoraError, match=r"'lm_head' matches no layer"):
        attach_lora(tiny_model(tie_word_embeddings=True), LoraConfig(targets=("lm_head",)))


def test_a_failed_injection_leaves_the_model_as_it_was() -> None:
    model = tiny_model()
    with pytest.raises(LoraError, match="matches no layer"):
        inject(model, LoraConfig(targets=("*_proj", "none")))
    with pytest.raises(LoraError, match="DoRA does not apply"):
        inject(model, LoraConfig(dora=True, targets=("*_proj", "embed_tokens")))
    assert not adapted_layers(model) and all(p.requires_grad for p in model.parameters())


def test_a_second_adapter_is_refused_and_detaching_restores_the_base() -> None:
    model = base("nf4")
    before = full_logits(model, TOKENS)
    attach_lora(model, LoraConfig(rank=2))
    disturb(model)
    with pytest.raises(LoraError, match="already has an adapter"):
        attach_lora(model, LoraConfig(rank=2))
    detach_lora(model)
    assert torch.equal(full_logits(model, TOKENS), before) and not adapted_layers(model)


def test_the_seed_decides_the_start() -> None:
    first, same, other = (tiny_model() for _ in range(3))
    for model, seed in ((first, 1), (same, 1), (other, 2)):
        attach_lora(model, LoraConfig(rank=2), seed=seed)
    starts = [model.model.layers[0].mlp.up_proj.lora.a for model in (first, same, other)]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rank": 0}, "rank is 0; it must lie between 1 and 65,536"),
        ({"alpha": 0.0}, "alpha is 0.0; it must lie between"),
        ({"dropout": 1.0}, "dropout is 1.0; it must lie between 0 and 0.99"),
        ({"init": "pissa"}, "init is 'pissa'"),
        ({"targets": ()}, "targets is empty"),
    ],
)
def test_a_configuration_that_makes_no_adapter_is_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(LoraError, match=sentence):
        LoraConfig(**changes)
