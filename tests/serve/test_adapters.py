"""Several adapters over one base, chosen by request: each answers as its merged model alone would."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from compress.lora import merge
from model.files.adapter import load_adapter, load_adapters, save_adapter
from model.files.artifact import publish
from model.files.checkpoint import load_model, save_model
from model.lora import LoraConfig, attach_lora
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from serve.config import EngineConfig
from serve.engine.engine import Engine
from serve.engine.loading import load_models
from serve.http.errors import model_not_found
from serve.llm import LLM
from serve.outputs import RequestOutput
from serve.tenant import Tenant
from tests.interpreted import interpreted
from tests.model.test_fused_adapters import save_adapters
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.serve.toys import drain, greedy, greedy_oracle, join, make_engine, random_prompts
from tests.tiny import tiny_model

NAMES = ("a", "b")
CONFIGS = (LoraConfig(rank=4, alpha=8), LoraConfig(rank=2, dora=True, targets=("q_proj", "down_proj")))
CHOICES = (None, "a", "b", "a", None, "b", "b", "a")
PROMPTS = random_prompts(len(CHOICES), seed=4, low=5, high=40)
PARAMS = [
    greedy(12, n=1 + number % 2, logprobs=1, prompt_logprobs=1 if number % 3 == 0 else None)
    for number in range(len(CHOICES))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of `tiny_model()`, by name."""
    paths = save_adapters(tmp_path_factory.mktemp("adapters"), tiny_model(), CONFIGS)
    return dict(zip(NAMES, map(str, paths), strict=True))


def merged(folder: str | None) -> Transformer:
    model = tiny_model()
    if folder is None:
        return model
    load_adapter(model, folder)
    return merge(model, dtype=torch.float32)


def with_choices(folders: dict[str, str], base: Transformer) -> Transformer:
    return base.fuse(load_adapters(base, list(folders.values())))


