"""Adapters loaded and unloaded over HTTP, as vLLM's clients do it."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from model.text.tokenizer import Tokenizer
from tests.model.test_fused_adapters import save_adapters
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.serve.test_adapter_slots import CONFIGS, merged
from tests.serve.toys import greedy_oracle
from tests.tiny import tiny_model

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
NAMES = ("one", "two", "three", "four")
NUM_OUTPUT = 10
KEY = "sesame"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the adapters, and a link that leads out of it."""
    at = tmp_path_factory.mktemp("adapters")
    outside = at / "outside"
    for folder, name in zip(save_adapters(outside, tiny_model(), CONFIGS), NAMES, strict=True):
        shutil.copytree(folder, at / "root" / name)
    (at / "root" / "link").symlink_to(outside / "0")
    (at / "root" / "linked file").mkdir()
    for file in (outside / "0").iterdir():
        (at / "root" / "linked file" / file.name).symlink_to(file)
    return at / "root"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("base") / "base", tiny_model())


@pytest.fixture(scope="module")
def server(base: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "256", "--served-model-name", "tiny"]
    options += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "7", "--api-key", KEY]
    options += ["--allowed-lora-path", str(root), "--adapter", f"fixed={root / 'one'}", "--response-cache-bytes", "1M"]
    with running_server(base, tmp_path_factory.mktemp("log") / "log", *options) as running:
        running.api_key = KEY
        yield running


def post(server: RunningServer, route: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {server.api_key}"}
    return httpx.post(f"{server.url}/v1/{route}", json=body, headers=headers, timeout=30)


def load(server: RunningServer, name: str, path: str, **more: Any) -> httpx.Response:
    return post(server, "load_lora_adapter", lora_name=name, lora_path=path, **more)


def names(server: RunningServer) -> list[str]:
    return [card.id for card in server.client().models.list().data]


def ask(server: RunningServer, base: Path, model: str) -> Any:
    ids = Tokenizer.load(base).encode(PROMPT)
    settings: dict[str, Any] = {"prompt": ids, "max_tokens": NUM_OUTPUT, "temperature": 0}
    return server.client().completions.create(model=model, **settings, extra_body={"ignore_eos": True})


def expected(base: Path, folder: Path | None) -> str:
    tokenizer = Tokenizer.load(base)
    return tokenizer.decode(greedy_oracle(merged(folder and str(folder)), tokenizer.encode(PROMPT), NUM_OUTPUT))


@pytest.fixture
def only_fixed(server: RunningServer, root: Path) -> Iterator[None]:
    """Afterwards all is as it was."""
    yield
    for name in set(names(server)) - {"tiny", "fixed"}:
        assert post(server, "unload_lora_adapter", lora_name=name).status_code == 200
    if "fixed" not in names(server):
        assert load(server, "fixed", "one").status_code == 200


@pytest.mark.usefixtures("only_fixed")
def test_clients_load_replace_and_unload_adapters(server: RunningServer, base: Path, root: Path) -> None:
    assert names(server) == ["tiny", "fixed"]
    answer = load(server, "a", str(root / "two"))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' added successfully.")
    card = server.client().models.retrieve("a").model_dump()
    assert (card["id"], card["parent"], card["root"]) == ("a", "tiny", str(root / "two"))
    assert ask(server, base, "a").choices[0].text == expected(base, root / "two")
    again = load(server, "a", "three")
    assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
    assert load(server, "a", "three", load_inplace=True).status_code == 200
    replaced = ask(server, base, "a")
    assert replaced.choices[0].text == expected(base, root / "three")
    assert replaced.usage.prompt_tokens_details.cached_tokens == 0
    assert ask(server, base, "tiny").choices[0].text == expected(base, None)
    gone = post(server, "unload_lora_adapter", lora_name="a")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
    with pytest.raises(openai.NotFoundError):
        ask(server, base, "a")
    assert post(server, "unload_lora_adapter", lora_name="a").status_code == 404


@pytest.mark.usefixtures("only_fixed")
def test_the_one_asked_for_longest_ago_makes_room(server: RunningServer, base: Path) -> None:
    assert load(server, "a", "two").status_code == load(server, "b", "three").status_code == 200
    ask(server, base, "fixed")
    assert load(server, "c", "four").text.endswith("'a', which was asked for longest ago, was unloaded.")
    assert names(server) == ["tiny", "b", "c", "fixed"]


@pytest.mark.usefixtures("only_fixed")
def test_a_stream_keeps_its_adapter_when_that_is_unloaded(server: RunningServer, base: Path, root: Path) -> None:
    assert load(server, "a", "two").status_code == 200
    ids = Tokenizer.load(base).encode(PROMPT)
    settings: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}
    stream = server.client().completions.create(model="a", prompt=ids, stream=True, **settings)
    text = next(stream).choices[0].text
    info = [line for line in metrics(server) if line.startswith("vllm:lora_requests_info{")]
    assert len(info) == 1
    assert 'max_lora="2",running_lora_adapters="a",waiting_lora_adapters=""' in info[0]
    assert post(server, "unload_lora_adapter", lora_name="a").status_code == 200
    assert load(server, "b", "three").status_code == load(server, "c", "four").status_code == 200
    for model in ("b", "fixed", "c"):
        ask(server, base, model)
    text += "".join(chunk.choices[0].text for chunk in stream)
    own = greedy_oracle(merged(str(root / "two")), ids, 200)
    assert text == Tokenizer.load(base).decode(own)


