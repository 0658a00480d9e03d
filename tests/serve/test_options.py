"""The command line and the YAML file of `potstill serve`."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serve.config import EngineConfig
from serve.http.options import ServerOptions, add_serve_arguments, options_from_arguments

ROOT = Path(__file__).resolve().parents[2]


def parsed(*words: str) -> ServerOptions:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return options_from_arguments(parser.parse_args(words))


def test_the_command_line_is_spelled_as_vllm_spells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTSTILL_API_KEY", raising=False)
    assert parsed("m") == ServerOptions(EngineConfig("m"), ("m",))
    options = parsed(
        *("m", "--host", "::1", "--port", "9", "--served-model-name", "a", "b", "--dtype", "float32"),
        *("--max-model-len", "128", "--gpu-memory-utilization", "0.5", "--max-num-seqs", "4"),
        *("--max-num-batched-tokens", "64", "--kv-cache-bytes", "1.5G", "--api-key", "k1", "--api-key", "k2"),
        *("--speculative-config", '{"model": "d", "num_speculative_tokens": 3}', "--seed", "5", "--device", "cpu"),
    )
    engine = EngineConfig(
        "m", "d", dtype="float32", device="cpu", max_model_len=128, gpu_memory_utilization=0.5, seed=5,
        kv_cache_bytes=3 * 2**29, max_num_seqs=4, max_num_batched_tokens=64, num_speculative_tokens=3,
    )  # fmt: skip
    assert options == ServerOptions(engine, ("a", "b"), "::1", 9, ("k1", "k2"))
    assert not parsed("m", "--no-enable-prefix-caching").engine.enable_prefix_caching


def test_no_option_is_dropped_on_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POTSTILL_API_KEY", raising=False)
    (tmp_path / "serve.yaml").write_text("seed: 7")
    words = """--host ::1 | --port 9 | --served-model-name a | --dtype float16 | --device cpu | --max-model-len 9
        --tensor-parallel-size 2 | --pipeline-parallel-size 2
        --gpu-memory-utilization 0.5 | --kv-cache-bytes 1 | --kv-cache-dtype int8 | --max-num-seqs 2
        --activations int8 | --max-num-batched-tokens 9 | --no-enable-prefix-caching | --verify t
        --speculative-config {"model":"d"}
        --adapter a=b | --enable-lora | --max-loras 2 | --max-cpu-loras 99
        --max-lora-rank 8 | --seed 5 | --api-key k | --api-keys-file f | --allow-unauthenticated
        --chat-template t | --max-queue 1
        --allowed-origins ["a"] | --allowed-methods ["a"] | --allowed-headers ["a"] | --allow-credentials
        --max-n 1 | --max-prompts 1 | --max-stop-strings 1 | --max-logprobs 1 | --max-body-bytes 1
        --response-cache-bytes 9 | --queue-wait-s 1 | --drain-s 1 | --health-timeout-s 1 | --log-level debug
        --price-per-hour 2 | --otlp-traces-endpoint u
        --watch-draft f | --watch-draft-tokens 9 | --replicas 2..8
        --label-folder f --label-consent all | --label-consent key1 --label-folder f | --label-bytes 9
        --engine-timeout 9 | --no-spare-engine | --tool-call-parser hermes | --reasoning-parser none"""
    given = [option.split() for line in words.splitlines() for option in line.split("|")]
    given.append(["--config", str(tmp_path / "serve.yaml")])
    given.append(["--allowed-lora-path", str(tmp_path), "--enable-lora"])
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_arguments(parser)
    assert {option[0] for option in given} == set(re.findall(r"--[a-z-]+", parser.format_usage()))
    results = [repr(parsed("m", *option)) for option in given]
    assert len({repr(parsed("m")), *results}) == len(given) + 1


def test_methods_without_a_model_are_named_and_may_stand_beside_one() -> None:
    for words in (["ngram"], ["suffix"], ['{"method": "suffix"}']):
        engine = parsed("m", "--speculative-config", *words).engine
        assert engine == EngineConfig("m", "ngram" if "ngram" in words else "suffix")
    both = EngineConfig("teacher", "suffix", "student", num_speculative_tokens=2)
    config = '{"method": "suffix", "model": "student", "num_speculative_tokens": 2}'
    assert parsed("teacher", "--speculative-config", config).engine == both
    config = '{"method": "suffix", "num_speculative_tokens": 2}'
    assert parsed("student", "--verify", "teacher", "--speculative-config", config).engine == both
    with pytest.raises(ValueError, match="one target has one draft"):
        config = '{"method": "suffix", "model": "other"}'
        parsed("student", "--verify", "teacher", "--speculative-config", config)


def test_verify_serves_the_target_and_drafts_with_the_model() -> None:
    options = parsed("student", "--verify", "teacher", "--speculative-config", '{"num_speculative_tokens": 2}')
    assert options.engine == EngineConfig("teacher", "student", num_speculative_tokens=2)
    assert options.model_names == ("student",)
    with pytest.raises(ValueError, match="either --verify or --speculative-config"):
        parsed("student", "--verify", "teacher", "--speculative-config", '{"model": "x"}')


@pytest.mark.parametrize(
    "words",
    [
        ("--max-num-seqs", "0"),
        ("--max-model-len", "-1"),
        ("--max-queue", "-1"),
        ("--max-logprobs", "-1"),
        ("--max-n", "0"),
        ("--drain-s", "-0.1"),
        ("--queue-wait-s", "0"),
        ("--port", "-1"),
        ("--port", "65536"),
        ("--engine-timeout", "0"),
        ("--price-per-hour", "-1"),
        ("--api-key", " "),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(words: tuple[str, str]) -> None:
    name = "API key" if "key" in words[0] else words[0].lstrip("-").replace("-", "_")
    with pytest.raises(ValueError, match=name):
        parsed("m", *words)


@pytest.mark.parametrize("words", [("--kv-cache-bytes", "big"), ("--kv-cache-bytes", "0"), ("--log-level", "loud")])
def test_words_that_are_no_values_end_the_program(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("m", *words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"draft": 1}', '{"num_speculative_tokens": -1}', '{"method": "eagle"}'])
def test_speculative_config_is_checked(text: str) -> None:
    with pytest.raises(SystemExit):
        parsed("m", "--speculative-config", text)
    assert parsed("m", "--speculative-config", '{"method": "ngram"}').engine.draft == "ngram"


def test_replicas_are_a_number_or_a_range(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert parsed("m").replicas is None
    assert parsed("m", "--replicas", "2").replicas == (2, 2) and parsed("m", "--replicas", "2..8").replicas == (2, 8)
    (tmp_path / "serve.yaml").write_text("replicas: 1..3")
    assert parsed("m", "--config", str(tmp_path / "serve.yaml")).replicas == (1, 3)
    for text in ("0", "8..2", "0..4"):
        with pytest.raises(ValueError, match=r"--replicas .* at least 1"):
            parsed("m", "--replicas", text)
    for text in ("many", "2..", "..8", "2...8", "2..8..9"):
        with pytest.raises(SystemExit):
            parsed("m", "--replicas", text)
        assert f"{text!r} is no number of replicas; write 2 or 2..8" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--port 0"):
        parsed("m", "--replicas", "2", "--port", "0")
    with pytest.raises(ValueError, match="--label-folder belongs to one server"):
        parsed("m", "--replicas", "2", "--label-folder", "labels", "--label-consent", "all")


def test_without_ray_replicas_are_refused_with_a_sentence() -> None:
    code = "import sys; sys.modules['ray'] = None; from serve.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "m", "--replicas", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "potstill: --replicas needs Ray: pip install 'potstill[ray]'\n"


def test_adapters_have_names_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = parsed("m", "--adapter", "a=x", "--adapter", "b=y=z")
    assert options.engine.adapters == {"a": "x", "b": "y=z"}
    with pytest.raises(ValueError, match="--adapter a is given twice"):
        parsed("m", "--adapter", "a=x", "--adapter", "a=y")
    with pytest.raises(ValueError, match="--adapter m: this is the name of the model itself"):
        parsed("m", "--adapter", "m=x")
    with pytest.raises(SystemExit):
        parsed("m", "--adapter", "folder")
    assert "'folder' is no adapter; write NAME=FOLDER" in capsys.readouterr().err


def test_a_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "port: 81\nmax_num_seqs: 3\nserved-model-name: [a, b]\napi-key: [k]\nhost: 0.0.0.0\n"
        "speculative-config: {model: ngram, num_speculative_tokens: 4}\nkv-cache-bytes: 2M\nadapter: [c=x, d=y]\n"
    )
    options = parsed("m", "--config", str(path), "--port", "82")
    assert (options.port, options.engine.max_num_seqs, options.model_names) == (82, 3, ("a", "b"))
    assert options.engine.adapters == {"c": "x", "d": "y"}
    assert (options.api_keys, options.host, options.engine.draft) == (("k",), "0.0.0.0", "ngram")
    assert (options.engine.num_speculative_tokens, options.engine.kv_cache_bytes) == (4, 2**21)
    path.write_text("port: [")
    with pytest.raises(ValueError, match="did not find expected node content"):
        parsed("m", "--config", str(path))
    path.write_text("max-num-sequences: 3\n")
    with pytest.raises(ValueError, match="max-num-sequences"):
        parsed("m", "--config", str(path))
    with pytest.raises(ValueError, match="no such file"):
        parsed("m", "--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_other_machines_need_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTSTILL_API_KEY", raising=False)
    with pytest.raises(ValueError, match="--allow-unauthenticated"):
        parsed("m", "--host", host)
    assert parsed("m", "--host", host, "--allow-unauthenticated").host == host
    assert parsed("m", "--host", host, "--api-key", "k").host == host
    monkeypatch.setenv("POTSTILL_API_KEY", "from-environment")
    assert parsed("m", "--host", host).api_keys == ("from-environment",)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert parsed("m", "--host", host).host == host
