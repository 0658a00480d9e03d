"""All experts of a layer in one launch: what a fused model computes on a GPU is what it computes expert by expert."""

import dataclasses
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common.triton_support import runs_triton
from model.attention import PackedAttention
from model.collectives import Group
from model.experts_config import MixtureOfExperts
from model.files.checkpoint import load_config, load_model, save_model
from model.formats.registry import format_named
from model.fused import Fused
from model.linear import Linear
from model.lora import attach_lora
from model.lora_config import LoraConfig
from model.mlp import Experts
from model.quantized import QuantizedLinear, set_quantized
from model.tensor_parallel import Split
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.model.test_triton_end_to_end import BOUND, small_model, triton

TOKENS = list(range(40, 57))


def model_in(format: str, family: str) -> Transformer:
    """With all that is linear in a format."""
    kind, sizes = format_named(format.removesuffix(", rounded")), dict[str, Any](intermediate_size=160)
    if kind is not None and format.endswith("rounded"):
        kind = kind.rounded(64)
        sizes |= {"hidden_size": 64, "experts": MixtureOfExperts((0, 1), 5, 2, 128, normalizes=True)}
    model = small_model(family, **sizes)
    for name, layer in list(model.named_modules()):
        if kind is not None and isinstance(layer, Linear) and name != "lm_head":
            set_quantized(model, name, kind.quantize(layer.weight.detach()), kind)
    return model


def logits_of(model: Transformer) -> Tensor:
    device = model.device
    attention = PackedAttention(model.config, torch.tensor([0, len(TOKENS)], dtype=torch.int32, device=device))
    with torch.no_grad():
        hidden = model(torch.tensor(TOKENS, device=device), torch.arange(len(TOKENS), device=device), attention)
        return model.logits(hidden).cpu()


def experts_of(model: Transformer) -> list[Experts]:
    return [part for part in model.modules() if isinstance(part, Experts)]


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *((family, "none") for family in ("mixtral", "qwen2_moe", "qwen3_moe")),
        ("mixtral", "nf4"),
        ("qwen2_moe", "int4"),
    ],
)
def test_logits_are_those_of_one_expert_after_the_other(family: str, format: str) -> None:
    expected = logits_of(model_in(format, family).fuse())
    with triton() as device:
        model = model_in(format, family).to(device).fuse()
        assert all(experts.grouped is not None for experts in experts_of(model))
        assert model.can_be_captured
        assert relative_rms(logits_of(model), expected) < BOUND


def test_on_the_cpu_those_that_c_does_not_multiply_stay_apart() -> None:
    model = small_model("mixtral").fuse()
    assert all(experts.grouped is None for experts in experts_of(model))
    assert not model.can_be_captured


def on_cpu(model: Transformer) -> Transformer:
    model = model.fuse()
    if not model.can_be_captured:
        pytest.skip("C has no products with these weights on this processor")
    return model


@pytest.mark.parametrize(
    ("family", "format"),
    [("mixtral", "int4"), ("qwen2_moe", "int8"), ("qwen3_moe", "fp8"), ("mixtral", "int8, rounded")],
)
def test_on_the_cpu_bits_are_those_of_one_expert_after_the_other(family: str, format: str) -> None:
    model = on_cpu(model_in(format, family))
    together = logits_of(model)
    for experts in experts_of(model):
        experts.grouped = None
    assert torch.equal(together, logits_of(model))


def test_on_the_cpu_a_copy_reads_its_own_weights() -> None:
    model = on_cpu(model_in("fp8", "qwen3_moe"))
    copy, expected = deepcopy(model), logits_of(model)
    for module in model.modules():
        if isinstance(module, Fused):
            for product in module.products:
                product.weight.held.scales.zero_()
    assert not torch.equal(logits_of(model), expected)
    assert torch.equal(logits_of(copy), expected)


def test_on_the_cpu_weights_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.linear.dense._SMALLEST_FP32_WEIGHT_TO_PREPARE", 1)

    def rounded(seed: int) -> Transformer:
        model = small_model("mixtral", intermediate_size=64, seed=seed)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return model

    other = rounded(5)
    weights = {name: weight.detach().clone() for name, weight in other.named_parameters()}
    model = on_cpu(rounded(1))
    model.update_weights(weights)
    assert torch.equal(logits_of(model), logits_of(on_cpu(other)))


def test_experts_that_round_activations_do_so_on_a_gpu_too() -> None:
    model = model_in("int8, rounded", "mixtral")
    exact = deepcopy(model)
    for layer in exact.modules():
        if isinstance(layer, QuantizedLinear):
            layer.format = dataclasses.replace(layer.format, rounding=None)
    expected, other = logits_of(deepcopy(model).fuse()), logits_of(exact.fuse())
    with triton() as device:
        model = model.to(device).fuse()
        assert all(experts.grouped is None for experts in experts_of(model))
        # A product may end on the other side of a half, and is rounded otherwise by the next layer.
        assert relative_rms(logits_of(model), expected) < 0.2 * relative_rms(other, expected)


def test_weights_are_replaced_in_place() -> None:
    other = small_model("mixtral", seed=5)
    weights = {name: weight.detach().clone() for name, weight in other.named_parameters()}
    with triton() as device:
        model = small_model("mixtral").to(device).fuse()
        model.update_weights({name: weight.to(device) for name, weight in weights.items()})
        assert relative_rms(logits_of(model), logits_of(other)) < BOUND


def test_an_adapter_of_experts_keeps_them_apart() -> None:
    def adapted() -> Transformer:
        model = small_model("mixtral")
        attach_lora(model, LoraConfig(rank=4, targets=["down_proj"]), seed=1)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        return model

    expected = logits_of(adapted().fuse())
    with triton() as device:
        model = adapted().to(device).fuse()
        assert not model.can_be_captured
        assert relative_rms(logits_of(model), expected) < BOUND


class Recorded(Group):
    """One of two ranks, alone: it keeps what it would have added to the other's."""

    def __init__(self, index: int) -> None:
        super().__init__(index, 2)
        self.parts: list[Tensor] = []

    def sum(self, parts: Tensor) -> Tensor:
        self.parts.append(parts)
        return parts


def test_parts_of_ranks_are_added_once(tmp_path: Path) -> None:
    save_model(small_model("mixtral", num_kv_heads=2, intermediate_size=160), tmp_path)
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    with triton() as device, torch.no_grad():
        x = x.to(device)
        whole = experts_of(load_model(tmp_path, device=device).fuse())[0](x)
        parts = []
        for rank in (Recorded(0), Recorded(1)):
            model = load_model(tmp_path, device=device, layout=Split(rank, load_config(tmp_path))).fuse()
            parts.append(experts_of(model)[0](x))
            assert runs_triton(x) and len(rank.parts) == 1
    assert relative_rms(parts[0] + parts[1], whole) < BOUND