def answer(
    engine: Engine, adapters: tuple[str | None, ...] = CHOICES, *, preempts: bool = False
) -> dict[tuple[str, int], RequestOutput]:
    """What comes of all requests; with `preempts` half of those that run lose their pages now and then."""
    for number, (prompt, params, adapter) in enumerate(zip(PROMPTS, PARAMS, adapters, strict=True)):
        engine.add_request(str(number), prompt, params, adapter=adapter)
    outputs: dict[tuple[str, int], RequestOutput] = {}
    num_steps = 0
    while engine.has_work():
        for output in engine.step():
            join(outputs, output)
        num_steps += 1
        running = engine.scheduler.running
        for sequence in running[len(running) // 2 :] if preempts and num_steps in (6, 12, 18, 24) else ():
            engine.scheduler.preempt(sequence)
    assert engine.cache.num_used == 0
    return outputs


def scores(output: RequestOutput) -> list[float]:
    entries = [*(output.prompt_logprobs or []), *(output.logprobs or [])]
    return [0.0 if entry is None else entry.logprob for entry in entries]


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[tuple[str, int], RequestOutput]:
    """What every request's own merged model answers, without any adapter."""
    everybody: dict[tuple[str, int], RequestOutput] = {}
    for name in (None, *NAMES):
        outputs = answer(make_engine(merged(folders.get(name or ""))), (None,) * len(CHOICES))
        everybody |= {key: output for key, output in outputs.items() if CHOICES[int(key[0])] == name}
    return everybody


@pytest.mark.parametrize(
    ("draft", "overlapped", "preempted"),
    [
        *((None, False, False), (None, True, True), ("base", False, True)),
        *(("base", True, False), ("ngram", False, False), ("ngram", True, True)),
    ],
)
def test_a_mixed_batch_answers_as_merged_models_alone(
    folders: dict[str, str],
    expected: dict[tuple[str, int], RequestOutput],
    draft: str | None,
    overlapped: bool,
    preempted: bool,
) -> None:
    engine = make_engine(
        with_choices(folders, tiny_model()),
        tiny_model() if draft == "base" else draft,
        adapters=folders,
        max_num_batched_tokens=20,
        num_speculative_tokens=2 if draft else None,
    )
    engine.max_pending = int(overlapped)
    outputs = answer(engine, preempts=preempted)
    assert outputs.keys() == expected.keys()
    for key, output in outputs.items():
        assert output.new_token_ids == expected[key].new_token_ids
        assert scores(output) == pytest.approx(scores(expected[key]), abs=1e-3)
    stats = engine.stats()
    assert draft != "base" or 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_the_adapters_say_different_things(expected: dict[tuple[str, int], RequestOutput]) -> None:
    """Else the tests above would prove nothing."""
    base = answer(make_engine(tiny_model()), (None,) * len(CHOICES))
    for key, output in expected.items():
        assert (output.new_token_ids == base[key].new_token_ids) == (CHOICES[int(key[0])] is None)


def test_cached_prefixes_are_not_shared_across_adapters(folders: dict[str, str]) -> None:
    engine = make_engine(with_choices(folders, tiny_model()), adapters=folders)
    prompt = random_prompts(1, low=50, high=51)[0]
    seen: set[str | None] = set()
    for number, name in enumerate([None, "a", "a", "b", None, "b", "a"]):
        engine.add_request(str(number), prompt, greedy(2), adapter=name)
        (output,) = drain(engine).values()
        assert output.num_cached_tokens == (48 if name in seen else 0)
        seen.add(name)
    engine.add_request("salted", prompt, greedy(2), adapter="a", tenant=Tenant(cache_salt="s"))
    assert drain(engine)["salted", 0].num_cached_tokens == 0


def test_the_engine_through_triton(tmp_path: Path) -> None:
    """Mixed batches of base and adapters, on Triton's kernels."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_query_heads": 2, "num_kv_heads": 1}

    folders = dict(zip(NAMES, map(str, save_adapters(tmp_path, tiny_model(**sizes), CONFIGS)), strict=True))

    def tokens() -> list[list[int]]:
        model = with_choices(folders, tiny_model(**sizes))
        engine = make_engine(model, adapters=folders, max_num_batched_tokens=24, num_pages=64)
        for number, name in enumerate((None, *NAMES)):
            engine.add_request(str(number), PROMPTS[number][:9], greedy(4), adapter=name)
        return [output.new_token_ids for _, output in sorted(drain(engine).items())]

    on_cpu = tokens()
    with interpreted():
        assert tokens() == on_cpu


def test_an_unknown_adapter_is_refused(folders: dict[str, str]) -> None:
    engine = make_engine(with_choices(folders, tiny_model()), adapters=folders)
    with pytest.raises(ValueError, match="there is no adapter 'c'; there are a, b"):
        engine.add_request("r", [5], greedy(2), adapter="c")
    assert not engine.has_work()


# From folders


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("base") / "base", tiny_model())


def test_python_chooses_an_adapter_for_each_prompt(base: Path, folders: dict[str, str]) -> None:
    llm = LLM(str(base), adapters=folders, dtype="float32", num_pages=64)
    prompts = PROMPTS[:3]
    several = llm.generate(prompts, greedy(6), adapter=[None, "a", "b"])
    for name, prompt, generation in zip((None, *NAMES), prompts, several, strict=True):
        assert generation.choices[0].token_ids == greedy_oracle(merged(folders.get(name or "")), prompt, 6)
    (alone,) = llm.generate(prompts[1], greedy(6), adapter="a")
    assert alone.choices[0].token_ids == several[1].choices[0].token_ids
    with pytest.raises(ValueError, match="there are 3 prompts, but adapters for 1"):
        llm.generate(prompts, greedy(6), adapter=["a"])


def test_what_does_not_fit_is_refused_at_the_start(base: Path, folders: dict[str, str], tmp_path: Path) -> None:
    def load(model: Path, adapter: str | Path) -> None:
        load_models(EngineConfig(str(model), adapters={"x": str(adapter)}, dtype="float32", device="cpu"))

    narrow = save_tiny_folder(tmp_path / "narrow", tiny_model(intermediate_size=96))
    with pytest.raises(ValueError, match=r"adapts .* with \d+ inputs and \d+ outputs; this model's has"):
        load(narrow, folders["a"])
    with pytest.raises(ValueError, match="nowhere"):
        load(base, tmp_path / "nowhere")
    for name, seed in (("one", 0), ("two", 1)):
        publish(tmp_path / name, lambda to, seed=seed: save_model(tiny_model(seed=seed), to), stage="x", recipe={})  # type: ignore[misc]
    model = tiny_model()
    attach_lora(model, CONFIGS[0])
    publish(
        tmp_path / "adapter",
        lambda to: save_adapter(model, to, CONFIGS[0]),
        stage="qlora",
        recipe={},
        parents=["0" * 64],
    )
    with pytest.raises(ValueError, match="was trained on 000000000000, not on"):
        load(tmp_path / "one", tmp_path / "adapter")


# Over HTTP

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."


@pytest.fixture(scope="module")
def server(base: Path, folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    adapters = [f"--adapter={name}={folder}" for name, folder in folders.items()]
    options = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "256", "--served-model-name", "tiny"]
    with running_server(base, tmp_path_factory.mktemp("log") / "log", *options, *adapters) as running:
        yield running


def test_the_model_field_chooses(server: RunningServer, base: Path, folders: dict[str, str]) -> None:
    tokenizer, client = Tokenizer.load(base), server.client()
    ids = tokenizer.encode(PROMPT)
    wanted = ["tiny", *NAMES] * 3

    def ask(name: str) -> Any:
        return client.completions.create(
            model=name, prompt=ids, max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
        )

    with ThreadPoolExecutor(len(wanted)) as threads:
        answers = list(threads.map(ask, wanted))
    for name, got in zip(wanted, answers, strict=True):
        own = greedy_oracle(merged(folders.get(name)), ids, 10)
        assert got.choices[0].text == tokenizer.decode(own) and got.model == name
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    settings: dict[str, Any] = {"messages": messages, "max_tokens": 8, "temperature": 0}
    chats = [client.chat.completions.create(model=name, **settings) for name in wanted]
    assert [chat.model for chat in chats] == wanted
    assert len({chat.choices[0].message.content for chat in chats}) == 3


def test_models_and_metrics_name_base_and_adapters(server: RunningServer, folders: dict[str, str]) -> None:
    client = server.client()
    cards = {card.id: card.model_dump() for card in client.models.list().data}
    assert list(cards) == ["tiny", "a", "b"]
    assert (cards["tiny"]["parent"], cards["tiny"]["root"]) == (None, "tiny")
    assert (cards["a"]["parent"], cards["a"]["root"]) == ("tiny", folders["a"])
    assert client.models.retrieve("b").id == "b"
    assert "adapters: a, b" in server.lines[1]
    for _ in range(2):
        client.completions.create(model="b", prompt=PROMPT, max_tokens=2, temperature=0)
    text = httpx.get(f"{server.url}/metrics", timeout=20).text
    assert 'vllm:e2e_request_latency_seconds_count{model_name="b"}' in text
    assert 'potstill:request_success_total{finished_reason="length",model_name="b"}' in text


def test_an_unknown_model_is_a_404(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().completions.create(model="c", prompt=PROMPT)
    assert caught.value.code == "model_not_found"
    assert "the requested model is not served here; served are tiny, a, b" in str(caught.value)
    many = [str(number) for number in range(10)]
    assert model_not_found(*many).message.endswith("served are 0, 1, 2, 3, 4, 5, 6, 7 and 2 more")


def test_a_served_base_cannot_carry_an_adapter_of_its_own(
    base: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def carrying(*args: Any, **kwargs: Any) -> Transformer:
        model = load_model(*args, **kwargs)
        load_adapter(model, folders["a"])
        return model

    monkeypatch.setattr("serve.engine.loading.load_model", carrying)
    with pytest.raises(ValueError, match="carries an adapter itself"):
        load_models(EngineConfig(str(base), adapters=folders, dtype="float32", device="cpu"))
