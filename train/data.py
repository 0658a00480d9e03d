"""From a source to token files on disk, written once and mapped into memory.

A cache folder is named by a hash of everything its content depends on: the source's content, the tokenizer, the
settings. It holds two splits, `train` and `held_out`, and a manifest with the size and SHA-256 of every file:

    SPLIT.tokens    int32, all documents one after another
    SPLIT.mask      uint8, 1 where a token may be a label; only where some may not
    SPLIT.offsets   int64, where each document starts, and the number of tokens
    SPLIT.bytes     int64, bytes of text in each document
    SPLIT.parts     int32, which source of a mixture each document is from; only for mixtures
    SPLIT.weights   float64, of each source of a mixture

All files are little-endian and have no header. Held-out documents are already cut into windows of
`sequence_length + 1` tokens (one more than the positions they fill, since the last is only a label), the first windows
of all documents first; their byte counts are exactly the text that their labels spell.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from model.files.distributions import Distributions, shard_name, write_index, write_shard
from model.files.label_shards import label_shards
from model.files.labels import Origin, read_labels, read_origin, vocabulary_digest
from model.files.safe_io import sha256_of
from model.files.sealed_folder import check, seal
from model.text.tokenizer import Tokenizer
from train.encoding import Encoded, encode_document, encode_labelled, held_out_windows
from train.mixture import Mixture, document_order
from train.progress import Progress
from train.rows import Content, roles_of
from train.sources import DataConfig, Source, name_some, open_source, settings_of

log = logging.getLogger(__name__)

CACHE_VERSION = 1
SPLITS = ("train", "held_out")
NOT_OF_TOKENS = ("source", "distributions")
"""Settings that are known by their content, or change no token."""
DTYPES = {"tokens": "<i4", "mask": "u1", "offsets": "<i8", "bytes": "<i8", "parts": "<i4", "weights": "<f8"}

__all__ = ["DamagedCacheError", "DataConfig", "PreparedData", "TokenizedDocuments", "prepare"]


class DamagedCacheError(ValueError):
    """A cached token file is missing, short or altered; the sentence names it."""


@dataclass(frozen=True, eq=False)
class TokenizedDocuments:
    """Documents as token ids; document d is `tokens[offsets[d]:offsets[d + 1]]`."""

    name: str
    tokens: np.ndarray
    """int32, mapped from disk."""
    offsets: np.ndarray
    """int64, one more than there are documents."""
    labels_mask: np.ndarray | None
    """uint8, 1 where a token may be a label; None where every token may."""
    num_bytes_per_document: np.ndarray
    """int64."""
    digest: str
    """SHA-256 over the hashes of its files: equal digests mean equal documents."""
    mixture: Mixture | None = None
    """Of several sources: which document is from which, and their weights."""
    distributions: Distributions | None = None
    """What a teacher says at each of their positions, if it was stored."""
    paired: bool = False
    """Whether documents 2p and 2p + 1 are the chosen and the rejected answer of pair p, each behind its prompt."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return int(self.num_bytes_per_document.sum())


@dataclass(frozen=True)
class PreparedData:
    """The two splits of a data set. `held_out` has no document when `DataConfig.held_out` is 0."""

    train: TokenizedDocuments
    held_out: TokenizedDocuments


def prepare(config: DataConfig, tokenizer: Tokenizer, cache_folder: Path, *, progress: bool = True) -> PreparedData:
    """Tokenizes a data set, or opens the cache of an earlier time; a damaged cache is reported and built anew.

    Raises ValueError naming the source when it cannot be read or when it supervises no token, DistributionsError when
    the stored distributions that `config` names are not those of its documents.
    """
    if config.is_labels and config.distributions is None:
        return _labelled(config, tokenizer, cache_folder)
    data = _tokenized(config, tokenizer, cache_folder, progress)
    if config.preference:
        return PreparedData(replace(data.train, paired=True), replace(data.held_out, paired=True))
    return data if config.distributions is None else _with_distributions(data, Path(config.distributions))


def _with_distributions(data: PreparedData, folder: Path) -> PreparedData:
    stored = Distributions(folder, data.train.digest)
    digest = hashlib.sha256(f"{data.train.digest} {stored.digest}".encode()).hexdigest()
    return replace(data, train=replace(data.train, distributions=stored, digest=digest))


def _tokenized(config: DataConfig, tokenizer: Tokenizer, cache_folder: Path, progress: bool) -> PreparedData:
    if config.mix:
        return _mixed(
            config, [_tokenized(part, tokenizer, cache_folder, progress) for part in config.parts()], cache_folder
        )
    source = open_source(config)
    folder = Path(cache_folder) / _cache_key(config, source, tokenizer)
    return _cached(config, folder, partial(_build, config, source, tokenizer, progress=progress))


