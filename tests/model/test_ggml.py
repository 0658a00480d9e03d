"""GGUF files served as they are stored: the weights to the bit of what the gguf library expands, in every type."""

import json
import logging
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.cost import weight_bytes
from model.files.checkpoint import CheckpointError, load_model, save_model
from model.formats.ggml import Ggml
from model.formats.gguf.blocks import BLOCK_TYPES
from model.formats.gguf.reader import import_gguf, import_gguf_blocks
from model.formats.gguf.writer import export_gguf
from model.formats.registry import format_named
from model.quantized import quantized_layers
from serve import LLM
from serve.sampling_params import SamplingParams
from tests.compare import relative_rms
from tests.model.test_gguf import write_model
from tests.model.test_gguf_export import model_folder
from tests.serve.toys import greedy_oracle
from tests.tiny import full_logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
UP_PROJ = "model.layers.0.mlp.up_proj"
LARGE = {"hidden_size": 256, "intermediate_size": 256}


def make_folders(folder: Path, type: str) -> tuple[Path, Path]:
    """Of a file in one of the writer's types: its weights as they are stored, and expanded by the gguf library."""
    sizes = LARGE if "_k" in type else {}
    model_folder(folder / "folder", tie_word_embeddings=True, **sizes)
    export_gguf(folder / "folder", folder / "model.gguf", type=type)
    import_gguf_blocks(folder / "model.gguf", folder / "stored")
    import_gguf(folder / "model.gguf", folder / "expanded", dtype=torch.float32)
    return folder / "stored", folder / "expanded"


@pytest.mark.parametrize("type", ["q8_0", "q6_k", "q4_k_m", "q4_1", "q4_0"])
def test_weights_are_those_of_the_file_to_the_bit(type: str, tmp_path: Path) -> None:
    """Rows of q and k in our order, embedding and head one weight in the file's own type."""
    stored, expanded = (load_model(folder) for folder in make_folders(tmp_path, type))
    layers = quantized_layers(stored)
    assert len(layers) == 15 and {name for name, _ in stored.named_parameters()}.isdisjoint(layers)
    for name, layer in layers.items():
        assert torch.equal(layer.weight.dequantize(), expanded.get_parameter(f"{name}.weight")), name
    for name, parameter in stored.named_parameters():
        assert torch.equal(parameter, expanded.get_parameter(name)), name
    expected = full_logits(expanded, TOKENS)
    assert relative_rms(full_logits(stored, TOKENS), expected) < 1e-5
    assert relative_rms(full_logits(stored.fuse(), TOKENS), expected) < 1e-5


@pytest.mark.parametrize(("family", "type"), [("llama", "Q5_0"), ("qwen2", "Q5_1"), ("qwen3", "Q4_1")])
def test_blocks_that_the_gguf_library_packs(family: str, type: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", family, kind=gguf.GGMLQuantizationType[type])
    import_gguf_blocks(tmp_path / "model.gguf", tmp_path / "stored")
    import_gguf(tmp_path / "model.gguf", tmp_path / "expanded", dtype=torch.float32)
    stored, expanded = load_model(tmp_path / "stored"), load_model(tmp_path / "expanded")
    assert {layer.format for layer in quantized_layers(stored).values()} == {Ggml(type)}
    for name, layer in quantized_layers(stored).items():
        assert torch.equal(layer.weight.dequantize(), expanded.get_parameter(f"{name}.weight")), name
    assert relative_rms(full_logits(stored, TOKENS), full_logits(expanded, TOKENS)) < 1e-5


def test_a_folder_read_and_written_again_holds_the_same_bits(tmp_path: Path) -> None:
    """A mixture of types, in as many bytes as planned."""
    one, _ = make_folders(tmp_path, "q4_k_m")
    model = load_model(one, dtype="auto")
    assert {layer.format for layer in quantized_layers(model).values()} == set(map(Ggml, ("Q4_K", "Q5_0", "Q6_K")))
    save_model(model, tmp_path / "two")
    first, second = (load_file(path / "model.safetensors") for path in (one, tmp_path / "two"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert sum(tensor.nbytes for tensor in first.values()) == weight_bytes(model, torch.float32)
    entries = [json.loads((path / "config.json").read_text()) for path in (one, tmp_path / "two")]
    assert entries[0] == entries[1]


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_bytes_and_dense_weights_of_a_type(type: str) -> None:
    """As the table says, and quantized by llama.cpp's rule."""
    bits = {"Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5, "Q5_0": 8.5, "Q5_1": 9, "Q4_K": 6, "Q6_K": 10}
    dense, format = torch.randn(6, 512), Ggml(type)
    weight = format.quantize(dense)
    expected = BLOCK_TYPES[type].quantize(dense).numpy()
    assert torch.equal(
        weight.dequantize(), torch.from_numpy(gguf.dequantize(expected, gguf.GGMLQuantizationType[type]))
    )
    assert sum(part.nbytes for part in format.tensors(weight).values()) == format.num_bytes((6, 512))
    assert 8 * format.num_bytes((6, 512)) == bits[type] * 6 * 512


def test_it_is_served(tmp_path: Path) -> None:
    folder, expanded = make_folders(tmp_path, "q4_1")
    (answer,) = LLM(str(folder), dtype="float32", num_pages=32).generate(
        [TOKENS], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    )
    assert answer.choices[0].token_ids == greedy_oracle(load_model(expanded), TOKENS, 12)


def test_what_is_not_multiplied_in_blocks_becomes_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind, dtype in (("F16", torch.float16), ("TQ2_0", torch.bfloat16)):
        write_model(tmp_path / f"{kind}.gguf", "llama", kind=gguf.GGMLQuantizationType[kind], head_dim=64, **LARGE)
        with caplog.at_level(logging.WARNING):
            import_gguf_blocks(tmp_path / f"{kind}.gguf", tmp_path / kind)
        assert load_model(tmp_path / kind, dtype="auto").dtype == dtype
    assert caplog.messages == ["weights in TQ2_0 are expanded to bf16: they take up to 8 times as much"]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    folder, _ = make_folders(tmp_path, "q4_1")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for part, sentence in (("levels", r"not torch.uint8 \[\d+, 32\]"), ("minimum", r"not torch.float16 \[\d+, 2\]")):
        name = f"{UP_PROJ}.weight_{part}"
        save_file(tensors | {name: tensors[name][:, :1].contiguous()}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"up_proj.weight_{part} is .*{sentence}"):
            load_model(folder)
    types = {"quantization_config": {"quant_method": "ggml", "types": {"IQ1_S": [UP_PROJ]}}}
    (folder / "config.json").write_text(json.dumps(config | types))
    with pytest.raises(CheckpointError, match=r"is quantized \(ggml, IQ1_S\); only plain"):
        load_model(folder)
    with pytest.raises(ValueError, match="GGML Q4_K: blocks of 256 do not divide rows of 64 weights"):
        format_named("ggml", type="Q4_K").quantize(torch.randn(4, 64))
