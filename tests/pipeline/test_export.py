"""`potstill export`: what it writes, what it says, where it writes unless told."""

from pathlib import Path

import pytest
import torch

from model.files.checkpoint import load_model
from model.formats.gguf.reader import import_gguf
from pipeline.cli import main
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
    assert said.startswith("small-q4_0.gguf holds small in q4_0: 0.2 M parameters in ")
    assert f" in {size / 1e6:.1f} MB, " in said and said.count("\n") == 1
    assert main(["export", "small", "--to", "gguf:q4_0"]) == 2
    assert "small-q4_0.gguf is there already" in capsys.readouterr().err


def test_a_run_exports_the_model_that_it_serves(finished_run: TinyRun, tmp_path: Path) -> None:
    assert main(["export", str(finished_run.folder.path), "--to", "gguf", "--out", str(tmp_path / "model.gguf")]) == 0
    import_gguf(tmp_path / "model.gguf", tmp_path / "again")
    again = load_model(tmp_path / "again", dtype=torch.bfloat16)
    served = load_model(finished_run.folder.path / "01-distill" / "model", dtype=torch.bfloat16)
    for name, parameter in served.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


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
    assert "'q3' is not a type of GGUF file; known are bf16, f16, f32, q8_0, q6_k, q4_k_m, q4_1, q4_0." in error
    assert error.count("\n") == 1