def _mixed(config: DataConfig, parts: Sequence[PreparedData], cache_folder: Path) -> PreparedData:
    """The documents of all parts in one cache, nothing tokenized again; both splits begin with some of each."""
    weights = [part.weight for part in config.mix]
    content = [[part.train.digest, part.held_out.digest] for part in parts]
    key = hashlib.sha256(json.dumps([CACHE_VERSION, content, weights]).encode()).hexdigest()[:24]

    def build(folder: Path) -> None:
        for split in SPLITS:
            _write_mixed(folder, split, [getattr(part, split) for part in parts], weights)
        seal(folder)

    return _cached(config, Path(cache_folder) / key, build)


def _write_mixed(folder: Path, split: str, parts: Sequence[TokenizedDocuments], weights: Sequence[float]) -> None:
    writer = _SplitWriter(folder, split, masked=any(part.labels_mask is not None for part in parts), mixed=True)
    for part, number in document_order([np.diff(part.offsets) for part in parts], weights):
        documents = parts[part]
        where = slice(documents.offsets[number], documents.offsets[number + 1])
        mask = None if documents.labels_mask is None else documents.labels_mask[where]
        encoded = Encoded(documents.tokens[where], mask, int(documents.num_bytes_per_document[number]))
        writer.append(encoded, part)
    writer.set_weights(weights)
    writer.close()


def _cached(config: DataConfig, folder: Path, build: Callable[[Path], None]) -> PreparedData:
    """What lies in `folder`, built first where it is not there or damaged."""
    if folder.exists():
        try:
            return load_cache(folder, config.name)
        except DamagedCacheError as damage:
            log.warning("%s Tokenizing %s again.", damage, config.name)
            shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=folder.parent) as staging:
        build(Path(staging))
        _publish(Path(staging), folder)
    return load_cache(folder, config.name)


def load_cache(folder: Path, name: str) -> PreparedData:
    """Opens a cache folder after checking every file; raises DamagedCacheError naming the file that is wrong."""
    files = check(folder, DamagedCacheError)
    train, held_out = (_open_split(folder, split, files, name) for split in SPLITS)
    return PreparedData(train, held_out)


def _open_split(folder: Path, split: str, entries: dict[str, dict[str, Any]], name: str) -> TokenizedDocuments:
    files = {file: entry for file, entry in entries.items() if file.startswith(f"{split}.")}
    arrays = {kind: _map(folder / f"{split}.{kind}", dtype) for kind, dtype in DTYPES.items()}
    return TokenizedDocuments(
        name=name if split == "train" else f"{name} ({split})",
        tokens=arrays["tokens"],
        offsets=np.array(arrays["offsets"]),
        labels_mask=arrays["mask"] if f"{split}.mask" in files else None,
        mixture=Mixture(arrays["parts"], arrays["weights"]) if f"{split}.parts" in files else None,
        num_bytes_per_document=np.array(arrays["bytes"]),
        digest=_digest_of(entry["sha256"] for _, entry in sorted(files.items())),
    )


