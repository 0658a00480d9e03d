"""GGUF files on the command line: unpacked once, served as they are stored."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from model.files.checkpoint import is_quantized
from model.files.safe_io import SourceError
from pipeline.cli import main
from pipeline.errors import UserError
from pipeline.run_folder import Served, resolve_served
from pipeline.stages.import_model.config import ModelSource
from pipeline.stages.import_model.run import import_model, report_of
from tests.model.test_gguf import write_model
from tests.model.test_gguf_export import assert_same_tensors


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path / "tiny.Q4_1.gguf", "llama", kind=gguf.GGMLQuantizationType.Q4_1)
    return tmp_path / "tiny.Q4_1.gguf"


def test_a_file_is_unpacked_once_and_anew_when_it_changes(file: Path, tmp_path: Path) -> None:
    served = resolve_served(str(file), verify=str(file))
    assert served == Served(served.model, served.model, "tiny.Q4_1") and is_quantized(served.model)
    written = (Path(served.model) / "config.json").stat().st_mtime_ns
    assert resolve_served(str(file)).model == served.model
    assert (Path(served.model) / "config.json").stat().st_mtime_ns == written
    os.utime(file, ns=(1, 1))
    assert resolve_served(str(file)).model != served.model
    assert len(list((tmp_path / "cache" / "potstill" / "gguf").iterdir())) == 2


def test_what_cannot_be_opened_is_said_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="There is no GGUF file at missing"):
        resolve_served("missing.gguf")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="is not a valid GGUF file"):
        resolve_served(str(file))
    assert not any((tmp_path / "cache" / "potstill" / "gguf").iterdir())


def test_a_recipe_keeps_the_blocks(file: Path, tmp_path: Path) -> None:
    source = ModelSource(origin=str(file), keep_blocks=True)
    import_model(source, tmp_path / "kept", tmp_path)
    import_model(replace(source, keep_blocks=False), tmp_path / "expanded", tmp_path)
    assert is_quantized(tmp_path / "kept") and not is_quantized(tmp_path / "expanded")
    kept, expanded = (report_of("tiny", tmp_path / name).weight_bytes for name in ("kept", "expanded"))
    assert kept < 0.6 * expanded
    with pytest.raises(UserError, match=r"keep_blocks goes with a wheel or a \.gguf file"):
        import_model(replace(source, origin=str(tmp_path / "expanded")), tmp_path / "again", tmp_path)


def test_a_file_and_what_keeps_its_blocks_are_exported_as_they_are(file: Path, tmp_path: Path) -> None:
    source = ModelSource(origin=str(file), keep_blocks=True)
    import_model(source, tmp_path / "kept", tmp_path)
    for model in (file, tmp_path / "kept"):
        out = tmp_path / f"{model.stem}-again.gguf"
        assert main(["export", str(model), "--to", "gguf:blocks", "--out", str(out)]) == 0
        assert_same_tensors(file, out)


def test_blocks_go_into_no_other_layout(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, sentence in (
        ("gguf:q8_0", "with the type blocks, or export the model"),
        ("gptq", "without keep_blocks"),
    ):
        assert main(["export", str(file), "--to", target, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_file_answers(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(file), "a b c", "--raw", "--max-tokens", "4"]) == 0
    assert "4 tokens" in capsys.readouterr().err
