"""Ternary weights: the published formula, transformers' own packing, and folders that both open."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.lora import inject
from compress.quantize.calibrated import quantize_layers
from compress.quantize.methods import METHODS
from compress.quantize.qat import Trained, to_quantized, train_through_rounding
from compress.quantize.round_to_nearest import QuantizationError, quantize_folder, quantize_model
from model.files.checkpoint import CheckpointError, load_model, save_model
from model.formats.bitnet import Ternary
from model.formats.registry import format_named
from model.lora import LoraConfig
from model.quantized import QuantizedLinear, quantized_layers
from model.training_memory import Rounding, Setup
from model.transformer import Transformer
from tests.compare import relative_rms
from tests.compress.conversions import texts
from tests.model.test_lora import disturb
from tests.tiny import full_logits, tiny_model
from train.config import TrainingConfig

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def with_biases(family: str = "qwen2") -> Transformer:
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(5))
    return model


def make_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    save_model(with_biases().to(dtype), folder / "dense")
    quantize_folder(folder / "dense", folder / "ternary", Ternary())
    return folder / "ternary"


def edit(folder: Path, **entry: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= entry
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_are_those_of_the_paper() -> None:
    dense = torch.randn(12, 40, generator=torch.Generator().manual_seed(0)) * 0.1
    weight = Ternary().quantize(dense)
    wide = dense.double()
    scale = wide.abs().mean()
    expected = (wide / scale).round().clamp(-1, 1)
    assert torch.equal(weight.levels().double() - 1, expected) and set(expected.unique().tolist()) == {-1, 0, 1}
    assert relative_rms(weight.dequantize(), expected * scale) < 1e-6
    assert torch.equal(weight.dequantize(rows=slice(3, 9)), weight.dequantize()[3:9])


def test_products_round_activations_as_the_paper_does() -> None:
    chance = torch.Generator().manual_seed(1)
    weight, x, bias = Ternary().quantize(torch.randn(8, 64, generator=chance)), torch.randn(5, 64), torch.randn(8)
    gamma = x.double().abs().amax(1, keepdim=True)
    rounded = (x.double() * 127 / gamma).round().clamp(-128, 127) * gamma / 127
    expected = rounded @ weight.dequantize().double().T + bias
    assert relative_rms(Ternary().product(x, weight, bias), expected) < 1e-6
    assert relative_rms(Ternary().times(x, weight), x @ weight.dequantize().T) < 1e-6
    assert relative_rms(Ternary().times(x, weight) + bias, expected) > 1e-4


def test_the_layout_is_that_of_transformers() -> None:
    from transformers.integrations.bitnet import pack_weights

    dense = torch.randn(12, 40, generator=torch.Generator().manual_seed(2))
    weight = Ternary().quantize(dense)
    tensors = Ternary().to_files("w.weight", weight, torch.float32)
    assert torch.equal(tensors["w.weight"], pack_weights(weight.levels().float() - 1))
    assert 1 / tensors["w.weight_scale"].item() == pytest.approx(dense.abs().mean().item(), rel=1e-6)
    assert Ternary().num_bytes(weight.shape) == sum(part.nbytes for part in Ternary().tensors(weight).values())


@pytest.mark.parametrize(
    ("linear_class", "dtype"),
    [("bitlinear", torch.float32), ("bitlinear", torch.bfloat16), ("autobitlinear", torch.float32)],
)
def test_transformers_opens_it_with_equal_logits(linear_class: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also in the other form of its files, where transformers' linear layer scales biases too: of none."""
    from transformers import AutoModelForCausalLM

    folder = make_folder(tmp_path, dtype)
    if linear_class == "autobitlinear":
        tensors = load_file(folder / "model.safetensors")
        other = {name: (1 / t.float() if name.endswith("_scale") else t) for name, t in tensors.items()}
        save_file({n: t * 0 if n.endswith("bias") else t for n, t in other.items()}, folder / "model.safetensors")
        edit(folder, linear_class=linear_class)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        theirs, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(report.values())
        logits = theirs(torch.tensor([TOKENS])).logits[0]
    assert relative_rms(full_logits(load_model(folder), TOKENS), logits) < 1e-5


@DTYPES
def test_a_folder_read_and_written_again_holds_the_same_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    one = make_folder(tmp_path, dtype)
    save_model(load_model(one, dtype="auto"), tmp_path / "two")
    logits = [full_logits(load_model(folder), TOKENS) for folder in (one, tmp_path / "two")]
    assert torch.equal(*logits)
    first, second = (load_file(folder / "model.safetensors") for folder in (one, tmp_path / "two"))
    assert {name: t.dtype for name, t in first.items()} == {name: t.dtype for name, t in second.items()}
    assert all(torch.equal(first[name], second[name]) for name in first if not name.endswith("_scale"))


