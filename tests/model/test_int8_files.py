"""INT8 as compressed-tensors' pack-quantized: written, read, served and planned."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.lora import inject, merge_requantized
from compress.quantize.round_to_nearest import quantize_folder, quantize_model
from kernels.linear._quantized_tiles import tile_weight
from kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_int6, quantize_int8
from kernels.linear.quantized import stored_codes
from model.files.checkpoint import CheckpointError, load_model, save_model
from model.formats.compressed_tensors import Int6, Int8
from model.formats.convert import export_quantized
from model.lora import LoraConfig
from model.quantized import quantized_layers
from model.training_memory import Setup
from model.transformer import Transformer
from serve import LLM
from serve.sampling_params import SamplingParams
from tests.compare import relative_rms
from tests.model.test_lora import disturb
from tests.serve.toys import greedy_oracle, toy_tokenizer
from tests.tiny import full_logits, tiny_model
from train.config import TrainingConfig

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
INT8 = Int8()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def make_folder(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, format: Int6 | Int8 = INT8, **changes: Any
) -> Path:
    save_model(tiny_model(family, **changes).to(dtype), folder / "dense")
    quantize_folder(folder / "dense", folder / "int8", format)
    toy_tokenizer().save(folder / "int8")
    return folder / "int8"


def unpacked(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The dense weight by the layout's definition, one element at a time of every word."""
    words, rows, columns = tensors[f"{name}_packed"].long() & 0xFFFFFFFF, *tensors[f"{name}_shape"].tolist()
    values = torch.stack([(words >> 8 * part) & 255 for part in range(4)], dim=-1).reshape(rows, -1)[:, :columns]
    return (values - 128).float() * tensors[f"{name}_scale"].float()


def dense_twin(folder: Path, family: str = "llama", **changes: Any) -> Transformer:
    """A dense model, fp32, with the weights that the files stand for."""
    tensors, model = load_file(folder / "model.safetensors"), tiny_model(family, **changes)
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name].float() if name in tensors else unpacked(tensors, name)
    return model


@DTYPES
def test_the_files_are_what_the_layout_says(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, dtype=dtype)
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert entry == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    tensors = load_file(folder / "model.safetensors")
    assert Q_PROJ not in tensors and tensors["lm_head.weight"].dtype == dtype
    packed, scale, shape = (tensors[f"{Q_PROJ}_{ending}"] for ending in ("packed", "scale", "shape"))
    assert (packed.dtype, list(packed.shape)) == (torch.int32, [64, 16])
    assert (scale.dtype, list(scale.shape)) == (dtype, [64, 1])
    assert (shape.dtype, shape.tolist()) == (torch.int64, [64, 64])
    dense = load_file(tmp_path / "dense" / "model.safetensors")[Q_PROJ].float()
    # Half a step, and at the edge of the range what the scale lost in its dtype.
    step = scale.float() * (0.5 if dtype == torch.float32 else 1.01)
    assert bool(((unpacked(tensors, Q_PROJ) - dense).abs() <= step * (1 + 1e-4)).all())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_computes_with_what_the_files_stand_for(family: str, tied: bool, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, family, tie_word_embeddings=tied)
    model, twin = load_model(folder), dense_twin(folder, family, tie_word_embeddings=tied)
    assert len(quantized_layers(model)) == 14
    assert relative_rms(full_logits(model, TOKENS), full_logits(twin, TOKENS)) < 1e-5
    assert relative_rms(full_logits(model.fuse(), TOKENS), full_logits(twin, TOKENS)) < 1e-5


