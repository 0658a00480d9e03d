"""Where training text comes from: the hub, local files, or the Python standard library's own source.

A source is an ordered stream of documents with a fingerprint of its content. Text files are one document each, in the
order of a hash of their names, so that the first N are a fair sample of a folder; rows of tables keep their order.
What a row holds is recognised (`train.rows`); which files hold rows, `train.tables` knows.
"""

import hashlib
import heapq
import itertools
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from model.files.label_shards import INDEX_NAME, is_label_folder, label_shards
from model.files.safe_io import sha256_of
from model.settings import COUNTS, POSITIVE, check, setting
from train.rows import Content, Message, RowFormat, fields_of, recognise
from train.tables import TABLES, first_fields, rows_of, table_suffix

__all__ = ["DataConfig", "Document", "Message", "Part", "Source", "name_some", "open_source", "settings_of"]

PYTHON_STDLIB = "python-stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPANIONS = ("json", "csv")
"""Tables that lie beside other data as often as they are data: in a folder they are read where nothing else is."""
CARD = "README.md"
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files by which a folder of `save_to_disk` is known: one table, or several splits."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
NAMES_SHOWN = 5

NamedFile = tuple[str, Path]
"""A file with its name inside the source."""


@dataclass(frozen=True)
class SourceConfig:
    """One source, and how it is read."""

    source: str
    """`python-stdlib` or a folder of it (`python-stdlib/email`); a local file or folder: .txt, .md and .py are a text
    each, .jsonl, .json, .csv (also .gz and .zst) and .parquet hold a document a row, as do folders of `save_to_disk`;
    or a hub id `org/name`. Rows may hold text, messages, ShareGPT's conversations, Alpaca's instructions, or a prompt
    and its completion; their fields tell which."""
    chat: bool = False
    """Read rows that hold both as conversations instead of as text, and a prompt with its completion as two messages.
    Of conversations only the assistant's tokens are labels."""
    text_field: str = "text"
    """Field of a row that holds its text."""
    messages_field: str = "messages"
    """Field of a row that holds its conversation."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of a hub data set, or of a folder of `save_to_disk`."""
    max_documents: int | None = setting(None, count=True, range=COUNTS)
    """Stop after this many documents, counting held-out ones."""
    prompt_field: str = setting("prompt", later=True)
    """Field of a row that holds what comes before its completion, which is no label."""
    completion_field: str = setting("completion", later=True)
    """Field of a row that holds what is learnt after its prompt."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Part(SourceConfig):
    """One source of several."""

    weight: float = setting(1.0, range=POSITIVE)
    """Its part of the tokens that are trained on, beside the weights of the others."""


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Text to train and to measure on. It is tokenized once and cached by its content."""

    source: str = ""
    mix: tuple[Part, ...] = setting((), later=True)
    """Several sources instead of one. Each has its weight in tokens: smaller ones are read again while larger ones are
    not through. What an epoch is follows from that: as many tokens as all of them hold together."""
    sequence_length: int = setting(1024, count=True, range=(2, 1e7))
    """Most tokens a position can look back on; longer documents are cut."""
    held_out: float = setting(0.02, range=(0.0, 0.999))
    """Fraction of the documents that training never sees; chosen by a hash of the document, so that none ever moves.
    Where it selects none, the document of least hash is held out."""
    seed: int = 0
    """Decides which documents are held out."""
    preference: bool = setting(False, later=True)
    """Read rows as pairs of a chosen and a rejected answer, texts or messages, to one prompt."""
    chosen_field: str = setting("chosen", later=True)
    """Field of a pair's better answer."""
    rejected_field: str = setting("rejected", later=True)
    """Field of its worse one. The prompt is in `prompt_field`, or at the beginning of both."""
    distributions: str | None = None
    """Folder of a teacher's distributions for these documents, as the stage that stores them made it."""

    def __post_init__(self) -> None:
        check(self)
        if not self.mix:
            if not self.source:
                raise ValueError("source is missing; name one, or several as a list in `mix`")
            return
        if self.preference:
            raise ValueError("preference stands beside mix; pairs of answers come from one source")
        for one in fields(SourceConfig):
            if getattr(self, one.name) != (one.default if one.name != "source" else ""):
                raise ValueError(f"{one.name} stands beside mix; it belongs to each source in that list")

    @property
    def is_labels(self) -> bool:
        """Whether a server has stored it, with what its model says."""
        return bool(self.source) and is_label_folder(self.source)

    @property
    def has_distributions(self) -> bool:
        """Whether what a teacher says of it is stored."""
        return self.distributions is not None or self.is_labels

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.source or " + ".join(part.source for part in self.mix)

    def parts(self) -> "list[DataConfig]":
        """Each source of a mixture as a data set of its own."""
        common = {name: getattr(self, name) for name in ("sequence_length", "held_out", "seed")}
        own = [one.name for one in fields(SourceConfig)]
        return [DataConfig(**{name: getattr(part, name) for name in own}, **common) for part in self.mix]


