"""Where training text comes from: the hub, local files, or the Python standard library's own source.

A source is an ordered stream of documents with a fingerprint of its content. Text files are one document each, in the
order of a hash of their names, so that the first N are a fair sample of a folder; rows of jsonl, parquet and hub data
sets keep their order.
"""

import hashlib
import itertools
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from model.files.safe_io import sha256_of
from model.settings import COUNTS, check, setting

PYTHON_STDLIB = "python-stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".py")
ROW_SUFFIXES = (".jsonl", ".parquet")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

Message = dict[str, Any]


@dataclass(frozen=True)
class DataConfig:
    """Text to train and to measure on. It is tokenized once and cached by its content."""

    source: str
    """`python-stdlib` or a folder of it (`python-stdlib/email`), a local file or folder (.txt, .md, .py, .jsonl,
    .parquet), or a hub id `org/name`."""
    sequence_length: int = setting(1024, count=True, range=(2, 1e7))
    """Most tokens a position can look back on; longer documents are cut."""
    held_out: float = setting(0.02, range=(0.0, 0.999))
    """Fraction of the documents that training never sees; chosen by a hash of the document, so that none ever moves."""
    chat: bool = False
    """Documents are conversations; only the assistant's tokens are labels."""
    text_field: str = "text"
    """Field of a record that holds its text."""
    messages_field: str = "messages"
    """Field of a record that holds its conversation, with `chat`."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    max_documents: int | None = setting(None, count=True, range=COUNTS)
    """Stop after this many documents, counting held-out ones."""
    seed: int = 0
    """Decides which documents are held out."""
    distributions: str | None = None
    """Folder of a teacher's distributions for these documents, as the stage that stores them made it."""

    def __post_init__(self) -> None:
        check(self)


class Document(NamedTuple):
    """One text, or one conversation, and how much of the source's `size` it stands for."""

    content: str | list[Message]
    weight: int


@dataclass(frozen=True)
class Source:
    """An ordered stream of documents."""

    fingerprint: str
    """SHA-256 over the names and contents of everything that will be read."""
    size: int
    """Sum of the documents' weights (bytes for files, rows for tables): what progress is measured against."""
    documents: Callable[[], Iterator[Document]]


def open_source(config: DataConfig) -> Source:
    """Finds the data set that `config` names; raises ValueError naming the source when there is none."""
    if config.source.split("/")[0] == PYTHON_STDLIB:
        return _standard_library(config)
    path = Path(config.source).expanduser()
    if path.exists():
        return _local(path, config)
    if path.suffix in TEXT_SUFFIXES + ROW_SUFFIXES or not HUB_ID.fullmatch(config.source):
        raise ValueError(f"data source {config.source!r} does not exist on this machine and is no hub id (org/name)")
    return _hub(config)


def _standard_library(config: DataConfig) -> Source:
    if config.chat:
        raise ValueError(f"{PYTHON_STDLIB} holds no conversations; switch `chat` off or name another source")
    part = config.source.removeprefix(PYTHON_STDLIB).strip("/")
    root = Path(sysconfig.get_path("stdlib")) / part
    if not root.is_dir():
        raise ValueError(f"the Python standard library has no folder {part!r}")
    return _text_files(root, config, suffixes=(".py",), skip_folders=("site-packages", "dist-packages"))


def _local(path: Path, config: DataConfig) -> Source:
    suffixes = [path.suffix] if path.is_file() else [file.suffix for file in path.rglob("*")]
    has_text, has_rows = (any(suffix in known for suffix in suffixes) for known in (TEXT_SUFFIXES, ROW_SUFFIXES))
    if has_text and has_rows and path.is_dir() and not config.chat:
        raise ValueError(f"{path} holds both text files and tables ({', '.join(ROW_SUFFIXES)}): name one kind")
    if has_rows:
        return _row_files(path, config)
    if config.chat:
        raise ValueError(f"{path} holds no conversations: chat data is read from {' or '.join(ROW_SUFFIXES)} files")
    if has_text:
        return _text_files(path, config)
    raise ValueError(f"{path} holds no file that can be read as data: {', '.join(TEXT_SUFFIXES + ROW_SUFFIXES)}")