@DTYPES
def test_a_folder_read_and_written_again_holds_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    one = make_folder(tmp_path, dtype=dtype)
    model = load_model(one, dtype="auto")
    assert model.dtype == dtype
    save_model(model, tmp_path / "two")
    first, second = (load_file(path / "model.safetensors") for path in (one, tmp_path / "two"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("shape", "group"), [((7, 33), None), ((7, 33), 11), ((5, 70), None), ((64, 96), 32)])
def test_a_weight_of_any_shape_survives(shape: tuple[int, int], group: int | None) -> None:
    """Also where the scales are no numbers of the model's dtype."""
    weight, format = quantize_int8(torch.randn(shape), group=group), Int8(group)
    tensors = format.to_files("w", weight, torch.bfloat16)
    again = format.from_files("w", torch.Size(shape), tensors.__getitem__)
    assert torch.equal(again.codes, weight.codes) and torch.equal(again.scales, weight.scales)


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_fp8, quantize_int4, quantize_int6])
@pytest.mark.parametrize("shape", [(48, 128), (30, 70), (7, 33)])
def test_repacked_codes_can_be_read_back(quantize: Any, shape: tuple[int, int]) -> None:
    weight = quantize(torch.randn(shape))
    codes = stored_codes(tile_weight(weight))
    assert codes.dtype == weight.codes.dtype and torch.equal(codes.view(torch.uint8), weight.codes.view(torch.uint8))