def settings_of(config: DataConfig) -> dict[str, Any]:
    """As plain data, without settings that came later and are at their default: what caches are named by."""
    later = [
        one.name for one in fields(config) if one.metadata.get("later") and getattr(config, one.name) == one.default
    ]
    return {name: value for name, value in asdict(config).items() if name not in later}


class Document(NamedTuple):
    """One text, conversation or completion, and how much of the source's `size` it stands for."""

    content: Content
    weight: int
    where: str
    """The file or the row that it stands in."""


@dataclass(frozen=True)
class Source:
    """An ordered stream of documents."""

    fingerprint: str
    """SHA-256 over the names and contents of everything that will be read."""
    size: int
    """Sum of the documents' weights (bytes for files, rows for tables): what progress is measured against."""
    documents: Callable[[], Iterator[Document]]
    learns_all: bool = True
    """Whether every token of every document is a label."""
    format: str = "text"
    """What a row holds, in words."""
    left_out: tuple[str, ...] = ()
    """A sentence for each kind of file that is there and not read."""


def open_source(config: DataConfig) -> Source:
    """Finds the data set that `config` names; raises ValueError naming the source when there is none."""
    if config.mix:
        return _mixture(config)
    check_reachable(config)
    if config.source.split("/")[0] == PYTHON_STDLIB:
        return _standard_library(config)
    path = Path(config.source).expanduser()
    return _local(path, config) if path.exists() else _hub(config)


def check_reachable(config: DataConfig) -> None:
    """Raises ValueError where the source, which is no mixture, is nowhere on this machine and of no name on the hub."""
    path = Path(config.source).expanduser()
    if config.source.split("/")[0] == PYTHON_STDLIB or path.exists():
        return
    if path.suffix in TEXT_SUFFIXES or table_suffix(path) or not HUB_ID.fullmatch(config.source):
        raise ValueError(f"data source {config.source!r} does not exist on this machine and is no hub id (org/name)")


def _mixture(config: DataConfig) -> Source:
    """Documents of all parts, each part's in its order, as many of each as its weight says, as long as they last."""
    sources, weights = [open_source(part) for part in config.parts()], [part.weight for part in config.mix]

    def turns(source: Source, weight: float) -> Iterator[tuple[float, Document]]:
        for number, document in enumerate(source.documents(), 1):
            yield number / weight, document

    def documents() -> Iterator[Document]:
        for _, document in heapq.merge(*map(turns, sources, weights), key=itemgetter(0)):
            yield document

    return Source(
        _fingerprint(f"{source.fingerprint} {weight}" for source, weight in zip(sources, weights, strict=True)),
        sum(source.size for source in sources),
        documents,
        learns_all=all(source.learns_all for source in sources),
        format=", ".join(dict.fromkeys(source.format for source in sources)),
        left_out=tuple(sentence for source in sources for sentence in source.left_out),
    )


