"""Folders in formats of compressed-tensors: embeddings and heads too, several formats in one, activations rounded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.lora import inject, merge, merge_requantized
from compress.quantize.round_to_nearest import (
    Overrides,
    QuantizationError,
    formats_of_layers,
    quantize_folder,
    quantize_model,
)
from kernels.linear._skinny_cpu import multiplies
from model.cost import planned_weight_bytes, weight_bytes
from model.files.checkpoint import CheckpointError, load_model, save_model
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Fp8, Int4, Int6, Int8
from model.lora import LoraConfig, adapted_layers
from model.quantized import quantized_layers
from model.transformer import Transformer
from serve import LLM
from serve.sampling_params import SamplingParams
from tests.compare import relative_rms
from tests.model.test_lora import disturb
from tests.serve.toys import greedy_oracle, toy_tokenizer
from tests.tiny import full_logits, tiny_model
from train.evaluate import compare, compute_teacher_states
from train.objectives import Distillation
from train.packing import Batch

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
EMBEDDING = "model.embed_tokens"
CASES: dict[str, tuple[Any, Overrides, bool]] = {
    "int4": (Int4(), {}, False),
    "int4 asymmetric": (Int4(16, symmetric=False), {}, False),
    "embedding and head in int8": (Int4(), {"embed_tokens": Int8(), "lm_head": Int8()}, False),
    "head in int8": (Int4(), {"lm_head": Int8()}, False),
    "fp8 and int8": (Fp8(), {"k_proj": Int8()}, True),
    "tied embedding in int8": (Int4(), {"embed_tokens": Int8()}, True),
    "everything in int4": (Int4(32), {"embed_tokens": Int4(32), "lm_head": Int4(32)}, False),
    "q, k and v differ": (Int4(), {"k_proj": Int8(), "*.0.self_attn.v_proj": Int4(16, symmetric=False)}, True),
    "int6 and what is between": (Int6(32), {"embed_tokens": Int6(), "down_proj": Int4(), "k_proj": Int8()}, True),
    "a dense layer": (Int8(), {"*.layers.0.*": None, "up_proj": Int4(None)}, False),
    "fp8": (Fp8(), {}, False),
    "fp8 and int4": (Int4(), {"down_proj": Fp8(), "embed_tokens": Fp8()}, True),
}
ROUNDED: dict[str, tuple[Any, Overrides, bool]] = {
    "int8 activations": (Int8.with_options(activations=True), {}, False),
    "fp8 activations": (Fp8.with_options(activations=True), {}, True),
    "int4 activations": (Int4.with_options(activations=True), {}, False),
    "int6 activations": (Int6.with_options(group=32, activations=True), {}, False),
    "int8 activations of groups": (Int8.with_options(group=32, activations=True), {}, False),
    "head of rounded activations": (Int4(), {"lm_head": Int8.with_options(activations=True)}, False),
    "int8 activations and int4": (Int8.with_options(activations=True), {"down_proj": Int4()}, False),
}


def make_folder(folder: Path, case: str, dtype: torch.dtype = torch.float32, family: str = "llama") -> Path:
    format, overrides, tied = (CASES | ROUNDED)[case]
    save_model(tiny_model(family, tie_word_embeddings=tied).to(dtype), folder / "dense")
    quantize_folder(folder / "dense", folder / "quantized", format, overrides=overrides)
    toy_tokenizer().save(folder / "quantized")
    return folder / "quantized"


def dense_twin(model: Transformer) -> Transformer:
    """With the weights that the quantized model stands for."""
    twin = tiny_model(model.config.family, tie_word_embeddings=model.config.tie_word_embeddings)
    for name, layer in quantized_layers(model).items():
        twin.get_submodule(name).weight.data = layer.weight.dequantize()
    return twin


def entry_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_read_computed_and_served(case: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, case, family="qwen2")
    model = load_model(folder)
    format, overrides, _ = CASES[case]
    assert {layer.format for layer in quantized_layers(model).values()} == {format, *overrides.values()} - {None}
    twin = dense_twin(model)
    assert relative_rms(full_logits(model, TOKENS), full_logits(twin, TOKENS)) < 1e-5
    (answer,) = LLM(str(folder), dtype="float32", num_pages=32).generate(
        [TOKENS], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    )
    assert answer.choices[0].token_ids == greedy_oracle(twin, TOKENS, 12)


@pytest.mark.parametrize("case", ROUNDED)
def test_rounded_activations_are_those_of_the_server(case: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, case)
    model = load_model(folder)
    rounding = relative_rms(full_logits(model, TOKENS), full_logits(dense_twin(model), TOKENS))
    assert 1e-4 < rounding < 0.1
    (answer,) = LLM(str(folder), dtype="float32", num_pages=32).generate(
        [TOKENS], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    )
    assert answer.choices[0].token_ids == greedy_oracle(model, TOKENS, 12)
    assert relative_rms(full_logits(load_model(folder).fuse(), TOKENS), full_logits(model, TOKENS)) < 1e-5


@pytest.mark.parametrize("case", ["int4", "head in int8", "fp8 and int4", "head of rounded activations"])
def test_logits_of_bf16_are_fp32(case: str, tmp_path: Path) -> None:
    model = load_model(make_folder(tmp_path, case, torch.bfloat16), dtype="auto")
    hidden = torch.randn(5, model.config.hidden_size).bfloat16()
    expected = hidden.double() @ model.head_weight.double().t()
    for fused in (False, True):
        logits = (model.fuse() if fused else model).logits(hidden)
        assert logits.dtype == torch.float32 and relative_rms(logits, expected) < 0.01
    if multiplies(torch.float32):
        assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("case", CASES | ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_read_and_written_again_is_the_same(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    one = make_folder(tmp_path, case, dtype)
    model = load_model(one, dtype="auto")
    assert model.dtype == dtype
    save_model(model, tmp_path / "two")
    first, second = (load_file(path / "model.safetensors") for path in (one, tmp_path / "two"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)
    assert entry_of(one) == entry_of(tmp_path / "two")


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as the library compressed-tensors reads targets, schemes and tensors, by name."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_targets
    from transformers import AutoConfig, AutoModelForCausalLM

    config, tensors = QuantizationConfig.model_validate(entry_of(folder)), load_file(folder / "model.safetensors")
    plain = AutoConfig.from_pretrained(folder)
    del plain.quantization_config
    with torch.device("meta"):
        modules = dict(AutoModelForCausalLM.from_config(plain).named_modules())
    schemes = {target: group for group in config.config_groups.values() for target in group.targets}
    weights = {}
    for name in [name for name in tensors if name.endswith("_scale")]:
        layer = name.removesuffix(".weight_scale")
        scheme = schemes[match_targets(layer, modules[layer], schemes)[0]]
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        own = {key.removeprefix(f"{layer}."): tensor for key, tensor in tensors.items() if key.startswith(f"{layer}.")}
        weights[layer] = compressor.decompress(own, scheme)["weight"]
    return weights


@pytest.mark.parametrize("case", CASES | ROUNDED)
def test_the_library_reads_the_same_weights(case: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder = make_folder(tmp_path, case)
    theirs, ours = decompressed(folder), quantized_layers(load_model(folder))
    assert theirs.keys() == ours.keys()
    for name, layer in ours.items():
        assert torch.equal(layer.weight.dequantize(), theirs[name].float()), name


# transformers 5.23 with compressed-tensors 0.20 opens no folder with a quantized embedding (it looks for a dense one)
# and none with packed zero points (it expects them unpacked).
@pytest.mark.parametrize("case", ["int4", "head in int8", "a dense layer", "fp8", "fp8 and int8", *ROUNDED])
def test_transformers_opens_it(case: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = make_folder(tmp_path, case)
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    ours, x = load_model(folder), torch.randn(1, 5, theirs.config.hidden_size)
    with torch.no_grad():
        logits, product = theirs(torch.tensor([TOKENS])).logits[0], theirs.model.layers[1].mlp.up_proj(x)[0]
        assert relative_rms(ours.model.layers[1].mlp.up_proj(x[0]), product) < 1e-6
    # Sums in another order round some number up and not down, and roundings feed on one another.
    assert relative_rms(full_logits(ours, TOKENS), logits) < (1e-5 if case in CASES else 1e-2)


def test_groups_name_their_layers(tmp_path: Path) -> None:
    entry = entry_of(make_folder(tmp_path, "fp8 and int4"))
    groups = {group["format"]: group["targets"] for group in entry["config_groups"].values()}
    assert entry["format"] == "mixed-precision"
    assert groups["pack-quantized"] == ["Linear"]
    assert groups["float-quantized"] == [EMBEDDING, *(f"model.layers.{n}.mlp.down_proj" for n in range(2))]
    assert entry["ignore"] == ["lm_head"]


def test_layers_that_differ_are_not_stacked(tmp_path: Path) -> None:
    layers: Any = load_model(make_folder(tmp_path, "q, k and v differ")).fuse().model.layers
    assert [len(layer.self_attn.qkv.products) for layer in layers] == [3, 3]
    assert [len(layer.mlp.gate_up.products) for layer in layers] == [1, 1]


def test_targets_are_found_by_name_pattern_and_class(tmp_path: Path) -> None:
    """As compressed-tensors finds them: exact names before patterns before classes."""
    folder = make_folder(tmp_path, "q, k and v differ")
    path = folder / "config.json"
    config, expected = json.loads(path.read_text()), full_logits(load_model(folder), TOKENS)
    for group in config["quantization_config"]["config_groups"].values():
        if any(target.endswith("k_proj") for target in group["targets"]):
            group["targets"] = [r"re:.*\.k_proj$"]
    path.write_text(json.dumps(config))
    assert torch.equal(full_logits(load_model(folder), TOKENS), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_takes_what_is_planned(tied: bool) -> None:
    dense = tiny_model(tie_word_embeddings=tied).to(torch.bfloat16)
    model = quantize_model(dense, Int4(), overrides={"embed_tokens": Int8()})
    embedding = quantized_layers(model)[EMBEDDING]
    assert model.dtype == torch.bfloat16 and embedding(torch.tensor([1, 2])).dtype == torch.bfloat16
    parameters = sum(p.nbytes for p in model.parameters())
    tensors = [t for layer in quantized_layers(model).values() for t in layer.format.tensors(layer.weight).values()]
    assert weight_bytes(model, torch.bfloat16) == parameters + sum(tensor.nbytes for tensor in tensors)
    formats = formats_of_layers(model.config, Int4(), {"embed_tokens": Int8()})
    assert weight_bytes(model, torch.bfloat16) == planned_weight_bytes(model.config, formats, torch.bfloat16)
    assert model.to(torch.float32).model.embed_tokens(torch.tensor([1])).dtype == torch.float32
    assert model.head_weight.shape == (model.config.vocab_size, model.config.hidden_size)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path / "dense")
    wrong: list[tuple[Any, Overrides, type[ValueError], str]] = [
        (NF4(), {"embed_tokens": NF4()}, QuantizationError, "NF4 holds no embeddings"),
        (Int4(), {"head": Int8()}, QuantizationError, "'head' names no layer"),
        (Int4(), {"k_proj": NF4()}, CheckpointError, "cannot hold weights in NF4 and in formats of compressed-tensors"),
        (NF4(), {"k_proj": Int4()}, CheckpointError, "one format"),
    ]
    for number, (format, overrides, kind, sentence) in enumerate(wrong):
        with pytest.raises(kind, match=re.escape(sentence)):
            quantize_folder(tmp_path / "dense", tmp_path / str(number), format, overrides=overrides)


def test_activations_with_a_fixed_scale_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "int8 activations")
    config = json.loads((folder / "config.json").read_text())
    activations = config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    activations |= {"strategy": "tensor", "dynamic": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="activations in 8 bits a tensor"):
        load_model(folder)


def test_adapters_go_over_a_quantized_embedding_and_head(tmp_path: Path) -> None:
    """Trained, merged, and quantized again; DoRA's row norms are those of the weight, whatever rounds activations."""
    model = load_model(make_folder(tmp_path, "embedding and head in int8"))
    before = full_logits(model, TOKENS)
    inject(model, LoraConfig(rank=2, targets=("q_proj", "embed_tokens", "lm_head")))
    torch.testing.assert_close(full_logits(model, TOKENS), before)
    disturb(model)
    merged = merge(model, dtype=torch.float32)
    assert not quantized_layers(merged)
    torch.testing.assert_close(full_logits(model, TOKENS), full_logits(merged, TOKENS), rtol=1e-4, atol=1e-4)
    again = merge_requantized(model, dtype=torch.float32)
    assert {n: layer.format for n, layer in quantized_layers(again).items()} == {
        n: layer.format for n, layer in quantized_layers(model).items()
    }
    rounded = load_model(make_folder(tmp_path / "rounded", "int8 activations"))
    before = full_logits(rounded, TOKENS)
    inject(rounded, LoraConfig(rank=2, dora=True))
    torch.testing.assert_close(full_logits(rounded, TOKENS), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["tied embedding in int8", "embedding and head in int8"])