def metrics(server: RunningServer) -> list[str]:
    return httpx.get(f"{server.url}/metrics", timeout=20).text.splitlines()


@pytest.mark.usefixtures("only_fixed")
def test_metrics_show_what_is_loaded_and_nothing_else(server: RunningServer, base: Path) -> None:
    def pass_through(name: str) -> None:
        assert load(server, name, "two").status_code == 200
        ask(server, base, name)
        assert post(server, "unload_lora_adapter", lora_name=name).status_code == 200

    # Answers are counted by route: each has to be asked once before.
    pass_through("first")
    metrics(server)
    num_lines = len(metrics(server))
    for number in range(5):
        pass_through(f"n{number}")
    assert load(server, "a", "two").status_code == 200
    ask(server, base, "a")
    lines = metrics(server)
    assert 'vllm:request_success_total{finished_reason="length",model_name="a"} 1.0' in lines
    assert not any("n0" in line for line in lines)
    post(server, "unload_lora_adapter", lora_name="a")
    assert len(metrics(server)) <= num_lines


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"lora_name": "x", "lora_path": "../outside/0"}, "no folder below"),
        ({"lora_name": "x", "lora_path": "/etc"}, "no folder below"),
        ({"lora_name": "x", "lora_path": "link"}, "no folder below"),
        ({"lora_name": "x", "lora_path": "linked file"}, "no folder below"),
        ({"lora_name": "x", "lora_path": "nowhere"}, "no folder below"),
        ({"lora_name": "x", "lora_path": "\0"}, "no folder below"),
        ({"lora_name": "x", "lora_path": "a" * 3000}, "no folder below"),
        ({"lora_name": "x", "lora_path": "broken"}, "^broken/adapter_model.safetensors is not a valid safetensors"),
        ({"lora_name": "tiny", "lora_path": "two"}, "the name of the model itself"),
        ({"lora_name": 'a"}\n', "lora_path": "two"}, "lora_name may hold letters"),
        ({"lora_name": "x"}, "lora_path is required"),
        ({"lora_name": "x", "lora_path": "two", "lora_int_id": 1}, "unknown or unsupported field"),
    ],
)
def test_what_cannot_be_loaded_is_400_and_changes_nothing(
    body: dict[str, Any], sentence: str, server: RunningServer, root: Path
) -> None:
    broken = root / "broken"
    if not broken.exists():
        shutil.copytree(root / "one", broken)
        (broken / "adapter_model.safetensors").write_bytes(os.urandom(100))
    answer = post(server, "load_lora_adapter", **body)
    assert answer.status_code == 400
    assert re.search(sentence, answer.json()["error"]["message"]), answer.text
    assert str(root) not in answer.text
    assert names(server) == ["tiny", "fixed"]


def test_nobody_loads_without_a_key_or_where_no_folder_was_named(server: RunningServer) -> None:
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json={}, timeout=20).status_code == 401
    description = httpx.get(f"{server.url}/openapi.json", timeout=20).json()
    assert "/v1/load_lora_adapter" in description["paths"]


@pytest.mark.usefixtures("only_fixed")
def test_a_fresh_engine_has_what_was_loaded(server: RunningServer, base: Path, root: Path) -> None:
    assert load(server, "a", "two").status_code == 200
    shutil.copytree(root / "three", root / "passing")
    assert load(server, "b", "passing").status_code == 200
    shutil.rmtree(root / "passing")
    (pid,) = server.engine_pids()
    os.kill(pid, signal.SIGKILL)
    threading.Event().wait(0.2)
    server.wait_healthy()
    assert names(server) == ["tiny", "a", "fixed"]
    assert ask(server, base, "a").choices[0].text == expected(base, root / "two")
    assert ask(server, base, "fixed").choices[0].text == expected(base, root / "one")
    assert "the adapter b is gone" in server.log.read_text()