def test_it_is_served(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    prompts, twin = [TOKENS, [7, 8, 9]], dense_twin(folder)
    answers = LLM(str(folder), dtype="float32", num_pages=32).generate(
        prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    )
    assert [answer.choices[0].token_ids for answer in answers] == [
        greedy_oracle(twin, prompt, 12) for prompt in prompts
    ]


def test_its_memory_is_planned_to_the_byte() -> None:
    model = quantize_model(tiny_model().to(torch.bfloat16), Int8())
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(
        part.nbytes for layer in quantized_layers(model).values() for part in (layer.weight.codes, layer.weight.scales)
    )
    training = TrainingConfig(tokens=64, batch_tokens=32, micro_batch_tokens=32)
    setup = Setup(model.config, training, adapter=LoraConfig(rank=2), quantization="int8")
    assert (
        setup.memory().weights
        == held
        == sum(p.nbytes for p in model.parameters())
        + sum(layer.weight_bytes for layer in quantized_layers(model).values())
    )


def test_adapters_train_on_it_and_merge_into_it() -> None:
    model = quantize_model(tiny_model(), Int8())
    inject(model, LoraConfig(rank=4))
    disturb(model)
    merged = merge_requantized(model, dtype=torch.float32)
    assert {layer.format for layer in quantized_layers(merged).values()} == {Int8()}
    assert 0 < relative_rms(full_logits(merged, TOKENS), full_logits(model, TOKENS)) < 0.05


@pytest.mark.parametrize("format", [Int8(), Int8(32), Int6(32)], ids=["rows", "groups", "int6"])
def test_transformers_opens_it(format: Int6 | Int8, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = make_folder(tmp_path, format=format, tie_word_embeddings=True)
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        logits = theirs(torch.tensor([TOKENS])).logits[0]
    assert relative_rms(full_logits(load_model(folder), TOKENS), logits) < 1e-5


def with_weights(**fields: Any) -> dict[str, Any]:
    entry = Int8().config_entry(torch.float32, ["lm_head"])
    group = entry["config_groups"]["group_0"]
    return entry | {"config_groups": {"group_0": group | {"weights": group["weights"] | fields}}}


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (with_weights(num_bits=3), "compressed-tensors, pack-quantized, 3 bits a channel"),
        (with_weights(strategy="block"), "compressed-tensors, pack-quantized, 8 bits a block"),
        (with_weights(symmetric=False), "compressed-tensors, pack-quantized, 8 bits a channel"),
        (with_weights() | {"format": "float-quantized"}, "compressed-tensors, float-quantized, 8 bits a channel"),
        (with_weights() | {"config_groups": {}}, "compressed-tensors, pack-quantized"),
    ],
)
def test_other_schemes_are_refused(entry: dict[str, Any], what: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    with pytest.raises(CheckpointError, match=re.escape(f"is quantized ({what}); only plain")):
        load_model(folder)


def add_cache_scales(folder: Path, scales: dict[str, Tensor], **scheme: Any) -> None:
    """As llm-compressor writes them."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False, **scheme
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")


def cache_scales() -> dict[str, Tensor]:
    """One for all heads in the first layer, one a head in the second."""
    shapes = {0: (1,), 1: (2, 1, 1)}
    return {
        f"model.layers.{layer}.self_attn.{part}_scale": (torch.arange(1.0, 3)[: shape[0]] * 0.01 * size).view(shape)
        for layer, shape in shapes.items()
        for part, size in (("k", 1), ("v", 3))
    }


def test_scales_of_an_fp8_cache_are_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    before = full_logits(load_model(folder), TOKENS)
    add_cache_scales(folder, cache_scales())
    model = load_model(folder)
    assert torch.equal(full_logits(model, TOKENS), before)
    found = torch.stack([torch.stack(layer) for layer in model.cache_scales])
    torch.testing.assert_close(found, torch.tensor([[[0.01] * 2, [0.03] * 2], [[0.01, 0.02], [0.03, 0.06]]]))
    logits = [
        LLM(str(folder), dtype="float32", num_pages=16, kv_cache_dtype=name)
        .generate([TOKENS], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
        .prompt_logprobs
        for name in ("auto", "fp8")
    ]
    assert logits[0] != logits[1]


@pytest.mark.parametrize("shared", [True, False], ids=["layers", "heads"])
def test_scales_of_an_fp8_cache_are_written(shared: bool, tmp_path: Path) -> None:
    """By export and by name; transformers reads the folder with them."""
    folder = make_folder(tmp_path, tie_word_embeddings=True)
    add_cache_scales(folder, {n: x[:1].flatten() for n, x in cache_scales().items()} if shared else cache_scales())
    export_quantized(folder, tmp_path / "exported", type="compressed-tensors")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert {tuple(x.shape) for name, x in found.items() if name.endswith("k_scale")} == {(1,) if shared else (2, 1, 1)}
    first, again = load_model(folder), load_model(tmp_path / "exported")
    for pair in zip(first.cache_scales, again.cache_scales, strict=True):
        assert all(torch.equal(*both) for both in zip(*pair, strict=True))
    save_model(first, tmp_path / "changed")
    assert load_model(tmp_path / "changed").cache_scales == ()
    with pytest.raises(CheckpointError, match="beside weights of compressed-tensors, not dense weights"):
        save_model(tiny_model(), tmp_path / "dense-scales", cache_scales=first.cache_scales)
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    scales = [layer.self_attn.k_scale.flatten().expand(2) for layer in theirs.model.layers]
    assert all(torch.equal(k, scale) for (k, _), scale in zip(first.cache_scales, scales, strict=True))


def test_scales_of_caches_that_are_wrong_or_of_another_scheme(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, scales = make_folder(tmp_path), cache_scales()
    add_cache_scales(folder, scales, type="int")
    with caplog.at_level(logging.INFO, "model.files.cache_scales"):
        assert load_model(folder).cache_scales == ()
    assert len([text for text in caplog.messages if "not of FP8 are not used" in text]) == 1
    wrong = "model.layers.1.self_attn.v_scale"
    for value in (torch.tensor([0.0]), torch.tensor([float("nan")]), torch.ones(3)):
        add_cache_scales(folder, {wrong: value})
        with pytest.raises(CheckpointError, match="v_scale must hold one positive number, or one for each of 2 heads"):
            load_model(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[wrong]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lack model\.layers\.1\.self_attn\.v_scale"):
        load_model(folder)


@pytest.mark.parametrize(
    ("ending", "tensor", "sentence"),
    [
        ("_shape", torch.tensor([64, 60]), r"shape says \[64, 60\]; .* \[64, 64\]"),
        ("_packed", torch.zeros(64, 8, dtype=torch.int32), r"is torch.int32 \[64, 8\], not torch.int32 \[64, 16\]"),
        ("_packed", torch.zeros(64, 16), "is torch.float32"),
        ("_scale", torch.zeros(64), r"is torch.float32 \[64\], not floats \[64, 1\]"),
        ("_scale", None, "lack the tensor .*scale"),
        ("_packed", None, "q_proj.weight"),
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