def _standard_library(config: DataConfig) -> Source:
    if config.chat or config.preference:
        kind, key = ("pairs of answers", "preference") if config.preference else ("conversations", "chat")
        raise ValueError(f"{PYTHON_STDLIB} holds no {kind}; switch `{key}` off or name another source")
    part = config.source.removeprefix(PYTHON_STDLIB).strip("/")
    root = Path(sysconfig.get_path("stdlib")) / part
    if not root.is_dir():
        raise ValueError(f"the Python standard library has no folder {part!r}")
    skipped = {"site-packages", "dist-packages"}
    found = ((name, file) for name, file in _files_below(root) if file.suffix == ".py")
    return _text_files([(name, file) for name, file in found if not skipped & set(Path(name).parts)], config)


def _local(path: Path, config: DataConfig) -> Source:
    if is_label_folder(path):
        return _labels(path)
    if (path / SAVED).exists() or (path / SAVED_SPLITS).exists():
        return _saved(path, config)
    files = _files_below(path)
    chosen = _chosen(path, files, config)
    others = [name for name, _ in files if name not in dict(chosen) and not any(map(_is_hidden, Path(name).parts))]
    left_out = _left_out(path, "of another kind than those that are read", others)
    if chosen[0][1].suffix in TEXT_SUFFIXES:
        return _text_files(chosen, config, left_out)
    return _table_files(path, chosen, config, left_out)


def _labels(path: Path) -> Source:
    """What a server has stored: tokens, that train/data.py reads by themselves."""

    def documents() -> Iterator[Document]:
        raise ValueError(f"{path} holds labels of a server, which are trained on as they are: alone, not in a mix")

    parts = [sha256_of(path / INDEX_NAME), *(shard.name for shard in label_shards(path))]
    return Source(_fingerprint(parts), len(parts) - 1, documents, learns_all=False, format="labels of a server")


def _chosen(path: Path, files: Sequence[NamedFile], config: DataConfig) -> list[NamedFile]:
    """The files that are read: of one kind, text or tables."""
    tables = [(name, file) for name, file in files if table_suffix(file)]
    rows = [(name, file) for name, file in tables if table_suffix(file).split(".")[1] not in COMPANIONS]
    texts = [(name, file) for name, file in files if file.suffix in TEXT_SUFFIXES and not (rows and name == CARD)]
    of_rows = config.chat or config.preference
    if of_rows and texts and not tables:
        kind, data = ("pairs of answers", "they are") if config.preference else ("conversations", "chat data is")
        raise ValueError(f"{path} holds no {kind}: {data} read from {', '.join(TABLES)} files")
    if rows and texts and not of_rows:
        raise ValueError(f"{path} holds both text files ({texts[0][0]}) and tables ({rows[0][0]}): name one kind")
    chosen = rows or ([] if of_rows else texts) or tables
    if not chosen:
        known = ", ".join((*TEXT_SUFFIXES, *TABLES))
        raise ValueError(f"{path} holds no file that can be read as data: {known}, or a folder of `save_to_disk`")
    return chosen


def _is_hidden(part: str) -> bool:
    return part.startswith(".")


def name_some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"


def _left_out(source: str | Path, why: str, names: Sequence[str]) -> tuple[str, ...]:
    """A sentence about files that are not read, if there are any."""
    if not names:
        return ()
    count = "1 file was" if len(names) == 1 else f"{len(names):,} files were"
    return (f"{source}: {count} left out ({why}): {name_some(names)}",)


def _files_below(path: Path) -> list[NamedFile]:
    """All files, sorted by their names inside `path`."""
    if path.is_file():
        return [(path.name, path)]
    return sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())


