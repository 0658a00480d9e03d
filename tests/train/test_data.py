"""From sources to token files: what becomes a label, what is held out, and what a damaged cache does."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from model.files.distributions import Sampled
from model.files.labels import LabelFolder, LabelledDocument, Origin, vocabulary_digest
from model.text.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import our_tokenizer
from tests.trials import trials
from train.data import DamagedCacheError, DataConfig, PreparedData, TokenizedDocuments, load_cache, prepare

TEXTS = [f"def number_{i}():\n    return {i} * {i}\n" + "# naïve 世界\n" * (i % 3) for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return our_tokenizer(template="chatml")


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_of(tokenizer: Tokenizer, documents: TokenizedDocuments, number: int) -> str:
    ids = documents.tokens[documents.offsets[number] : documents.offsets[number + 1]]
    return tokenizer.decode(ids.tolist())


def texts_of(tokenizer: Tokenizer, documents: TokenizedDocuments) -> list[str]:
    return [text_of(tokenizer, documents, number) for number in range(documents.num_documents)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "hub"])
def test_every_kind_of_source_gives_its_documents(
    kind: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": text, "other": 1} for text in TEXTS]
    source = tmp_path / "source"
    if kind == "jsonl":
        source = write_jsonl(tmp_path / "source.jsonl", rows)
    elif kind == "parquet":
        source = tmp_path / "source.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source, row_group_size=7)
    elif kind == "folder":
        for number, text in enumerate(TEXTS):
            file = source / f"part-{number % 3}" / f"{number}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (source / "ignored.bin").write_bytes(b"\xff\xfe")
        (source / "not-utf8.txt").write_bytes(b"\xff\xfe broken")
    else:
        asked: list[Any] = []
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *args, **kw: asked.append((args, kw)) or datasets.Dataset.from_list(rows)
        )
        source = Path("someone/something")
    config = DataConfig(str(source), held_out=0.2, subset="small", split="validation")
    data = prepare(config, tokenizer, tmp_path / "cache", progress=False)
    found = texts_of(tokenizer, data.train) + texts_of(tokenizer, data.held_out)
    assert sorted(found) == sorted(TEXTS) if kind == "folder" else set(found) == set(TEXTS)
    assert data.train.num_documents + data.held_out.num_documents == len(TEXTS)
    assert data.train.num_bytes == sum(len(text.encode()) for text in texts_of(tokenizer, data.train))
    if kind == "hub":
        assert asked == [(("someone/something", "small"), {"split": "validation"})]


def test_the_standard_library_is_python_source_and_max_documents_takes_a_sample(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = DataConfig("python-stdlib", max_documents=6, held_out=0.0)
    data = prepare(config, tokenizer, tmp_path, progress=False)
    assert data.train.num_documents == 6
    assert data.held_out.num_documents == 0 and data.held_out.num_tokens == 0
    again = prepare(DataConfig("python-stdlib", max_documents=5, held_out=0.0), tokenizer, tmp_path, progress=False)
    assert texts_of(tokenizer, again.train) == texts_of(tokenizer, data.train)[:5]


def test_a_folder_of_the_standard_library(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = prepare(DataConfig("python-stdlib/json", held_out=0.0), tokenizer, tmp_path, progress=False)
    files = Path(json.__file__).parent.glob("*.py")
    assert sorted(texts_of(tokenizer, data.train)) == sorted(file.read_text("utf-8") for file in files)
    with pytest.raises(ValueError, match="no folder 'jsn'"):
        prepare(DataConfig("python-stdlib/jsn"), tokenizer, tmp_path, progress=False)


def test_documents_end_with_the_end_of_text_token_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    data = prepare(DataConfig(str(file), held_out=0.0), tokenizer, tmp_path / "cache", progress=False)
    eos = tokenizer.eos_token_ids[0]
    assert data.train.tokens.tolist() == [*tokenizer.encode("one"), eos, *tokenizer.encode("two"), eos]


def conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is {number} plus one? <|im_end|>"},
        {"role": "assistant", "content": f"It is {number + 1}."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]


def test_only_the_assistants_tokens_are_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"messages": conversation(number)} for number in range(9)]
    file = write_jsonl(tmp_path / "chat.jsonl", rows)
    data = prepare(DataConfig(str(file), chat=True, held_out=0.3), tokenizer, tmp_path / "cache", progress=False)
    for documents in (data.train, data.held_out):
        assert documents.num_documents > 0 and documents.labels_mask is not None
        for first, end in zip(documents.offsets, documents.offsets[1:], strict=False):
            ids, mask = documents.tokens[first:end], documents.labels_mask[first:end]
            number = rows.index(
                {"messages": conversation(int(tokenizer.decode(ids.tolist()).split("is ")[1].split()[0]))}
            )
            labelled = tokenizer.decode(ids[mask == 1].tolist(), skip_special_tokens=True)
            assert labelled.replace("\n", "") == f"It is {number + 1}.Yes."


def test_held_out_windows_spell_their_bytes_exactly(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text * 5} for text in TEXTS])
    config = DataConfig(str(file), held_out=0.5, sequence_length=16)
    held_out = prepare(config, tokenizer, tmp_path / "cache", progress=False).held_out
    whole = DataConfig(str(file), held_out=0.5, sequence_length=100_000)
    documents = prepare(whole, tokenizer, tmp_path / "cache", progress=False).held_out
    assert max(np.diff(held_out.offsets)) == 17
    # Each document's first token is no label; everything else is counted once.
    table = tokenizer.token_bytes(skip_special_tokens=True)
    firsts = sum(len(table[int(documents.tokens[at])]) for at in documents.offsets[:-1])
    texts = sum(len(text.encode()) for text in texts_of(tokenizer, documents))
    assert held_out.num_bytes == documents.num_bytes == texts - firsts
    # First windows come first: a short evaluation reads the beginning of every document.
    beginnings = {tuple(documents.tokens[at : at + 17].tolist()) for at in documents.offsets[:-1]}
    first_windows = [
        tuple(held_out.tokens[a:b].tolist())
        for a, b in zip(held_out.offsets[: documents.num_documents], held_out.offsets[1:], strict=False)
    ]
    assert set(first_windows) == beginnings


def test_a_held_out_document_never_moves(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def held_out(texts: list[str], **changes: Any) -> set[str]:
        file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
        config = DataConfig(str(file), **({"held_out": 0.3} | changes))
        return set(texts_of(tokenizer, prepare(config, tokenizer, tmp_path / "cache", progress=False).held_out))

    few, many = held_out(TEXTS[:20]), held_out(TEXTS[::-1])
    assert few and few <= many
    assert many & set(TEXTS[:20]) == few
    assert held_out(TEXTS, held_out=0.6) > many
    assert held_out(TEXTS, seed=1) != many


@pytest.mark.parametrize("seed", range(3))
def test_where_the_hash_selects_no_document_the_one_of_least_hash_is_held_out(
    seed: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def split(texts: list[str], held_out: float) -> tuple[list[str], list[str]]:
        file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
        config = DataConfig(str(file), held_out=held_out, seed=seed)
        data = prepare(config, tokenizer, tmp_path / "cache", progress=False)
        return texts_of(tokenizer, data.train), texts_of(tokenizer, data.held_out)

    learnt, (least,) = split(TEXTS, 1e-9)
    assert learnt == [text for text in TEXTS if text != least]
    assert split(TEXTS[::-1], 1e-9) == (learnt[::-1], [least])
    assert split(["", *TEXTS], 1e-9)[1] == [least], "of a text without labels nothing could be measured"
    assert least in split(TEXTS, 0.5)[1], "a part that selects some begins with it"
    assert split(TEXTS[:2], 0.0) == (TEXTS[:2], [])


def test_of_a_servers_labels_one_document_is_held_out_at_least(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = LabelFolder(tmp_path / "labels", Origin("teacher", vocabulary_digest(tokenizer), 50), max_bytes=1 << 30)
    one = Sampled(np.array([1]), np.array([7]), np.array([50], np.uint8), np.zeros(1, np.float32))
    for text in TEXTS[:3]:
        ids = np.array(tokenizer.encode(text), np.int32)
        folder.write([LabelledDocument(ids, np.array([2]), one)])
    folder.close()
    config = DataConfig(str(folder.folder), held_out=1e-9, sequence_length=1000)
    data = prepare(config, tokenizer, tmp_path / "cache", progress=False)
    (least,) = texts_of(tokenizer, data.held_out)
    assert texts_of(tokenizer, data.train) == [text for text in TEXTS[:3] if text != least]
    assert data.train.distributions is not None


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([{"text": ""}], {}, "supervises no token"),
        ([{"messages": [{"role": "user", "content": "Hi"}]}], {"chat": True}, "supervises no token: .* assistant"),
        (
            [{"messages": [{"role": "user", "content": "Hi"}]}, {"messages": [{"role": "bot", "content": "a"}]}],
            {"chat": True},
            r"of 'user' \(first in .*a.jsonl, line 1\), 'bot' \(first in .*a.jsonl, line 2\), none of 'assistant'$",
        ),
        ([{"messages": []}], {"chat": True}, "completions$"),
        ([{"text": "ab"}, {"text": "c"}], {"held_out": 0.999}, "leaves nothing to train on; give more documents that"),
        ([{"text": "ab"}, {"text": "ab"}], {"held_out": 1e-3}, "leaves nothing to train on; give more documents that"),
        ([{"text": "abc"}], {"held_out": 0.001}, "a.jsonl' is a single document, which cannot be both learnt and held"),
        ([{"text": "abc"}], {"held_out": 0.999}, "a.jsonl' is a single document, which cannot be both learnt and held"),
        ([{"text": 3}], {}, "'text' must be text, not int"),
        ([{"messages": "Hi"}], {"chat": True}, "must be a list of messages"),
    ],
)
def test_what_is_wrong_with_data_is_one_sentence_with_its_place(
    rows: list[Any], changes: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    config = DataConfig(str(file), **({"held_out": 0.0} | changes))
    with pytest.raises(ValueError, match=message):
        prepare(config, tokenizer, tmp_path / "cache", progress=False)
    assert not any((tmp_path / "cache").iterdir()), "a refused data set must leave nothing behind"


def test_unreadable_sources_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    (tmp_path / "empty").mkdir()
    expected = {
        "bad.jsonl": "line 2 is not valid JSON",
        "bad.parquet": "not a readable parquet file",
        "missing.jsonl": "does not exist on this machine",
        "empty": "holds no file that can be read as data",
    }
    for name, message in expected.items():
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            prepare(DataConfig(str(tmp_path / name)), tokenizer, tmp_path / "cache", progress=False)
    with pytest.raises(ValueError, match="holds no conversations"):
        prepare(DataConfig("python-stdlib", chat=True), tokenizer, tmp_path / "cache")


@pytest.fixture
def cached(tmp_path: Path, tokenizer: Tokenizer) -> tuple[Path, Callable[[], PreparedData]]:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    config = DataConfig(str(file), held_out=0.2)

    def again() -> PreparedData:
        return prepare(config, tokenizer, tmp_path / "cache", progress=False)

    again()
    (folder,) = (tmp_path / "cache").iterdir()
    return folder, again


def test_data_is_tokenized_once(
    cached: tuple[Path, Callable[[], PreparedData]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, again = cached
    first = again()
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **kw: pytest.fail("tokenized again"))
    assert again().train.digest == first.train.digest
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    # A change of a single byte of the source is another data set.
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS[:-1]])
    with pytest.raises(BaseException, match="tokenized again"):
        again()


def test_every_damage_to_the_cache_is_found_and_repaired_loudly(
    cached: tuple[Path, Callable[[], PreparedData]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, again = cached
    digest = again().train.digest
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        damages = {
            "missing": None,
            "short": whole[:-2],
            "flipped": whole[:5] + bytes([whole[5] ^ 1]) + whole[6:],
        }
        for damage in damages.values():
            path.unlink() if damage is None else path.write_bytes(damage)
            with pytest.raises(DamagedCacheError, match=path.name):
                load_cache(folder, "toy")
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert again().train.digest == digest
            assert path.name in caplog.text and "Tokenizing" in caplog.text
            assert path.read_bytes() == whole


def test_no_damage_to_the_cache_is_overlooked(cached: tuple[Path, Callable[[], PreparedData]]) -> None:
    folder, again = cached
    digest = again().train.digest
    generator = random.Random(0)
    files = [path for path in sorted(folder.iterdir()) if path.stat().st_size]
    for number in range(trials(10, 200)):
        path = generator.choice(files)
        whole = path.read_bytes()
        at = generator.randrange(len(whole))
        path.write_bytes(whole[:at] if number % 2 else whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(DamagedCacheError, match=path.name):
            load_cache(folder, "toy")
        path.write_bytes(whole)
    assert load_cache(folder, "toy").train.digest == digest


def test_a_short_shard_is_named_with_the_byte_where_it_ends(cached: tuple[Path, Callable[[], PreparedData]]) -> None:
    folder, _ = cached
    path = folder / "train.tokens"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 6)
    with pytest.raises(DamagedCacheError, match=f"train.tokens ends at byte {size - 6} instead of {size}"):
        load_cache(folder, "toy")
