"""What is published means what it was made from: all finite, the same in the server, heads tied as they say."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from compress.lora import inject, merge, merge_requantized
from compress.quantize.round_to_nearest import quantize_model
from model.files.adapter import AdapterError, save_adapter
from model.files.checkpoint import CheckpointError, load_model, save_model
from model.formats.bitnet import Ternary
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Fp8, Int4, Int8
from model.lora import LoraConfig, adapted_layers
from model.quantized import quantized_layers
from model.transformer import Transformer
from pipeline.measure import parity
from pipeline.measure.parity import check_parity
from tests.model.test_routed import routed_model
from tests.serve.toys import toy_tokenizer
from tests.tiny import full_logits, tiny_model
from tests.trials import trials
from train.packing import Batch

FORMATS: dict[str, Any] = {
    "nf4": NF4(double=False),
    "nf4 double": NF4(double=True),
    "int4": Int4(),
    "int4 asymmetric": Int4(16, symmetric=False),
    "int8": Int8(),
    "fp8": Fp8(),
    "ternary": Ternary(),
}
FAMILIES = ("qwen2_moe", "gemma3_text", "llama", "qwen2", "qwen3", "mixtral", "gemma2", "olmo2")[: trials(2, 8)]
PROMPTS = trials(4, 64)
PROMPT_TOKENS = 32


def kinds_of(names: Iterator[str]) -> dict[str, str]:
    """One name of each kind of tensor: those of the last layer and of the last expert."""
    return {re.sub(r"\d+", "#", name): name for name in names}


def spoilt(tensor: Tensor, bad: float) -> Tensor:
    """With one value, in the middle, that is not a number of any use."""
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = bad
    return tensor


@pytest.mark.parametrize("family", [*FAMILIES, "routed"])
def test_no_kind_of_weight_is_saved_with_a_value_that_is_not_finite(family: str, tmp_path: Path) -> None:
    model = routed_model() if family == "routed" else tiny_model(family)
    kinds = kinds_of(name for name, _ in model.named_parameters())
    assert len(kinds) >= 9
    for name in kinds.values():
        parameter = model.get_parameter(name)
        whole = parameter.data
        for bad in (float("nan"), float("-inf"))[: trials(1, 2)]:
            parameter.data = spoilt(whole, bad)
            with pytest.raises(CheckpointError, match=f"^{re.escape(name)} holds values that are not finite"):
                save_model(model, tmp_path / name)
        parameter.data = whole
    save_model(model, tmp_path / "whole")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_no_number_of_a_quantized_weight_is_either(format: Any, tmp_path: Path) -> None:
    """Scales, their scales, offsets: whatever is no whole number, in memory and in the files."""
    model = quantize_model(tiny_model("llama"), format)
    name, layer = list(quantized_layers(model).items())[-1]
    weight = layer.weight
    numbers = {field.name: getattr(weight, field.name) for field in fields(weight)}
    floats = {key for key, value in numbers.items() if isinstance(value, Tensor) and value.is_floating_point()}
    assert floats
    for key in sorted(floats):
        whole = getattr(weight, key)
        for bad in (float("nan"), float("inf"))[: 1 if key == "codes" else 2]:  # e4m3 has no infinity
            object.__setattr__(weight, key, spoilt(whole, bad))
            with pytest.raises(CheckpointError, match=f"^{re.escape(name)}.weight holds values that are not finite"):
                save_model(model, tmp_path / f"{key}-{bad}")
            object.__setattr__(weight, key, whole)
    save_model(model, tmp_path / "whole")


def test_nor_one_of_an_adapter(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = LoraConfig(rank=2, dora=True)
    inject(model, config)
    kinds = kinds_of(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert len(kinds) >= 3
    for number, name in enumerate(kinds.values()):
        parameter = model.get_parameter(name)
        whole = parameter.data
        parameter.data = spoilt(whole, float("nan"))
        with pytest.raises(AdapterError, match="holds values that are not finite; nothing is saved"):
            save_adapter(model, tmp_path / str(number), config)
        parameter.data = whole


def test_a_server_of_few_positions_computes_it_as_far_as_they_go(tmp_path: Path) -> None:
    save_model(tiny_model("llama", max_position_embeddings=16), tmp_path)
    toy_tokenizer().save(tmp_path)
    found = check_parity(tmp_path, [prompts()], "cpu")
    assert found.tokens == parity.PARITY_SEQUENCES * 14 and found.passed  # prompts of 15 tokens and one more


@pytest.mark.parametrize("format", [None, *FORMATS.values()], ids=["dense", *FORMATS])
def test_the_server_computes_what_was_saved(format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PARITY_SEQUENCES", PROMPTS)
    monkeypatch.setattr(parity, "PARITY_TOKENS", PROMPT_TOKENS)
    model = tiny_model("llama", intermediate_size=128)
    if format is not None:
        quantize_model(model, format)
    save_model(model, tmp_path)
    toy_tokenizer().save(tmp_path)
    found = check_parity(tmp_path, [prompts()], "cpu")
    assert found.tokens == PROMPTS * (PROMPT_TOKENS - 1)
    assert found.max_difference <= 1e-4 and found.same_top == 1
    reloaded = quantized_layers(load_model(tmp_path))
    for name, layer in quantized_layers(model).items():
        assert torch.equal(layer.weight.dequantize(), reloaded[name].weight.dequantize())


def prompts() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (PROMPTS * PROMPT_TOKENS,), generator=generator)
    ends = torch.arange(0, len(tokens) + 1, PROMPT_TOKENS, dtype=torch.int32)
    return Batch(tokens, torch.arange(PROMPT_TOKENS).repeat(PROMPTS), ends, tokens, len(tokens), len(tokens))


@pytest.mark.parametrize("merged", [False, True], ids=["as it is", "merged"])
@pytest.mark.parametrize("format", [None, NF4()], ids=["dense", "nf4"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_heads_are_tied_as_the_configuration_says(tied: bool, format: Any, merged: bool, tmp_path: Path) -> None:
    model: Transformer = tiny_model("llama", tie_word_embeddings=tied, intermediate_size=128)
    if format is not None:
        quantize_model(model, format)
    if merged:
        inject(model, LoraConfig(rank=2))
        for layer in adapted_layers(model).values():
            torch.nn.init.normal_(layer.lora.b, std=0.1)
        model = merge(model, dtype=torch.float32) if format is None else merge_requantized(model, dtype=torch.float32)
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == tied
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tied)  # noqa: SIM118  -- not a mapping
    again = load_model(tmp_path)
    assert bool(quantized_layers(again)) == (format is not None)
    assert (again.head_weight.data_ptr() == again.get_parameter("model.embed_tokens.weight").data_ptr()) == tied
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    assert torch.equal(full_logits(again, tokens), full_logits(model, tokens))
