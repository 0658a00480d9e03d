"""Labels of served requests: unbiased, where the draft was not right, of those who consent, and learnt from."""

import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from model.files import labels as label_files
from model.files.checkpoint import load_model
from model.files.label_shards import label_shards
from model.files.labels import LabelFolder, LabelledDocument, read_labels
from model.transformer import Transformer
from serve.engine import labels
from serve.engine.engine import Engine
from serve.sampling_params import SamplingParams
from tests.pipeline.tiny_run import WORDS, run_stages, write_teacher
from tests.serve.http_server import running_server
from tests.serve.toys import VOCAB_SIZE, TableModel, drain, make_engine
from tests.tiny import full_logits

TABLE = torch.softmax(2.5 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)), -1)


def stored(folder: Path) -> list[LabelledDocument]:
    return [document for shard in label_shards(folder) for document in read_labels(shard)]


def table_engine(folder: Path, **options: Any) -> Engine:
    draft = TableModel(torch.softmax(TABLE.log() + 0.8 * torch.randn(TABLE.shape), -1))
    return make_engine(TableModel(TABLE), draft, label_folder=str(folder), num_speculative_tokens=3, **options)


def serve(engine: Engine, params: SamplingParams, prompts: int) -> dict[int, list[bool]]:
    """Which tokens of each answer were drafted, by the prompt's number."""
    for number in range(prompts):
        engine.add_request(str(number), [2 + number, 300], params)
    joined = drain(engine)
    return {number: joined[str(number), 0].drafted_mask for number in range(prompts)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_stored_is_the_models_distribution_where_the_draft_was_not_right(
    tmp_path: Path, temperature: float
) -> None:
    """Systematic sampling: a count is a whole number next to N p, and of a variance that is known."""
    engine = table_engine(tmp_path)
    asked = SamplingParams(
        temperature=temperature, top_k=5, frequency_penalty=1.0, max_tokens=80, ignore_eos=True, store=True
    )
    drafted = serve(engine, asked, prompts=12)
    engine.close()
    documents = {int(document.tokens[0]) - 2: document for document in stored(tmp_path)}
    assert documents.keys() == drafted.keys()
    differences, variance = [], 0.0
    for number, document in documents.items():
        own = [at for at, is_drafted in enumerate(drafted[number]) if not is_drafted]
        assert document.positions.tolist() == [at + 1 for at in own], "positions whose token was the target's own"
        wanted = labels.DRAWS * TABLE[document.tokens[document.positions]].double().numpy()
        rows = np.repeat(np.arange(len(wanted)), document.sampled.sizes)
        counts = np.zeros_like(wanted)
        counts[rows, document.sampled.ids] = document.sampled.counts
        assert np.abs(counts - wanted).max() < 1 + 1e-3 and (counts.sum(1) == labels.DRAWS).all()
        entropies = -(TABLE * TABLE.log()).sum(-1)[document.tokens[document.positions]].numpy()
        assert np.allclose(document.sampled.entropies, entropies, atol=5e-3)
        differences.append((counts - wanted)[:, ::2].sum(1))  # of every second token together: signs would add up
        part = wanted[:, ::2] % 1
        variance += float((part * (1 - part)).sum())
    total = np.concatenate(differences)
    assert len(total) > 300
    spread = float(total.std()) * len(total) ** 0.5
    assert abs(total.sum()) < 4 * spread
    assert spread < 2 * variance**0.5


def test_an_engine_with_labels_keeps_its_weights(tmp_path: Path) -> None:
    engine = table_engine(tmp_path)
    with pytest.raises(ValueError, match="holds labels of one model"):
        engine.update_weights({})
    engine.close()


def test_nothing_is_stored_without_consent(tmp_path: Path) -> None:
    engine = table_engine(tmp_path / "labels")
    serve(engine, SamplingParams(max_tokens=8, ignore_eos=True), prompts=4)
    engine.add_request("embedding", [2, 3], SamplingParams(max_tokens=1, pooling="last", store=True))
    drain(engine)
    engine.close()
    assert [path.name for path in (tmp_path / "labels").iterdir()] == ["labels.json"]
    assert engine.stats().num_labels == 0


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_shard_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """safetensors calls a full disk by an error of its own."""
    monkeypatch.setattr(labels, "SHARD_TOKENS", 1)
    save, failed = label_files.save_file, threading.Event()

    def fails_once(arrays: Any, path: Path) -> None:
        if failed.is_set():
            return save(arrays, path)
        failed.set()
        raise kind("the disk is full")

    monkeypatch.setattr(label_files, "save_file", fails_once)
    engine = table_engine(tmp_path)
    params = SamplingParams(max_tokens=4, ignore_eos=True, store=True)
    serve(engine, params, prompts=1)
    assert failed.wait(60)
    serve(engine, params, prompts=2)
    engine.close()
    assert engine.stats().num_dropped_labels == 1 and len(stored(tmp_path)) == 2


def test_a_disk_that_is_slow_or_full_costs_labels_and_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "QUEUE_DOCUMENTS", 3)
    monkeypatch.setattr(labels, "SHARD_TOKENS", 1)
    is_writing, may_go_on = threading.Event(), threading.Event()

    def stalls(self: LabelFolder, documents: list[LabelledDocument]) -> None:
        is_writing.set()
        may_go_on.wait(60)
        raise OSError("the disk is full")

    monkeypatch.setattr(LabelFolder, "write", stalls)
    engine = table_engine(tmp_path)
    params = SamplingParams(max_tokens=4, ignore_eos=True, store=True)
    serve(engine, params, prompts=1)
    assert is_writing.wait(60)
    serve(engine, params, prompts=8)  # it ends although nothing is written
    assert engine.stats().num_dropped_labels == 5
    may_go_on.set()
    engine.close()
    assert engine.stats().num_dropped_labels == 9