@pytest.mark.parametrize("trained", ["scales", "low_rank", "all"])
def test_what_is_trained_is_what_a_folder_gives_back(trained: Trained, tmp_path: Path) -> None:
    """To the bit, with scales that files hold in bf16."""
    parent = with_biases()
    model = train_through_rounding(quantize_model(with_biases(), Ternary()), trained, dense=parent.get_parameter)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.1)
    logits = full_logits(model, TOKENS)
    assert relative_rms(logits, full_logits(quantize_model(parent, Ternary()), TOKENS)) > 0.05
    save_model(to_quantized(model), tmp_path / "trained")
    assert torch.equal(full_logits(load_model(tmp_path / "trained"), TOKENS), logits)


def test_scales_in_training_are_those_that_files_hold_in_their_dtype() -> None:
    model = train_through_rounding(quantize_model(with_biases(), Ternary()), "scales", scale_dtype=torch.bfloat16)
    for layer in quantized_layers(to_quantized(model)).values():
        assert isinstance(layer, QuantizedLinear)
        stored = Ternary().to_files("w", layer.weight, torch.bfloat16)["w_scale"]
        assert stored.dtype == torch.bfloat16 and torch.equal(1 / stored.float(), layer.weight.scale)


def test_its_training_is_planned_with_one_scale_a_matrix() -> None:
    model = quantize_model(tiny_model(), Ternary())
    formats: Any = {name: layer.format for name, layer in quantized_layers(model).items()}
    training = TrainingConfig(tokens=64, batch_tokens=32, micro_batch_tokens=32, precision="fp32")
    planned = Setup(model.config, training, rounding=Rounding("all", formats, 4)).memory()
    trained = [p for p in train_through_rounding(model, "all").parameters() if p.requires_grad]
    assert planned.gradients == sum(parameter.nbytes for parameter in trained)


def test_adapters_stand_beside_it() -> None:
    model = quantize_model(tiny_model(), Ternary())
    inject(model, LoraConfig(rank=4))
    before = full_logits(model, TOKENS)
    disturb(model)
    assert relative_rms(full_logits(model, TOKENS), before) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_choose_levels_are_refused(method: str) -> None:
    model, chosen = tiny_model(), METHODS[method]
    if not chosen.needs_levels:
        quantize_layers(model, texts(200), lambda _: Ternary(), chosen)
        assert {layer.format for layer in quantized_layers(model).values()} == {Ternary()}
        return
    with pytest.raises(QuantizationError, match=r"q_proj is to be TERNARY, whose levels cannot be chosen; only round"):
        quantize_layers(model, texts(200), lambda _: Ternary(), chosen)


def test_what_it_does_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^ternary has no option group\.$"):
        format_named("ternary", group=64)
    with pytest.raises(ValueError, match="holds rows in fours, not 6"):
        Ternary().quantize(torch.randn(6, 8))
    with pytest.raises(QuantizationError, match="TERNARY holds no embeddings"):
        quantize_model(tiny_model(), Ternary(), overrides={"embed_tokens": Ternary()})
    with pytest.raises(QuantizationError, match="quantized already"):
        quantize_model(quantize_model(tiny_model(), Ternary()), Ternary())


@pytest.mark.parametrize(
    ("entry", "what"),
    [({"quantization_mode": "online"}, "bitnet, online"), ({"use_rms_norm": True}, "bitnet, offline, norms before")],
)
def test_other_kinds_are_refused(entry: dict[str, Any], what: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    edit(folder, **entry)
    with pytest.raises(CheckpointError, match=re.escape(f"is quantized ({what}")):
        load_model(folder)


@pytest.mark.parametrize(
    ("ending", "tensor", "sentence"),
    [
        ("", torch.full((16, 64), 0b11, dtype=torch.uint8), "holds a level of 3"),
        ("", torch.zeros(64, 64), r"is torch.float32 \[64, 64\], not torch.uint8 \[16, 64\]"),
        ("_scale", torch.zeros(64), r"is torch.float32 \[64\], not floats \[1\]"),
        ("_scale", None, r"q_proj.weight with shape \[16, 64\]; config.json calls for \[64, 64\]"),
    ],
)
def test_what_is_wrong_with_a_weight_is_said(ending: str, tensor: Tensor | None, sentence: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(Q_PROJ + ending)
    if tensor is not None:
        tensors[Q_PROJ + ending] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        load_model(folder)
