"""Files of rows: the rows of the `datasets` library's own readers, and a sentence for everything that is damaged."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.sources import DataConfig, open_source
from train.tables import rows_of

ROWS = [{"text": f'line {number}\n"quoted", naïve 世界', "label": f"n{number}"} for number in range(300)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
LIST = json.dumps(ROWS, indent=1).encode()


def zstd(content: bytes) -> bytes:
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "zstd") as packed:
        packed.write(content)
    return stream.getvalue().to_pybytes()


PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def as_csv(folder: Path) -> bytes:
    datasets.Dataset.from_list(ROWS).to_csv(folder / "theirs", index=False)
    return (folder / "theirs").read_bytes()


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_rows_are_those_of_the_datasets_library(suffix: str, packing: str, tmp_path: Path) -> None:
    content = {".jsonl": LINES, ".json": LIST, ".csv": as_csv(tmp_path)}[suffix]
    path = tmp_path / f"rows{suffix}{packing}"
    path.write_bytes(PACKED[packing](content))
    ours = list(rows_of(path))
    reader = {"csv": datasets.Dataset.from_csv}.get(suffix[1:], datasets.Dataset.from_json)
    plain = tmp_path / f"plain{suffix}"  # the library has no zstd of its own
    plain.write_bytes(content)
    theirs = reader(str(plain), cache_dir=str(tmp_path / "cache"))
    assert [row.value for row in ours] == theirs.to_list() == ROWS
    assert sum(row.weight for row in ours) == path.stat().st_size


def test_compressed_files_may_have_several_members(tmp_path: Path) -> None:
    for packing, pack in PACKED.items():
        (tmp_path / f"rows.jsonl{packing}").write_bytes(pack(LINES) + pack(LINES))
    assert all([row.value for row in rows_of(path)] == ROWS * 2 for path in tmp_path.iterdir())


def test_a_json_file_may_hold_a_row_a_line(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_bytes(b"\xef\xbb\xbf" + LINES)
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0], indent=2))
    assert [row.value for row in rows_of(tmp_path / "lines.json")] == ROWS
    assert [row.value for row in rows_of(tmp_path / "one.json")] == ROWS[:1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers() | st.none(), max_size=3)))
def test_any_list_of_rows_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("list") / "rows.json"
    for indent in (None, 2):
        path.write_text(json.dumps(rows, indent=indent))
        assert [row.value for row in rows_of(path)] == rows


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, line 2 is not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "x"}\n {"text": "cu\n',
            "line 2 is not valid JSON: Unterminated string starting at column 11",
        ),
        ("a.jsonl", b'{"text": "x\ty"}\n', "a.jsonl, line 1 is not valid JSON: Invalid control character at column 12"),
        ("a.jsonl", b'{"text": "\\q"}\n', "a.jsonl, line 1 is not valid JSON: Invalid \\escape at column 11"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "caf\xe9"}\n',
            "a.jsonl, line 2 is not UTF-8 text: save text as UTF-8, and",
        ),
        ("a.jsonl", gzip.compress(LINES), "line 1 is not UTF-8 text"),
        ("a.jsonl", b"PAR1\x15\xbc\n", "are, Parquet .parquet, and compressed ones with .gz or .zst at the end"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "a.jsonl, line 1 is not UTF-8 text"),
        ("a.jsonl", LIST, "a.jsonl, line 1 begins a list; a row is an object like"),
        ("a.jsonl", b'[{"text": "x"}]', "and a file that is one list of rows is to be named .json"),
        ("a.json", b'[{"text": "x"}, {"text": ]', "a.json, row 2 is not valid JSON"),
        ("a.json", b'[{"text": "x"}, ]', "a.json, row 2 is not valid JSON"),
        ("a.json", b'[{"text": "x"} {"text": "y"}]', "a.json, row 1 is followed by"),
        ("a.json", b'[{"text": "x"}', "a.json, row 1 is followed by ''"),
        ("a.json", b'[{"text": "x"}] more', "a.json goes on behind its list of rows: 'more'"),
        ("a.json", b'[\n{"text": "\xff"}]', "a.json, line 2 is not UTF-8 text: save text as UTF-8, and"),
        ("a.csv", b"text,label\nx,1\ny\n", "a.csv, line 3 has 1 cells, but the header has 2"),
        ("a.csv", b'text\n"x\n', "a.csv, line 2 is not valid CSV"),
        ("a.csv", b"text\n\xff\n", "a.csv is not UTF-8 text: save text as UTF-8, and"),
        ("a.jsonl.gz", b"plain", "a.jsonl.gz is not compressed by gzip, though its name ends in .gz"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-20], "a.jsonl.gz cannot be read: Compressed file ended"),
        ("a.jsonl.zst", b"plain", "a.jsonl.zst cannot be read: ZSTD"),
        ("a.jsonl.zst", zstd(LINES)[:-20], "a.jsonl.zst cannot be read: Truncated"),
        ("a.parquet", b"PAR1 nothing PAR1", "a.parquet is not a readable parquet file"),
        ("a.jsonl", b"\n\n", "a.jsonl holds no row"),
        ("a.json", b"[]", "a.json holds no row"),
        ("a.csv", b"text,label\n", "a.csv holds no row"),
    ],
)
def test_damage_is_named_with_its_place(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        list(open_source(DataConfig(str(tmp_path / name))).documents())
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def texts(source: Path, **changes: Any) -> list[Any]:
    return [document.content for document in open_source(DataConfig(str(source), **changes)).documents()]


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": table, "test": table.select(range(4))}).save_to_disk(tmp_path / "both")
    assert texts(tmp_path / "one") == texts(tmp_path / "both") == [row["text"] for row in ROWS]
    assert texts(tmp_path / "both", split="test") == [row["text"] for row in ROWS[:4]]
    assert texts(tmp_path / "one", max_documents=2) == [row["text"] for row in ROWS[:2]]
    before = open_source(DataConfig(str(tmp_path / "one"))).fingerprint
    assert before == open_source(DataConfig(str(tmp_path / "one"))).fingerprint
    assert before != open_source(DataConfig(str(tmp_path / "both"), split="test")).fingerprint
    with pytest.raises(ValueError, match="both has no split 'dev'; `split` can be test, train"):
        texts(tmp_path / "both", split="dev")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="one is no readable folder of `save_to_disk`"):
        texts(tmp_path / "one")


def folder_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(PACKED[Path(name).suffix](LINES) if Path(name).suffix in PACKED else LINES)
    return path


@pytest.mark.parametrize(
    ("names", "count", "left_out"),
    [
        (["a.jsonl", "deep/b.jsonl.gz"], 600, ""),
        (["a.jsonl", "README.md", ".gitattributes", ".git/x"], 300, "1 file was left out (of another"),
        (
            ["a.jsonl", "info.json", "scan.pdf"],
            300,
            "2 files were left out (of another kind than those that are read): info",
        ),
        (
            ["a.txt", "b.py", "c.json", "d.csv"],
            2,
            "2 files were left out (of another kind than those that are read): c.j",
        ),
        (["a.json", "b.json"], 600, ""),
    ],
)
def test_what_of_a_folder_is_not_read_is_counted_and_named(
    names: list[str], count: int, left_out: str, tmp_path: Path
) -> None:
    source = open_source(DataConfig(str(folder_of(tmp_path, *names))))
    assert len(list(source.documents())) == count
    assert len(source.left_out) == bool(left_out) and all(left_out in sentence for sentence in source.left_out)


def test_text_that_is_not_utf8_is_counted_and_named(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff\xfe" if number < 7 else b"fine")
    source = open_source(DataConfig(str(tmp_path)))
    assert [document.content for document in source.documents()] == ["fine", "fine"]
    (sentence,) = source.left_out
    assert "7 files were left out (not UTF-8 text): " in sentence and sentence.endswith(" and 2 more")


def test_a_hub_that_is_not_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'org/name'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ValueError, match=r"^data source 'org/name' cannot be loaded from the hub: Couldn't reach .*Hub$"
    ):
        open_source(DataConfig("org/name"))
