"""Embeddings: the hidden states of transformers, whatever the batch company; `openai`'s client over HTTP."""

import asyncio
import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from model.files.checkpoint import load_model, save_model
from model.text.tokenizer import Tokenizer
from serve.sampling_params import SamplingParams
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.serve.toys import drain, generate, greedy, make_engine, random_prompts
from tests.tiny import tiny_model

TEXTS = ["The quick brown fox", "Straße, naïve café 🙂", "def main"]
OPTIONS = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "512", "--served-model-name", "tiny"]


def hidden_states(folder: Path, ids: list[int]) -> torch.Tensor:
    """The oracle, `[T, D]`: what transformers' model gives behind its final norm."""
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return peer(torch.tensor([ids])).last_hidden_state[0]


def pooled(hidden: torch.Tensor, pooling: str) -> list[float]:
    return (hidden.mean(dim=0) if pooling == "mean" else hidden[-1]).tolist()


# The engine


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_embeddings_are_those_of_transformers(family: str, pooling: Any, tmp_path: Path) -> None:
    """In chunks, with and behind cached prefixes, beside each other."""
    model = tiny_model(family, seed=2)
    save_model(model, tmp_path)
    prompts = [*random_prompts(4, seed=5, low=2, high=90), [7]]
    engine = make_engine(model, max_num_batched_tokens=16)
    for attempt in range(2):
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, SamplingParams(max_tokens=1, pooling=pooling))
        joined = drain(engine)
        for number, prompt in enumerate(prompts):
            expected = pooled(hidden_states(tmp_path, prompt), pooling)
            assert joined[str(number), 0].embedding == pytest.approx(expected, rel=1e-4, abs=1e-5), (attempt, number)
    assert (engine.stats().prefix_cache_hits > 0) == (pooling == "last")


def test_running_streams_are_not_disturbed() -> None:
    model = tiny_model(seed=3)
    prompts = random_prompts(4, seed=1)
    alone = generate(make_engine(model), prompts, greedy(24))
    engine = make_engine(model, draft="ngram", num_speculative_tokens=2, max_num_batched_tokens=24)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy(24))
        engine.add_request(f"e{number}", prompt * 2, SamplingParams(max_tokens=1, pooling="mean"))
    joined = drain(engine)
    assert [joined[str(number), 0].new_token_ids for number in range(4)] == alone
    assert all(joined[f"e{number}", 0].embedding is not None for number in range(4))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_what_was_computed_before_a_preemption_counts_once(pooling: Any) -> None:
    model, prompt = tiny_model(seed=3), random_prompts(1, seed=9, low=60, high=61)[0]
    params = SamplingParams(max_tokens=1, pooling=pooling)
    plain = make_engine(model)
    plain.add_request("0", prompt, params)
    expected = drain(plain)["0", 0].embedding
    engine = make_engine(model, max_num_batched_tokens=20, max_num_seqs=4)
    engine.add_request("0", prompt, params)
    assert not engine.step() and not engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    # Chunks of a few tokens are attended in another order: the last bits differ.
    assert drain(engine)["0", 0].embedding == pytest.approx(expected, rel=1e-5, abs=1e-5)


# Over HTTP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("embeddings") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, folder.parent / "log", *OPTIONS, "--max-num-batched-tokens", "256") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def expected_embedding(folder: Path, text: str, pooling: str = "mean") -> list[float]:
    hidden = hidden_states(folder, Tokenizer.load(folder).encode(text))
    vector = torch.tensor(pooled(hidden, pooling))
    return (vector / vector.norm()).tolist()


@pytest.mark.parametrize("pooling", [None, "mean", "last"])
def test_the_client_reads_unit_vectors_in_order(client: openai.OpenAI, folder: Path, pooling: str | None) -> None:
    extra = {} if pooling is None else {"pooling": pooling}
    answer = client.embeddings.create(model="tiny", input=TEXTS, extra_body=extra)
    assert (answer.object, answer.model, [one.index for one in answer.data]) == ("list", "tiny", [0, 1, 2])
    for one, text in zip(answer.data, TEXTS, strict=True):
        assert one.embedding == pytest.approx(expected_embedding(folder, text, pooling or "mean"), rel=1e-4, abs=1e-5)
        assert sum(value**2 for value in one.embedding) == pytest.approx(1.0, abs=1e-5)
    tokenizer = Tokenizer.load(folder)
    num_tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_all_forms_of_input_and_output_say_the_same(client: openai.OpenAI, server: RunningServer, folder: Path) -> None:
    ids = Tokenizer.load(folder).encode(TEXTS[0])
    [expected] = client.embeddings.create(model="tiny", input=TEXTS[0]).data  # the client asks for base64
    forms: list[Any] = [[TEXTS[0]], ids, [ids]]
    for form in forms:
        [found] = client.embeddings.create(model="tiny", input=form, encoding_format="float").data
        assert found.embedding == pytest.approx(expected.embedding, rel=1e-5)
    body = {"model": "tiny", "input": TEXTS[0], "encoding_format": "base64"}
    raw = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=20).json()["data"][0]["embedding"]
    data = base64.b64decode(raw)
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(expected.embedding, rel=1e-6)


def test_beside_running_streams(client: openai.OpenAI) -> None:
    """A stream that runs while embeddings are computed says what it says alone."""
    asked: Any = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 60, "temperature": 0}
    settings = asked | {"extra_body": {"ignore_eos": True}}
    alone = client.completions.create(**settings).choices[0].text
    stream = client.completions.create(stream=True, **settings)
    first = next(stream).choices[0].text
    assert len(client.embeddings.create(model="tiny", input=TEXTS * 4).data) == 12
    assert first + "".join(chunk.choices[0].text for chunk in stream) == alone


def test_the_async_client(server: RunningServer) -> None:
    async def ask() -> int:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        return len((await client.embeddings.create(model="tiny", input="hi")).data)

    assert asyncio.run(ask()) == 1


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input is a string"),
        ({"input": ""}, "no tokens"),
        ({"input": [999]}, "outside the vocabulary"),
        ({"input": [2] * 600}, "maximum context length"),
        ({"input": ["a"] * 2000}, "input has 2000"),
        ({"dimensions": 8}, "dimensions is not supported"),
        ({"pooling": "max"}, "pooling"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"stream": True}, "unknown or unsupported field: stream"),
    ],
)
def test_what_is_not_served_is_refused_by_name(server: RunningServer, body: dict[str, Any], complaint: str) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "hi"} | body, timeout=20)
    assert answer.status_code == 400 and complaint in answer.json()["error"]["message"], answer.text


def test_an_engine_does_not_pool_by_itself(folder: Path) -> None:
    """Requests that ask for none carry none, and their prompts may come from the cache."""
    engine = make_engine(load_model(folder))
    for _ in range(2):
        engine.add_request("0", list(range(2, 40)), greedy(2))
        assert drain(engine)["0", 0].embedding is None
    assert engine.stats().prefix_cache_hits > 0
