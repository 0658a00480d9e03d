"""`potstill export`: what it writes, what it says, where it writes unless told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compress.quantize.round_to_nearest import quantize_folder
from model.files.checkpoint import load_model
from model.formats.bitsandbytes import NF4
from model.formats.compressed_tensors import Int4, Int8
from model.formats.gguf.reader import import_gguf
from model.formats.registry import format_named
from model.quantized import quantized_layers
from model.text.tokenizer import Tokenizer
from pipeline.cli import main
from tests.compare import check_close
from tests.model.test_gguf_export import model_folder
from tests.pipeline.tiny_run import TinyRun


def test_a_model_folder_becomes_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder(tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "small", "--to", "gguf:q4_0"]) == 0
    size = (tmp_path / "small-q4_0.gguf").stat().st_size
    said = capsys.readouterr().out
    assert said.startswith("small-q4_0.gguf holds small in q4_0: 151.9 k parameters in ")
    assert f" in {size / 1e3:.0f} kB, " in said and said.count("\n") == 1
    assert main(["export", "small", "--to", "gguf:q4_0"]) == 2
    assert "small-q4_0.gguf is there already" in capsys.readouterr().err


def test_a_run_exports_the_model_that_it_serves(finished_run: TinyRun, tmp_path: Path) -> None:
    assert main(["export", str(finished_run.folder.path), "--to", "gguf", "--out", str(tmp_path / "model.gguf")]) == 0
    import_gguf(tmp_path / "model.gguf", tmp_path / "again")
    again = load_model(tmp_path / "again", dtype=torch.bfloat16)
    served = load_model(finished_run.folder.path / "01-distill" / "model", dtype=torch.bfloat16)
    for name, parameter in served.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_a_published_model_that_was_altered_is_not_exported(
    copied_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, copy, out = copied_run.folder.path / "01-distill" / "model", tmp_path / "copy", str(tmp_path / "out.gguf")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert main(["export", str(model), "--to", "gguf", "--out", out]) == 2
    assert f"{model / 'model.safetensors'} " in capsys.readouterr().err and not Path(out).exists()
    shutil.copytree(model, copy)
    (copy / "potstill.json").unlink()  # whoever means it
    assert main(["export", str(copy), "--to", "gguf", "--out", out]) == 0


def test_a_model_in_a_run_is_named_after_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder(tmp_path / "01-distill" / "model")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "01-distill/model", "--to", "gguf"]) == 0
    assert (tmp_path / "01-distill-bf16.gguf").exists()
    assert capsys.readouterr().out.startswith("01-distill-bf16.gguf holds 01-distill/model in bf16: ")


def test_a_mistake_in_the_type_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_folder(tmp_path / "small")
    assert main(["export", str(tmp_path / "small"), "--to", "gguf:q3"]) == 2
    error = capsys.readouterr().err
    assert "'q3' is not a type of GGUF file; known are bf16, f16, f32, q8_0, q6_k, q4_k_m, " in error
    assert ", q4_1, q4_0 and blocks." in error
    assert error.count("\n") == 1


def in_four_bits(home: Path, finer: dict[str, Any], **changes: Any) -> Path:
    """A folder in four bits, `finer` layers aside."""
    model_folder(home / "dense", **changes)
    quantize_folder(home / "dense", home / "small", Int4(group=16), overrides=finer)
    Tokenizer.load(home / "dense").save(home / "small")
    return home / "small"


@pytest.fixture
def four_bits(tmp_path: Path) -> Path:
    return in_four_bits(tmp_path, {"embed_tokens": format_named("int8")})


@pytest.mark.parametrize("target", ["compressed-tensors", "gptq", "awq"])
def test_a_quantized_model_keeps_its_integers_in_other_files(
    target: str, four_bits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = four_bits.parent / "theirs"
    assert main(["export", str(four_bits), "--to", target, "--out", str(out)]) == 0
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert f" in {size / 1e3:.0f} kB, " in capsys.readouterr().out
    entry = json.loads((out / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == target
    names = set(load_file(out / "model.safetensors"))
    has_zeros = {name for name in names if name.endswith(".qzeros")}  # others look for them, symmetric or not
    assert bool(has_zeros) == (target != "compressed-tensors") and entry.get("zero_point", True)
    ours, theirs = (load_model(folder, dtype=torch.float32) for folder in (four_bits, out))
    layers = quantized_layers(theirs)
    assert layers and all(name.endswith("_proj") for name in layers)
    for name, layer in layers.items():
        own = quantized_layers(ours)[name].weight.dequantize()
        check_close(layer.weight.dequantize(), own, dtype=torch.float16, what=name)  # scales in fp16 there
    assert Tokenizer.load(out).encode("still") == Tokenizer.load(four_bits).encode("still")


@pytest.mark.parametrize("target", ["compressed-tensors", "awq"])
def test_a_head_of_its_own_becomes_dense_as_embeddings_do(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `quantize` leaves a model whose head is no copy of its embeddings: eight bits there, four elsewhere."""
    finer = {name: format_named("int8") for name in ("embed_tokens", "lm_head")}
    small = in_four_bits(tmp_path, finer, tie_word_embeddings=False)
    ours = load_model(small, dtype=torch.float32)
    assert "lm_head" in quantized_layers(ours)
    assert main(["export", str(small), "--to", target, "--out", str(tmp_path / "out")]) == 0
    theirs = load_model(tmp_path / "out", dtype=torch.float32)
    assert not {"lm_head", "model.embed_tokens"} & set(quantized_layers(theirs))
    check_close(theirs.head_weight, ours.head_weight, dtype=torch.bfloat16)


def test_layers_of_several_bits_keep_them(tmp_path: Path) -> None:
    finer = {"model.layers.0.mlp.down_proj": format_named("int8", group=16)}
    small, out = in_four_bits(tmp_path, finer), tmp_path / "out"
    assert main(["export", str(small), "--to", "compressed-tensors", "--out", str(out)]) == 0
    bits = {name: layer.format.bits for name, layer in quantized_layers(load_model(out, dtype="auto")).items()}
    assert bits.pop("model.layers.0.mlp.down_proj") == 8 and set(bits.values()) == {4}


@pytest.mark.parametrize(
    ("make", "target", "sentence"),
    [
        (lambda dense, small: model_folder(small), "gptq", "are not quantized"),
        (
            lambda dense, small: quantize_folder(dense, small, Int8()),
            "awq",
            "must agree, but it holds 4 bits in a row, asymmetric and not 8 bits in a row, symmetric",
        ),
        (lambda dense, small: quantize_folder(dense, small, NF4()), "gptq", "integers on a grid"),
    ],
)
def test_what_the_layout_cannot_hold_is_one_sentence(
    make: Callable[[Path, Path], None], target: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder(tmp_path / "dense")
    make(tmp_path / "dense", tmp_path / "small")
    assert main(["export", str(tmp_path / "small"), "--to", target, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