def _digest_of(hashes: Iterable[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _map(path: Path, dtype: str) -> np.ndarray:
    """An empty file cannot be mapped, a missing one (such as the mask of plain text) is empty."""
    if not path.exists() or path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _cache_key(config: DataConfig, source: Source, tokenizer: Tokenizer) -> str:
    parts = {
        "format": CACHE_VERSION,
        "source": source.fingerprint,
        "tokenizer": tokenizer.digest,
        "config": {name: value for name, value in settings_of(config).items() if name not in NOT_OF_TOKENS},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _publish(staging: Path, folder: Path) -> None:
    """Another process may have built the same cache meanwhile; its content is the same, so its copy is kept."""
    try:
        os.rename(staging, folder)
    except OSError:
        if not folder.exists():
            raise
    staging.mkdir(exist_ok=True)  # for the temporary-folder context that will remove it


Candidate = tuple[Content | list[int], Callable[[], Sequence[Encoded]]]
"""What a document is told apart by, and how it is encoded."""


class PairFit:
    """Which pairs, by their rows, do not fit a sequence: answers that lose their end, and some that are not reached."""

    def __init__(self, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.shortened: list[str] = []
        self.left_out: list[str] = []

    def note(self, where: str, pair: Sequence[Encoded]) -> None:
        """Looks at the two documents of one row."""
        begun = [one.beginning(self.sequence_length + 1) for one in pair]
        if not all(one.mask is not None and one.mask[1:].any() for one in begun):
            self.left_out.append(where)
        elif any(len(whole.ids) > len(part.ids) for whole, part in zip(pair, begun, strict=True)):
            self.shortened.append(where)

    def sentences(self, source: str) -> Iterator[str]:
        """One for each of both kinds that there is, with the first rows."""
        least = f"the sequence_length of {self.sequence_length:,}"
        if self.shortened:
            what = f"longer than {least}, where an answer ends"
            yield f"{source}: {len(self.shortened):,} pairs are {what}: {name_some(self.shortened)}"
        if self.left_out:
            what = f"left out, since {least} ends before an answer begins"
            yield f"{source}: {len(self.left_out):,} pairs are {what}: {name_some(self.left_out)}"


class _SplitWriter:
    """Appends documents to the files of one split, so that memory never holds more than one of them."""

    def __init__(self, folder: Path, split: str, *, masked: bool, mixed: bool = False) -> None:
        wanted = {"mask": masked, "parts": mixed, "weights": mixed}
        kinds = [kind for kind in DTYPES if wanted.get(kind, True)]
        # Closed by `close`, which a failure does not need: the staging folder goes away whole.
        self.files: dict[str, BinaryIO] = {kind: (folder / f"{split}.{kind}").open("wb") for kind in kinds}
        self.num_tokens, self.num_documents, self.num_labels = 0, 0, 0
        self._write("offsets", 0)

    def append(self, document: Encoded, part: int = 0) -> None:
        self._write("tokens", document.ids)
        if "mask" in self.files:
            self._write("mask", np.ones(len(document.ids)) if document.mask is None else document.mask)
        if "parts" in self.files:
            self._write("parts", part)
        self.num_tokens += len(document.ids)
        self.num_documents += 1
        # A document's first token has no position before it that could predict it.
        labels = len(document.ids) - 1 if document.mask is None else int(np.count_nonzero(document.mask[1:]))
        self.num_labels += max(labels, 0)
        self._write("offsets", self.num_tokens)
        self._write("bytes", document.num_bytes)

    def set_weights(self, weights: Sequence[float]) -> None:
        self._write("weights", np.array(weights))

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _write(self, kind: str, values: np.ndarray | int) -> None:
        self.files[kind].write(np.asarray(values, dtype=DTYPES[kind]).tobytes())


class _Splits:
    """Documents on their way into the two splits."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, folder: Path, candidates: Iterable[Candidate], *, masked: bool
    ) -> None:
        """`candidates`: all documents, of which as many are looked at as it takes to find one to hold out."""
        self._config, self._tokenizer = config, tokenizer
        self._threshold = _threshold(config, candidates, tokenizer)
        self.train, self.held_out = (_SplitWriter(folder, split, masked=masked) for split in SPLITS)
        self._windows: list[tuple[int, int, Encoded]] = []
        """Number of the window in its document, of the window, and what it holds."""
        self._count = 0

    def add(self, content: Content | list[int], encoded: Sequence[Encoded]) -> bool:
        """Takes a document, or the two of a pair. Returns whether it is trained on."""
        self._count += 1
        if _hash_fraction(content, self._config.seed) >= self._threshold:
            for document in encoded:
                self.train.append(document)
            return True
        windows, number = held_out_windows(encoded, self._config.sequence_length, self._tokenizer), len(self._windows)
        self._windows += [(at, number, window) for at, window in windows]
        return False

    def close(self, lacks: Callable[[], str]) -> None:
        """Raises ValueError where a split is empty; `lacks` says what documents lack in which nothing is learnt."""
        for _, _, window in sorted(self._windows, key=lambda entry: entry[:2]):
            self.held_out.append(window)
        for writer in (self.train, self.held_out):
            writer.close()
        _check_supervision(self._config, lacks, (self.train, self.held_out), self._count)


def _build(config: DataConfig, source: Source, tokenizer: Tokenizer, folder: Path, *, progress: bool) -> None:
    for sentence in source.left_out:
        log.warning("%s.", sentence)
    candidates = ((one.content, partial(encode_document, one, tokenizer)) for one in source.documents())
    splits = _Splits(config, tokenizer, folder, candidates, masked=not source.learns_all)
    fit = PairFit(config.sequence_length)
    with Progress(f"tokenizing {config.source}", source.size, enabled=progress) as bar:
        for document in source.documents():
            encoded = encode_document(document, tokenizer)
            if config.preference:
                fit.note(document.where, encoded)
            splits.add(document.content, encoded)
            bar.advance(document.weight, f"{splits.train.num_tokens:,} tokens")
    for sentence in fit.sentences(config.source):
        log.warning("%s.", sentence)
    splits.close(partial(_lacks, source))
    seal(folder)


def _labelled(config: DataConfig, tokenizer: Tokenizer, cache_folder: Path) -> PreparedData:
    """What a server has stored, as it is now: it may go on meanwhile."""
    origin, shards = read_origin(Path(config.source)), label_shards(Path(config.source))
    if origin.vocabulary != vocabulary_digest(tokenizer):
        raise ValueError(f"{config.source} holds labels in tokens of another tokenizer than the student's")
    cached = Path(cache_folder) / _cache_key(config, open_source(config), tokenizer)
    data = _cached(config, cached, partial(_build_labelled, config, origin, shards, tokenizer))
    return _with_distributions(data, cached)


def _build_labelled(
    config: DataConfig, origin: Origin, shards: Sequence[Path], tokenizer: Tokenizer, folder: Path
) -> None:
    stored = islice(chain.from_iterable(map(read_labels, shards)), config.max_documents)
    candidates = ((one.tokens.tolist(), lambda one=one: [encode_labelled(one, tokenizer)]) for one in stored)
    splits, left = _Splits(config, tokenizer, folder, candidates, masked=True), config.max_documents
    firsts: list[int] = []
    for shard in shards:
        start, tokens, found = splits.train.num_tokens, [], []
        for document in islice(read_labels(shard), left):
            left = None if left is None else left - 1
            first = splits.train.num_tokens - start
            if splits.add(document.tokens.tolist(), [encode_labelled(document, tokenizer)]):
                tokens.append(document.tokens)
                found.append((document.positions + first, document.sampled))
        if tokens:
            write_shard(folder / shard_name(len(firsts)), np.concatenate(tokens), found)
            firsts.append(start)
    splits.close(lambda: "answers of an assistant, and no completions")
    digest = _digest_of(sha256_of(path) for path in sorted(folder.glob("train.*")))
    write_index(folder, first_tokens=firsts, draws=origin.draws, documents=digest, teacher=origin.teacher)
    seal(folder)


def _hash_fraction(content: Content | list[int], seed: int) -> float:
    """Where a document falls between 0 and 1, by a hash of its content and the seed alone."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(f"{seed}\0{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _threshold(config: DataConfig, candidates: Iterable[Candidate], tokenizer: Tokenizer) -> float:
    """What hashes of held-out documents lie below: `held_out`, or just above the least where that selects none."""
    least = 1.0
    for content, encode in candidates if config.held_out > 0 else ():
        fraction = _hash_fraction(content, config.seed)
        if fraction < least and held_out_windows(encode(), config.sequence_length, tokenizer):
            least = fraction
        if least < config.held_out:
            break
    return config.held_out if least == 1 else max(config.held_out, math.nextafter(least, 1))


def _check_supervision(
    config: DataConfig, lacks: Callable[[], str], splits: tuple[_SplitWriter, _SplitWriter], count: int
) -> None:
    """Raises ValueError where a split of these `count` documents is empty."""
    train, held_out = splits
    name = f"data source {config.source!r}"
    if train.num_labels == 0 and held_out.num_labels == 0:
        raise ValueError(f"{name} supervises no token: it has no {lacks()}")
    if config.held_out > 0 and count == 1:
        raise ValueError(
            f"{name} is a single document, which cannot be both learnt and held out: give it as several files, or as "
            'rows of a .jsonl file, {"text": …} on each line'
        )
    if train.num_labels == 0:
        what = f"held_out={config.held_out} leaves nothing to train on"
        raise ValueError(f"{name}: {what}; give more documents that differ, or lower it, to 0 to evaluate on nothing")
    if config.held_out > 0 and held_out.num_labels == 0:
        fit = f"sequence_length={config.sequence_length} ends before an answer begins"
        raise ValueError(f"{name}: none of its {count} pairs can be held out: in each of them {fit}")


def _lacks(source: Source) -> str:
    """What there is not in documents in which nothing is learnt, and who speaks instead."""
    if source.learns_all:
        return "text of at least two tokens"
    roles: dict[str, str] = {}
    for document in source.documents():
        for role in roles_of(document.content):
            roles.setdefault(role, f"{role!r} (first in {document.where})")
    answers = "answers of an assistant, and no completions"
    if not roles or "assistant" in roles:
        return answers
    return f"{answers}; its messages are of {name_some(list(roles.values()))}, none of 'assistant'"