def _fingerprint(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _text_files(files: Sequence[NamedFile], config: DataConfig, left_out: tuple[str, ...] = ()) -> Source:
    """Files that are not UTF-8 are no text and are left out (the standard library tests itself with a few)."""
    files = sorted(files, key=lambda entry: hashlib.sha256(entry[0].encode()).digest())[: config.max_documents]
    digests, strange = [], []
    for name, file in files:
        raw = file.read_bytes()
        digests.append(f"{name} {hashlib.sha256(raw).hexdigest()}")
        if not _is_text(raw):
            strange.append(name)

    def documents() -> Iterator[Document]:
        for name, file in files:
            if name not in strange:
                raw = file.read_bytes()
                yield Document(raw.decode("utf-8"), len(raw), str(file))

    left_out += _left_out(config.source, "not UTF-8 text", strange)
    size = sum(file.stat().st_size for _, file in files)
    return Source(_fingerprint(digests), size, documents, left_out=left_out)


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _table_files(path: Path, files: Sequence[NamedFile], config: DataConfig, left_out: tuple[str, ...]) -> Source:
    first = next((found for _, file in files if (found := first_fields(file))), None)
    if first is None:
        raise ValueError(f"{path} holds no row")
    form = recognise(fields_of(first[1], first[0]), config, first[0])

    def documents() -> Iterator[Document]:
        for _, file in files:
            for row in rows_of(file, (*form.fields, *form.more_fields)):
                yield Document(form.content(row.value, row.where), row.weight, row.where)

    fingerprint = _fingerprint(f"{name} {sha256_of(file)}" for name, file in files)
    size = sum(file.stat().st_size for _, file in files)
    return _of_rows(fingerprint, size, lambda: itertools.islice(documents(), config.max_documents), form, left_out)


def _saved(path: Path, config: DataConfig) -> Source:
    """A folder that the `datasets` library wrote by `save_to_disk`."""
    from datasets import load_from_disk

    if (path / SAVED_SPLITS).exists():
        path = path / config.split
        if not path.is_dir():
            splits = ", ".join(sorted(folder.name for folder in path.parent.iterdir() if folder.is_dir()))
            raise ValueError(f"{path.parent} has no split {config.split!r}; `split` can be {splits}")
    try:
        table = load_from_disk(str(path))
    except Exception as reason:  # whatever the library makes of damaged files
        raise ValueError(f"{path} is no readable folder of `save_to_disk`: {_one_line(reason)}") from None
    digests = [f"{name} {sha256_of(file)}" for name, file in _files_below(path)]
    return _dataset(table, config, str(path), lambda table: digests)


def _hub(config: DataConfig) -> Source:
    from datasets import load_dataset

    try:
        table = load_dataset(config.source, config.subset, split=config.split)
    except Exception as reason:  # of the network, the hub, or the files there
        raise ValueError(f"data source {config.source!r} cannot be loaded from the hub: {_one_line(reason)}") from None
    return _dataset(table, config, config.source, lambda table: [config.source, table._fingerprint])


def _one_line(reason: Exception) -> str:
    return " ".join(str(reason).split())[:300].rstrip(".") or type(reason).__name__


def _dataset(table: Any, config: DataConfig, name: str, identity: Callable[[Any], list[str]]) -> Source:
    """A table of the `datasets` library."""
    if config.max_documents is not None:
        table = table.select(range(min(config.max_documents, len(table))))
    form = recognise(table.column_names, config, f"{name}, row 1")
    wanted = [field for field in (*form.fields, *form.more_fields) if field in table.column_names]

    def documents() -> Iterator[Document]:
        for number, row in enumerate(table.select_columns(wanted), 1):
            where = f"{name}, row {number}"
            yield Document(form.content(row, where), 1, where)

    return _of_rows(_fingerprint(identity(table)), len(table), documents, form)


def _of_rows(
    fingerprint: str,
    size: int,
    documents: Callable[[], Iterator[Document]],
    form: RowFormat,
    left_out: tuple[str, ...] = (),
) -> Source:
    return Source(fingerprint, size, documents, learns_all=form.learns_all, format=form.name, left_out=left_out)