def test_a_model_with_a_quantized_head_is_measured_and_distilled(case: str, tmp_path: Path) -> None:
    model, dense = load_model(make_folder(tmp_path, case)), load_model(tmp_path / "dense")
    batch = Batch(
        torch.tensor(TOKENS),
        torch.arange(len(TOKENS)),
        torch.tensor([0, len(TOKENS)], dtype=torch.int32),
        torch.tensor([*TOKENS[1:], -100]),
        len(TOKENS) - 1,
    )
    measured = compare(model, compute_teacher_states(dense, [batch]), [batch])
    ours, theirs = (torch.log_softmax(full_logits(one, TOKENS)[:-1].double(), -1) for one in (model, dense))
    expected = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
    assert measured.kl == pytest.approx(expected, rel=1e-4) and expected > 1e-3
    inject(model, LoraConfig(rank=2))
    output = Distillation(dense)(model, batch)
    output.loss_sum.backward()
    assert all(layer.lora.b.grad is not None for layer in adapted_layers(model).values())


def preset(name: str, **changes: Any) -> Any:
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme: Any = preset_name_to_scheme(name, ["Linear"])
    for key, value in changes.items():
        setattr(scheme.weights, key, value)
    return QuantizationScheme.model_validate(scheme.model_dump())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("W4A16", {"group_size": 32}),
        ("W4A16_ASYM", {"group_size": 32}),
        ("W8A16", {"strategy": "channel", "group_size": None}),
        ("W8A8", {}),
        ("FP8_DYNAMIC", {}),
    ],
)
def test_what_the_library_writes_opens_here(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Scheme, scales and zeros by compressed-tensors, written by transformers."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    save_model(tiny_model(), tmp_path / "dense")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    scheme = preset(name, **changes)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(theirs, config)
    for module in theirs.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        groups = module.weight.detach().unflatten(1, (-1, scheme.weights.group_size or module.weight.shape[1]))
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scales)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zeros)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    compressor = ModelCompressor.from_pretrained_model(theirs)
    compressor.compress_model(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    compressor.update_config(str(tmp_path / "theirs"))
    model = load_model(tmp_path / "theirs")
    assert len(quantized_layers(model)) == 14
    assert relative_rms(full_logits(model, TOKENS), expected) < 1e-4