def _files_below(path: Path, suffixes: tuple[str, ...], skip_folders: tuple[str, ...] = ()) -> list[tuple[str, Path]]:
    """Pairs of the name inside `path` and the file, sorted by name."""
    if path.is_file():
        return [(path.name, path)]
    found = ((file.relative_to(path), file) for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
    return sorted((name.as_posix(), file) for name, file in found if not set(name.parts) & set(skip_folders))


def _fingerprint(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _text_files(
    path: Path, config: DataConfig, *, suffixes: tuple[str, ...] = TEXT_SUFFIXES, skip_folders: tuple[str, ...] = ()
) -> Source:
    """Files that are not UTF-8 are no text and are left out (the standard library tests itself with a few)."""
    files = _files_below(path, suffixes, skip_folders)
    files.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
    files = files[: config.max_documents]

    def documents() -> Iterator[Document]:
        for _, file in files:
            raw = file.read_bytes()
            try:
                yield Document(raw.decode("utf-8"), len(raw))
            except UnicodeDecodeError:
                continue

    fingerprint = _fingerprint(f"{name} {sha256_of(file)}" for name, file in files)
    return Source(fingerprint, sum(file.stat().st_size for _, file in files), documents)


def _row_files(path: Path, config: DataConfig) -> Source:
    files = _files_below(path, ROW_SUFFIXES)

    def documents() -> Iterator[Document]:
        for _, file in files:
            yield from _jsonl_rows(file, config) if file.suffix == ".jsonl" else _parquet_rows(file, config)

    fingerprint = _fingerprint(f"{name} {sha256_of(file)}" for name, file in files)
    size = sum(file.stat().st_size for _, file in files)
    return Source(fingerprint, size, lambda: itertools.islice(documents(), config.max_documents))


def _jsonl_rows(file: Path, config: DataConfig) -> Iterator[Document]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as reason:
                raise ValueError(f"{file}, line {number} is not valid JSON: {reason}") from None
            yield Document(_content(row, config, f"{file}, line {number}"), len(line))


def _parquet_rows(file: Path, config: DataConfig) -> Iterator[Document]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    field = config.messages_field if config.chat else config.text_field
    try:
        table = ParquetFile(file)
    except ArrowInvalid as reason:
        raise ValueError(f"{file} is not a readable parquet file: {reason}") from None
    if field not in table.schema_arrow.names:
        raise ValueError(f"{file} has no column {field!r}; its columns are {', '.join(table.schema_arrow.names)}")
    weight = file.stat().st_size // max(table.metadata.num_rows, 1)
    number = 0
    for batch in table.iter_batches(columns=[field]):
        for row in batch.to_pylist():
            number += 1
            yield Document(_content(row, config, f"{file}, row {number}"), weight)


def _hub(config: DataConfig) -> Source:
    from datasets import load_dataset

    table = load_dataset(config.source, config.subset, split=config.split)
    if config.max_documents is not None:
        table = table.select(range(min(config.max_documents, len(table))))

    def documents() -> Iterator[Document]:
        for number, row in enumerate(table, 1):
            yield Document(_content(row, config, f"{config.source}, row {number}"), 1)

    return Source(_fingerprint([config.source, table._fingerprint]), len(table), documents)


def _content(row: Any, config: DataConfig, where: str) -> str | list[Message]:
    """The text or the conversation in a row, checked; `where` names the row in the error."""
    field = config.messages_field if config.chat else config.text_field
    if not isinstance(row, dict) or field not in row:
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no field {field!r} (found: {found})")
    content = row[field]
    if not config.chat:
        if not isinstance(content, str):
            raise ValueError(f"{where}: {field!r} must be text, not {type(content).__name__}")
        return content
    is_list = isinstance(content, list)
    if not is_list or not all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in content):
        raise ValueError(f"{where}: {field!r} must be a list of messages, each with a role and a content")
    return content
