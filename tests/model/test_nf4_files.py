"""Folders with NF4 weights: transformers with bitsandbytes opens ours, and we open theirs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.lora import inject
from compress.quantize.round_to_nearest import quantize_folder, quantize_model
from kernels.linear.quantization import quantize_nf4
from model.files.checkpoint import CheckpointError, is_quantized, load_model, save_model
from model.formats.bitsandbytes import NF4
from model.lora import LoraConfig
from model.quantized import QuantizedLinear, quantized_layers
from model.transformer import Transformer
from tests.tiny import full_logits, tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2", "llama-tied"])


def model_of(family: str) -> Transformer:
    """Rows of whole blocks: bitsandbytes' compiled code reads others wrongly."""
    name, _, tied = family.partition("-")
    return tiny_model(name, intermediate_size=128, tie_word_embeddings=bool(tied))


def logits_of_transformers(model: Any) -> Tensor:
    """In training mode, because bitsandbytes' inference on a CPU goes through bf16. There is no dropout."""
    model.train()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float()


def quantized_by_transformers(model: Transformer, folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    save_model(model, folder / "dense")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    return AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=config, dtype=torch.float32)


@FAMILIES
@pytest.mark.parametrize("double", [True, False])
def test_transformers_opens_ours(family: str, double: bool, tmp_path: Path) -> None:
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM

    save_model(model_of(family), tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "nf4", NF4(double), max_shard_bytes=60_000)
    ours = load_model(tmp_path / "nf4")
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", output_loading_info=True)
    assert not any(report.values())
    assert {name for name, m in theirs.named_modules() if isinstance(m, Linear4bit)} == quantized_layers(ours).keys()
    assert theirs.model.layers[0].mlp.up_proj.weight.quant_state.nested == double
    torch.testing.assert_close(full_logits(ours, TOKENS), logits_of_transformers(theirs), rtol=1e-4, atol=1e-4)


@FAMILIES
@pytest.mark.parametrize(
    "options",
    [
        {"bnb_4bit_use_double_quant": True},
        {"bnb_4bit_use_double_quant": False},
        {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "bfloat16"},
        {"bnb_4bit_quant_storage": "float32", "llm_int8_skip_modules": ["down_proj", "k_proj", "lm_head"]},
    ],
    ids=["double", "single", "bfloat16", "float32-skipped"],
)
def test_we_open_theirs(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = quantized_by_transformers(model_of(family), tmp_path, **options)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    ours = load_model(tmp_path / "theirs")
    skipped = options.get("llm_int8_skip_modules", ["lm_head"])
    assert quantized_layers(ours) and not any(name.endswith(tuple(skipped)) for name in quantized_layers(ours))
    torch.testing.assert_close(full_logits(ours, TOKENS), logits_of_transformers(theirs), rtol=1e-4, atol=1e-4)


def test_a_quantized_head_is_opened_too(tmp_path: Path) -> None:
    theirs = quantized_by_transformers(model_of("llama"), tmp_path, llm_int8_skip_modules=["nothing"])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    assert isinstance(ours.lm_head, QuantizedLinear)
    torch.testing.assert_close(full_logits(ours, TOKENS), logits_of_transformers(theirs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(full_logits(ours.fuse(), TOKENS), logits_of_transformers(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_read_and_written_again_holds_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantize_model(model_of("qwen2"), NF4()).to(dtype)
    save_model(model, tmp_path / "one")
    again = load_model(tmp_path / "one", dtype="auto")
    save_model(again, tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert again.dtype == dtype and torch.equal(full_logits(again, TOKENS), full_logits(model, TOKENS))
    assert is_quantized(tmp_path / "one")


@pytest.mark.parametrize("shape", [(7, 33), (5, 70), (300, 96)])
@pytest.mark.parametrize("double", [True, False])
def test_a_weight_of_any_shape_survives(shape: tuple[int, int], double: bool) -> None:
    weight = quantize_nf4(torch.randn(shape), double=double)
    tensors = NF4(double).to_files("w", weight, torch.bfloat16)
    again = NF4(double).from_files("w", torch.Size(shape), tensors.__getitem__)
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert tensors["w"].shape == ((shape[0] * shape[1] + 1) // 2, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(quantize_model(model_of("llama"), NF4()), tmp_path / "nf4")
    return tmp_path / "nf4"


def with_state(**fields: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{Q_PROJ}.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist())) | fields
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def without(ending: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update(tensors) or tensors.pop(Q_PROJ + ending)


def with_tensor(ending: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({Q_PROJ + ending: tensor})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_state(blocksize=128), "says blocksize 128; only 64 can be read"),
        (with_state(shape=[64, 65]), r"says shape \[64, 65\]; only \[64, 64\]"),
        (with_state(nested_blocksize=64), "says nested_blocksize 64"),
        (with_tensor(".quant_state.bitsandbytes__nf4", torch.tensor([1], dtype=torch.uint8)), "is not JSON"),
        (with_tensor(".quant_map", torch.zeros(16)), "quant_map holds another code"),
        (with_tensor(".nested_quant_map", torch.zeros(256)), "nested_quant_map holds another code"),
        (with_tensor(".absmax", torch.zeros(3, dtype=torch.uint8)), r"absmax holds \[3\] values; .* 64"),
        (with_tensor(".absmax", torch.zeros(64)), "absmax is torch.float32"),
        (with_tensor("", torch.zeros(4, 1, dtype=torch.uint8)), r"holds \[4\] bytes; .* 2048"),
        (without(".absmax"), r"lack the tensor .*absmax"),
        (without(""), f"lacks the tensor {Q_PROJ}"),
    ],
)
def test_what_is_wrong_with_a_weight_is_said(
    folder: Path, change: Callable[[dict[str, Tensor]], None], sentence: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        load_model(folder)


@pytest.mark.parametrize(
    ("quantization", "what"),
    [
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes, fp4"),
    ],
)
def test_other_quantizations_are_refused(folder: Path, quantization: dict[str, Any], what: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(CheckpointError, match=re.escape(f"is quantized ({what}); only plain")):
        load_model(folder)


def test_nf4_weights_need_a_config_that_says_so(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not have"):
        load_model(folder)


def test_a_model_with_an_adapter_is_not_saved_without_it(tmp_path: Path) -> None:
    model = quantize_model(model_of("llama"), NF4())
    inject(model, LoraConfig(rank=2))
    with pytest.raises(CheckpointError, match="unmerged adapter"):
        save_model(model, tmp_path)
