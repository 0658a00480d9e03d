"""Rows of local files: JSON lines, JSON, CSV and Parquet.

Each kind of file is one entry of `TABLES`; `.gz` and `.zst` may follow the suffix of all but Parquet. A row comes with
its place, as in "chat.jsonl, line 7", and with its share of the file's bytes. No row is skipped: what cannot be read
raises ValueError naming the file and the row.
"""

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

COMPRESSIONS = (".gz", ".zst")
CHUNK_BYTES = 1 << 20
LARGEST_CELL = 2**31 - 1
SPACE = re.compile(r"[ \t\r\n]*")
NO_TEXT = (
    "is not UTF-8 text: save text as UTF-8, and name other files by what they are, Parquet .parquet, and compressed "
    "ones with .gz or .zst at the end"
)

Placed = Iterator[tuple[str, Any]]
"""Rows with their places in the file."""


class Row(NamedTuple):
    where: str
    value: Any
    weight: int
    """Its share of the source's size."""


@dataclass(frozen=True)
class Table:
    """A kind of file."""

    rows: Callable[[Path, Sequence[str] | None], Iterator[Row]]
    """Of a file; of the fields that are named, where others can be passed over."""
    fields: Callable[[Path], tuple[str, Any] | None]
    """The place of the first row, and a row with the same fields; None where there is no row."""


def table_suffix(file: Path) -> str:
    """The suffix that says how a file is read: `.jsonl.gz` is compressed `.jsonl`; empty where none is known."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    whole = "".join(suffixes) if suffixes[-1:] and suffixes[-1] in COMPRESSIONS else "".join(suffixes[-1:])
    return whole if whole in TABLES else ""


def rows_of(file: Path, fields: Sequence[str] | None = None) -> Iterator[Row]:
    """All rows of a file; raises ValueError naming it, and the row where there is one, for what cannot be read."""
    with _named(file):
        yield from TABLES[table_suffix(file)].rows(file, fields)


def first_fields(file: Path) -> tuple[str, Any] | None:
    """The place of a file's first row, and a row with the same fields; None for a file without rows."""
    with _named(file):
        return TABLES[table_suffix(file)].fields(file)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise ValueError(f"{file} {NO_TEXT}") from None
    except gzip.BadGzipFile:
        raise ValueError(f"{file} is not compressed by gzip, though its name ends in .gz") from None
    except (OSError, EOFError) as reason:
        raise ValueError(f"{file} cannot be read: {reason}") from None


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """What a file holds, decompressed, and the file itself, which says how far reading has come."""
    with open(file, "rb") as raw:
        if file.suffix.lower() == ".gz":
            yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
        elif file.suffix.lower() == ".zst":
            from pyarrow import CompressedInputStream

            yield BufferedReader(cast(Any, CompressedInputStream(raw, "zstd")), CHUNK_BYTES), raw
        else:
            yield raw, raw


def _stream(read: Callable[[Path, IO[bytes]], Placed]) -> Table:
    """A kind of file that is read from its beginning to its end."""

    def rows(file: Path, fields: Sequence[str] | None) -> Iterator[Row]:
        with _opened(file) as (stream, raw):
            before = 0
            for where, value in read(file, stream):
                yield Row(where, value, raw.tell() - before)
                before = raw.tell()

    def first(file: Path) -> tuple[str, Any] | None:
        row = next(rows(file, None), None)
        return None if row is None else (row.where, row.value)

    return Table(rows, first)


def _json_lines(file: Path, lines: Iterable[bytes | str]) -> Placed:
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{file}, line {number}"
            if line.lstrip()[:1] in (b"[", "["):
                what = 'begins a list; a row is an object like {"text": "…"}'
                raise ValueError(f"{where} {what}, and a file that is one list of rows is to be named .json")
            yield where, _parsed(line.rstrip(), where)


def _parsed(line: bytes | str, where: str) -> Any:
    """A line without its end, so that a string which is cut off is called that."""
    try:
        return json.loads(line if isinstance(line, str) else line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(f"{where} {NO_TEXT}") from None
    except json.JSONDecodeError as reason:
        what = reason.msg.rstrip(": ").removesuffix(" at")
        raise ValueError(f"{where} is not valid JSON: {what} at column {reason.colno}") from None
    except (ValueError, RecursionError) as reason:
        raise ValueError(f"{where} is not valid JSON: {reason}") from None


def _json(file: Path, stream: IO[bytes]) -> Placed:
    """A list of rows, one row, or a row a line."""
    text = _decoded(file, stream.read())
    if text.lstrip().startswith("["):
        yield from _json_list(file, text)
        return
    try:
        yield f"{file}, row 1", json.loads(text)
    except (ValueError, RecursionError):
        yield from _json_lines(file, text.splitlines())


def _decoded(file: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line = reason.object.count(b"\n", 0, reason.start) + 1
        raise ValueError(f"{file}, line {line} {NO_TEXT}") from None


def _json_list(file: Path, text: str) -> Placed:
    """Row after row, so that a mistake is found in the row where it stands."""
    decoder, number, at = json.JSONDecoder(), 0, _past_space(text, text.index("[") + 1)
    while not (number == 0 and text.startswith("]", at)):
        number += 1
        where = f"{file}, row {number}"
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as reason:
            raise ValueError(f"{where} is not valid JSON: {reason}") from None
        yield where, value
        at = _past_space(text, at)
        if text.startswith("]", at):
            break
        if not text.startswith(",", at):
            raise ValueError(f"{where} is followed by {text[at : at + 10]!r} instead of a comma or the list's end")
        at = _past_space(text, at + 1)
    if rest := text[at + 1 :].strip():
        raise ValueError(f"{file} goes on behind its list of rows: {rest[:20]!r}")


def _past_space(text: str, at: int) -> int:
    return cast(re.Match[str], SPACE.match(text, at)).end()


def _csv(file: Path, stream: IO[bytes]) -> Placed:
    """Comma-separated, with a header; every cell is text."""
    csv.field_size_limit(LARGEST_CELL)
    lines = csv.reader(TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    try:
        header = next(lines, [])
        for cells in lines:
            where = f"{file}, line {lines.line_num}"
            if cells and len(cells) != len(header):
                raise ValueError(f"{where} has {len(cells)} cells, but the header has {len(header)}")
            if cells:
                yield where, dict(zip(header, cells, strict=True))
    except csv.Error as reason:
        raise ValueError(f"{file}, line {lines.line_num} is not valid CSV: {reason}") from None


def _parquet_file(file: Path) -> Any:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(file)
    except ArrowInvalid as reason:
        raise ValueError(f"{file} is not a readable parquet file: {reason}") from None


def _parquet(file: Path, fields: Sequence[str] | None) -> Iterator[Row]:
    table = _parquet_file(file)
    columns = [name for name in table.schema_arrow.names if fields is None or name in fields]
    weight = file.stat().st_size // max(table.metadata.num_rows, 1)
    number = 0
    for batch in table.iter_batches(columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield Row(f"{file}, row {number}", row, weight)


def _parquet_fields(file: Path) -> tuple[str, Any] | None:
    table = _parquet_file(file)
    return (f"{file}, row 1", dict.fromkeys(table.schema_arrow.names)) if table.metadata.num_rows else None


READERS = {".jsonl": _stream(_json_lines), ".json": _stream(_json), ".csv": _stream(_csv)}
TABLES = {
    **{suffix + packed: table for suffix, table in READERS.items() for packed in ("", *COMPRESSIONS)},
    ".parquet": Table(_parquet, _parquet_fields),
}
"""By suffix."""
