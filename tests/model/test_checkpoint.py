"""Model folders: what is written, what is refused, and that each refusal names the culprit."""

import json
import os
import pickle
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compress.quantize.round_to_nearest import quantize_model
from model.config import ConfigError, ModelConfig
from model.families import registry
from model.files.checkpoint import CheckpointError, load_config, load_model, open_layerwise, save_model
from model.formats.compressed_tensors import Int8
from model.quantized import quantized_layers
from tests.tiny import full_logits, tiny_config, tiny_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
FAMILIES = sorted(registry.FAMILIES)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = {name: tensor for name, tensor in (load_file(path) | changes).items() if tensor is not None}
    save_file(tensors, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tiny_model("llama"), tmp_path / "model")
    return tmp_path / "model"


def test_a_quantized_folder_is_opened_layer_by_layer(tmp_path: Path) -> None:
    model = quantize_model(tiny_model("qwen2"), Int8(), overrides={"embed_tokens": Int8()})
    save_model(model, tmp_path)
    opened, load_layer = open_layerwise(tmp_path)
    assert quantized_layers(opened) and not quantized_layers(opened.model.layers)
    load_layer(1)
    assert all(parameter.is_meta for parameter in opened.model.layers[0].parameters())
    load_layer(0)
    assert torch.equal(full_logits(opened, [1, 2, 3]), full_logits(model, [1, 2, 3]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_model_comes_back_bit_for_bit(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(family, tie_word_embeddings=tied, eos_token_ids=(1, 5))
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    with safe_open(tmp_path / WEIGHTS, framework="pt") as file:
        assert ("lm_head.weight" in set(file.keys())) is not tied
        assert file.metadata() == {"format": "pt"}


def test_shards_stay_below_the_limit_and_the_index_is_complete(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_model(model, tmp_path, max_shard_bytes=100_000)
    index = json.loads((tmp_path / INDEX).read_text())
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-0000{n}-of-00006.safetensors" for n in range(1, 7)]
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for path in shards:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(t.numel() * 4 for t in tensors.values()) <= 100_000
        assert all(index["weight_map"][name] == path.name for name in tensors)
    assert torch.equal(full_logits(load_model(tmp_path), [3, 4, 5]), full_logits(model, [3, 4, 5]))


def test_dtypes(tmp_path: Path) -> None:
    save_model(tiny_model("llama"), tmp_path, dtype=torch.bfloat16)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()} == {torch.bfloat16}
    for asked, expected in (("auto", torch.bfloat16), (torch.float32, torch.float32), (torch.float16, torch.float16)):
        model = load_model(tmp_path, dtype=asked)  # type: ignore[arg-type]
        assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_written_files_can_be_read_by_others(folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_end_of_text_tokens_of_the_generation_config_go_first(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[7, 8])
    assert load_config(folder).eos_token_ids == (7, 8)
    (folder / "generation_config.json").unlink()
    assert load_config(folder).eos_token_ids == (1,)


def test_loading_holds_the_model_once(tmp_path: Path) -> None:
    """The weights own their memory: the file can vanish, and nothing else keeps a copy of them."""
    save_model(tiny_model("llama"), tmp_path)
    model = load_model(tmp_path)
    before = full_logits(model, [1, 2, 3])
    (tmp_path / WEIGHTS).write_bytes(b"")
    assert torch.equal(full_logits(model, [1, 2, 3]), before)


# What is wrong with the tensors


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", K_PROJ, "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_never_saved(name: str, bad: float, tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = bad
    with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
        save_model(model, tmp_path)


def test_a_value_too_large_for_the_saved_dtype_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter(K_PROJ)[0, 0] = 1e6
    with pytest.raises(CheckpointError, match=r"k_proj.weight holds values that are not finite in torch.float16"):
        save_model(model, tmp_path, dtype=torch.float16)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{K_PROJ: None})
    with pytest.raises(CheckpointError, match=rf"lacks the tensor {K_PROJ}\."):
        load_model(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"holds the tensor model.layers.0.self_attn.q_proj.bias, which a llama"):
        load_model(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{K_PROJ: torch.zeros(16, 64)})
    with pytest.raises(CheckpointError, match=rf"{K_PROJ} with shape \[16, 64\]; config.json calls for \[32, 64\]"):
        load_model(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{K_PROJ: torch.zeros(32, 64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=rf"{K_PROJ} in torch.int8"):
        load_model(folder)


def test_rotary_frequencies_of_early_checkpoints_are_skipped(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_model(folder)


def test_a_tied_head_may_be_repeated_but_not_differ(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    save_model(model, tmp_path)
    embedding = model.head_weight.detach().clone()
    edit_tensors(tmp_path / WEIGHTS, **{"lm_head.weight": embedding})
    assert torch.equal(load_model(tmp_path).head_weight, embedding)
    embedding[5, 5] += 1
    edit_tensors(tmp_path / WEIGHTS, **{"lm_head.weight": embedding})
    with pytest.raises(CheckpointError, match=r"lm_head.weight with other values than model.embed_tokens.weight"):
        load_model(tmp_path)


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    edit_tensors(folder / WEIGHTS, **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head.weight"):
        load_model(folder)


def test_a_fused_model_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fuse\(\)"):
        save_model(tiny_model("llama").fuse(), tmp_path)


def test_weights_are_not_mixed_with_older_ones(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds weights"):
        save_model(tiny_model("llama", seed=1), folder)


# What is wrong with the files


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"holds neither {WEIGHTS} nor {INDEX}"):
        load_model(folder)


def test_a_folder_with_traps_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """Code and pickles beside a model are never touched, and never a substitute for its weights."""
    sprung = tmp_path / "sprung"
    trap = f"open({str(sprung)!r}, 'w').close()"
    (folder / "modeling_custom.py").write_text(trap)
    (folder / "pytorch_model.bin").write_bytes(b"cbuiltins\nexec\n(V" + trap.encode() + b"\ntR.")
    pickle.loads((folder / "pytorch_model.bin").read_bytes())  # noqa: S301 - the trap works
    assert sprung.exists()
    sprung.unlink()
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_custom.Custom"})
    load_model(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load_model(folder)
    assert not sprung.exists()


def test_a_folder_without_a_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        load_model(folder)
    (folder / "config.json").write_text("[1, 2")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json must hold a JSON object"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "names the architecture GPT2LMHeadModel; supported are LlamaFor"),
        ({"architectures": None, "model_type": "mamba"}, "names the architecture mamba"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"head_dim": 15}, "head_dim must be even"),
    ],
)
def test_an_unknown_configuration_is_refused_by_field(changes: dict[str, Any], sentence: str, folder: Path) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_model(folder)
    assert str(caught.value).startswith(f"In {folder}, ")


def test_a_missing_field_is_named(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    del raw["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="intermediate_size"):
        load_model(folder)


def test_unknown_rope_scaling_is_refused() -> None:
    raw = tiny_config("llama").to_hf() | {"rope_parameters": {"rope_type": "martian", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="martian"):
        model_config = ModelConfig.from_hf(raw)
        full_logits(tiny_model("llama", rope_scaling=model_config.rope_scaling), [1, 2])


def test_quantized_weights_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match=r"is quantized \(hqq\)"):
        load_model(folder)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    save_model(tiny_model("llama"), tmp_path, max_shard_bytes=100_000)
    index = json.loads((tmp_path / INDEX).read_text())
    weight_map = index["weight_map"]
    first, *_, last = sorted(set(weight_map.values()))
    cases = {
        "holds model.layers.0.input_layernorm.weight, which": weight_map
        | {"model.layers.0.input_layernorm.weight": last},
        "lacks ghost.weight": weight_map | {"ghost.weight": first},
        "points outside its folder": weight_map | {"model.norm.weight": "../other.safetensors"},
        "missing.safetensors does not exist": weight_map | {"model.norm.weight": "missing.safetensors"},
        "has no weight_map": None,
    }
    for sentence, changed in cases.items():
        (tmp_path / INDEX).write_text(json.dumps(index | {"weight_map": changed}))
        with pytest.raises(CheckpointError, match=sentence):
            load_model(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / last).unlink()
    with pytest.raises(CheckpointError, match=f"{last} does not exist"):
        load_model(tmp_path)


def safetensors_file(header: bytes, data: bytes = b"\0" * 64) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 17 << 20) + b"{" * 100,
        struct.pack("<Q", 2**63) + b"{}",
        safetensors_file(b"not json"),
        safetensors_file(b"[]"),
        safetensors_file(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,999]}}'),
        safetensors_file(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}'),
        safetensors_file(b'{"a":{"dtype":"F99","shape":[16],"data_offsets":[0,64]}}'),
        safetensors_file(b'{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,64]}}'),
        safetensors_file(
            b'{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},'
            b'"b":{"dtype":"F32","shape":[12],"data_offsets":[16,64]}}'
        ),
    ],
    ids=["empty", "short", "17 MiB", "huge", "text", "list", "past", "size", "dtype", "overflow", "overlap"],
)
def test_malformed_weights_are_one_typed_error(contents: bytes, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(contents)
    with pytest.raises(CheckpointError, match=WEIGHTS):
        load_model(folder)


def test_a_valid_file_with_an_oversized_header_is_refused(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    for padding, fits in ((1 << 20, True), (16 << 20, False)):
        (folder / WEIGHTS).write_bytes(safetensors_file(whole[8 : 8 + size] + b" " * padding, whole[8 + size :]))
        if fits:
            load_model(folder)
        else:
            with pytest.raises(CheckpointError, match=r"the limit is 16777216"):
                load_model(folder)


def test_mutated_headers_never_give_another_error(folder: Path) -> None:
    """Every single-bit change in the header either leaves a model of the right shapes or is a typed error."""
    whole = bytearray((folder / WEIGHTS).read_bytes())
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(200):
        bit = int(torch.randint(0, 8 * header_end, (), generator=generator))
        whole[bit // 8] ^= 1 << bit % 8
        (folder / WEIGHTS).write_bytes(whole)
        try:
            load_model(folder)
        except CheckpointError:
            refused += 1
        whole[bit // 8] ^= 1 << bit % 8
    assert refused > 150


def test_a_failed_write_says_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import model.files.checkpoint

    def full_disk(*_: Any, **__: Any) -> None:
        raise model.files.checkpoint.SafetensorError("No space left on device")

    monkeypatch.setattr(model.files.checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match=r"model.safetensors failed: No space left on device"):
        save_model(tiny_model("llama"), tmp_path)