@pytest.mark.slow
def test_served_answers_teach_a_student_without_their_teacher(tmp_path: Path) -> None:
    """Over HTTP, from a pair; some by their account, some by their request do not consent."""
    teacher, draft, folder = write_teacher(tmp_path / "teacher"), write_teacher(tmp_path / "d", seed=1), tmp_path / "l"
    options = ["--verify", str(teacher), "--dtype", "float32", "--kv-cache-bytes", "64M", "--api-key", "ours"]
    options += ["--api-key", "theirs", "--label-folder", str(folder), "--label-consent", "key1"]
    with running_server(draft, tmp_path / "log", *options) as server, httpx.Client(timeout=120) as client:

        def ask(text: str | list[str], key: str, number: int = 1, **more: Any) -> None:
            body = {"prompt": text, "max_tokens": 100, "ignore_eos": True, "n": number} | more
            headers = {"Authorization": f"Bearer {key}"}
            client.post(f"{server.url}/v1/completions", json=body, headers=headers).raise_for_status()

        ask(WORDS, "ours", 6)
        ask("secret one", "theirs")
        ask("secret two", "ours", store=False)
        assert server.terminate() == 0
    documents = stored(folder)
    assert len(documents) == 6 * len(WORDS)
    assert sum(len(document.positions) for document in documents) > 4_000

    training = {"tokens": "12k", "batch_tokens": 256, "micro_batch_tokens": 256, "learning_rate": 3e-3}
    stage = {"distill": {"student": {"from": "draft"}, "data": "text", "out": "student", "held_out_tokens": 512,
        "precision": "fp32", **training}}  # fmt: skip
    (tmp_path / "text").symlink_to(folder)
    settings = {"held_out": 0.2, "max_documents": None}
    run_stages(tmp_path, stage, serve="student", teacher=draft, called="draft", data=settings)
    said = written_by(load_model(teacher), range(3, 13))
    before, learnt = (kl(load_model(teacher), load_model(model), said) for model in (draft, published(tmp_path)))
    assert learnt < 0.6 * before


def published(home: Path) -> Path:
    return home / "run" / "01-distill" / "model"


def written_by(model: Transformer, beginnings: range) -> list[list[int]]:
    """Texts that were not served."""
    generator, texts = torch.Generator().manual_seed(5), [[start, start + 1] for start in beginnings]
    for text in texts:
        for _ in range(40):
            p = torch.softmax(full_logits(model, text)[-1], -1)
            text.append(int(torch.multinomial(p, 1, generator=generator)))
    return texts


def kl(teacher: Transformer, student: Transformer, texts: list[list[int]]) -> float:
    """The dense one, nats a token."""
    found = []
    for text in texts:
        log_p, log_q = (torch.log_softmax(full_logits(model, text), -1) for model in (teacher, student))
        found.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    return float(torch.stack(found).mean())
