"""The serving form of a model: what it holds in memory while it is made, and new weights in the same memory."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.mod import add_routers
from compress.quantize.round_to_nearest import quantize_model
from model.config import MixtureOfDepths
from model.files.adapter import load_adapters, save_adapter
from model.formats.bitsandbytes import NF4
from model.lora import Lora, LoraConfig, attach_lora, detach_lora
from model.transformer import Transformer
from tests.tiny import full_logits, tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
# Large enough that oneDNN packs the weights in fp32 too, or C takes them in bf16.
LARGE = {"hidden_size": 512, "intermediate_size": 640, "num_query_heads": 8, "head_dim": 64}


def unfused(model: Transformer) -> list[weakref.ref[nn.Parameter]]:
    return [weakref.ref(m.weight) for m in model.model.layers.modules() if isinstance(m, nn.Linear)]


class Witness(Mapping[nn.Module, Lora]):
    """An adapter of nothing, which counts the unfused weights that live whenever it is asked for a layer's part."""

    def __init__(self, model: Transformer) -> None:
        self.weights = unfused(model)
        self.counts: list[int] = []

    def __getitem__(self, part: nn.Module) -> Lora:
        gc.collect()
        self.counts.append(sum(weight() is not None for weight in self.weights))
        raise KeyError(part)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_weights_die_layer_by_layer() -> None:
    """Seven a layer: while one is fused, its own and those of the layers to come are there, and no others."""
    model = tiny_model(num_layers=4)
    witness = Witness(model)
    model.fuse([witness])
    assert [max(witness.counts[start : start + 7]) for start in range(0, 28, 7)] == [28, 21, 14, 7]


def test_adapters_to_choose_from_keep_no_weight(tmp_path: Path) -> None:
    model = tiny_model()
    attach_lora(model, LoraConfig(rank=2))
    save_adapter(model, tmp_path / "0", LoraConfig(rank=2))
    detach_lora(model)
    weights, choices = unfused(model), load_adapters(model, [tmp_path / "0"])
    model.fuse(choices)
    gc.collect()
    assert len(choices[0]) == len(weights) == 14 and not any(weight() is not None for weight in weights)


def routed(seed: int) -> Transformer:
    mixture = MixtureOfDepths(layers=(1,), capacity=0.5, thresholds=(0.0,), route="block")
    model = add_routers(tiny_model(seed=seed), mixture)
    generator = torch.Generator().manual_seed(seed)
    model.model.layers[1].router.weight.data.normal_(generator=generator)
    return model.requires_grad_(False)


MODELS = {
    "llama": lambda seed: tiny_model(seed=seed),
    "tied biases": lambda seed: tiny_model("qwen2", seed=seed, tie_word_embeddings=True),
    "head norms": lambda seed: tiny_model("qwen3", seed=seed),
    "bf16": lambda seed: tiny_model(seed=seed).to(torch.bfloat16),
    "packed fp32": lambda seed: tiny_model(seed=seed, **LARGE),
    "routed": routed,
}


def randomized(model: Transformer) -> Transformer:
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("fused", [False, True])
def test_updated_weights_are_those_of_another_model(kind: str, fused: bool) -> None:
    """Some first, then all: to the bit what a fresh model with these weights computes, before and after fuse()."""
    model, other = MODELS[kind](1), randomized(MODELS[kind](2))
    new = {name: weight.detach().clone() for name, weight in other.named_parameters()}
    half = {name: weight for name, weight in new.items() if ".0." in name or "v_proj" in name or "norm" in name}
    mixed = MODELS[kind](1)
    mixed.load_state_dict(half, strict=False)
    if fused:
        model, mixed, other = model.fuse(), mixed.fuse(), other.fuse()
    model.update_weights(half)
    assert torch.equal(full_logits(model, TOKENS), full_logits(mixed, TOKENS))
    model.update_weights(new)
    assert torch.equal(full_logits(model, TOKENS), full_logits(other, TOKENS))


def test_new_weights_take_the_memory_of_the_old() -> None:
    """Where weights have no form of their own, as on a GPU: what a captured graph reads stays where it is."""
    model = tiny_model(tie_word_embeddings=True).fuse()

    def places() -> list[int]:
        attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
        products = [*attention.qkv.products, *attention.output.products, *mlp.gate_up.products, *mlp.down.products]
        tensors = [product.weight.held for product in products] + [model._prepared_head.held]
        return [tensor.data_ptr() for tensor in [*tensors, *model.parameters()]]

    before = places()
    model.update_weights(dict(tiny_model(seed=5, tie_word_embeddings=True).named_parameters()))
    assert places() == before


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"model.layers.7.self_attn.q_proj.weight": torch.zeros(64, 64)}, "has no tensor model.layers.7"),
        ({Q_PROJ: torch.zeros(64, 32)}, r"q_proj.weight cannot become torch.float32 \[64, 32\]; .* \[64, 64\]"),
        ({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}, r"cannot become torch.int8 \[64, 64\]"),
        ({"model.norm.weight": torch.zeros(63)}, r"norm.weight cannot become torch.float32 \[63\]"),
    ],
)
def test_what_does_not_fit_changes_nothing(fused: bool, weights: dict[str, Tensor], sentence: str) -> None:
    model = tiny_model()
    model = model.fuse() if fused else model
    before = full_logits(model, TOKENS)
    with pytest.raises(ValueError, match=sentence):
        model.update_weights({"model.norm.weight": torch.zeros(64)} | weights)
    assert torch.equal(full_logits(model, TOKENS), before)


@pytest.mark.parametrize("fused", [False, True])
def test_quantized_and_adapted_layers_are_refused(fused: bool, tmp_path: Path) -> None:
    def served(model: Transformer, choices: Any = ()) -> Transformer:
        return model.fuse(choices) if fused else model

    quantized = served(quantize_model(tiny_model(), NF4()))
    with pytest.raises(ValueError, match=r"q_proj.weight is quantized and cannot be replaced"):
        quantized.update_weights({Q_PROJ: torch.zeros(64, 64)})
    quantized.update_weights({"model.norm.weight": torch.zeros(64)})
    adapted = tiny_model()
    attach_lora(adapted, LoraConfig(rank=2))
    with pytest.raises(ValueError, match="has adapters"):
        served(adapted).update_weights({Q_PROJ: torch.zeros(64, 64)})
