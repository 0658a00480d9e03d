"""`potstill data`: what a recipe trains on, before it does: how much of it, how long, what is cut, and what is learnt.

Data sets are tokenized as the run will tokenize them, into the same cache. Of the models only tokenizers are read.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model.files.safe_io import write_json
from model.files.tokenizer_source import load_tokenizer
from model.text.tokenizer import Tokenizer
from pipeline.report.section import Table
from pipeline.report.table import FEW_TOKENS, TOO_FEW
from pipeline.report.terminal import terminal_table
from pipeline.schema import DataSource, Recipe
from pipeline.stages.base import kind_of
from train.data import PreparedData, TokenizedDocuments, prepare
from train.packing import cut
from train.preference import count_unfit
from train.sources import Source, open_source

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PERCENTILES = (0, 10, 50, 90, 99, 100)
BAR = 40
"""Characters of the longest bar."""
SHOWN_DOCUMENTS, SHOWN_TOKENS = 2, 300
LEARNT_STYLE = "bold green"


@dataclass(frozen=True)
class DataSet:
    """A data set of a recipe, ready to be trained on."""

    name: str
    config: DataSource
    source: Source
    tokenizer: Tokenizer
    data: PreparedData


def data_sets(recipe: Recipe, cache: Path) -> Iterator[DataSet]:
    """Those that the recipe declares; raises ValueError as training would, with the row or the file in the sentence."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizers = _tokenizers(recipe, Path(scratch), cache)
    for name, config in recipe.data.items():
        data = prepare(config, tokenizers[name], cache / "data")
        yield DataSet(name, config, open_source(config), tokenizers[name], data)


def _tokenizers(recipe: Recipe, scratch: Path, cache: Path) -> dict[str, Tokenizer]:
    """Of each data set that of the first stage which reads it; where none does, that of the first model."""
    folders: dict[str, Path] = {}
    for name, source in recipe.models.items():
        tokenizer = load_tokenizer(
            source.origin,
            revision=source.revision,
            sha256=source.sha256,
            chat_template=source.chat_template,
            cache=cache,
        )
        folders[name] = _kept(tokenizer, scratch / name)
    found: dict[str, Tokenizer] = {}
    for stage in recipe.plan():
        kind = kind_of(stage.kind)
        if not kind.models(stage.config):
            continue
        tokenizer = kind.tokenizer(stage.config, folders)
        found.setdefault(str(kind.data(stage.config)), tokenizer)
        if stage.out is not None:
            folders[stage.out] = _kept(tokenizer, scratch / stage.out)
    first = Tokenizer.load(next(iter(folders.values())))
    return {name: found.get(name, first) for name in recipe.data}


def _kept(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": list(tokenizer.eos_token_ids)})
    return folder


# --- showing ----------------------------------------------------------------------------------------------------------


def show(data_set: DataSet, console: "Console") -> None:
    """Counts, lengths, and the first documents."""
    from rich.text import Text

    train, config = data_set.data.train, data_set.config
    console.print(Text(f"{data_set.name}: {config.name} ({data_set.source.format})", style="bold"), soft_wrap=True)
    for sentence in data_set.source.left_out:
        console.print(Text(f"{sentence}."), soft_wrap=True)
    console.print(terminal_table(counts_table(data_set.data, config.sequence_length), width=console.width))
    if sentence := few_sentence(data_set.data.held_out):
        console.print(Text(sentence + "\n"), soft_wrap=True)
    if train.mixture is not None:
        console.print(terminal_table(mixture_table(train, config), width=console.width))
    console.print(terminal_table(lengths_table(train), width=console.width))
    console.print(Text(cut_sentence(train, config.sequence_length)), soft_wrap=True)
    console.print(Text(histogram(np.diff(train.offsets)) + "\n"), soft_wrap=True)
    colour = console.is_terminal
    for number in _examples(train):
        title = f"{_place(train, number)}, {_legend(train, colour)}:"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(preview(train, number, data_set.tokenizer, colour=colour), soft_wrap=True)


def _examples(documents: TokenizedDocuments) -> list[int]:
    """The first documents; of a mixture the first of each source."""
    if documents.mixture is None:
        return list(range(min(SHOWN_DOCUMENTS, documents.num_documents)))
    return np.unique(documents.mixture.parts, return_index=True)[1].tolist()


def _place(documents: TokenizedDocuments, number: int) -> str:
    """Which document it is of all, or which answer of a pair."""
    if not documents.paired:
        return f"document {number + 1:,} of {documents.num_documents:,}"
    answer = "rejected" if number % 2 else "chosen"
    return f"pair {number // 2 + 1:,} of {documents.num_documents // 2:,}, the {answer} answer"


def _legend(documents: TokenizedDocuments, colour: bool) -> str:
    if documents.labels_mask is None:
        return "every token is learnt"
    return "what is learnt is green" if colour else "what is learnt stands in [brackets]"


def counts_table(data: PreparedData, sequence_length: int) -> Table:
    """Documents and tokens of both splits; what is held out is in windows already."""
    rows = []
    for name, documents in (("train", data.train), ("held out", data.held_out)):
        learnt = _learnt(documents)
        without = int((learnt == 0).sum())
        share = f"{learnt.sum() / max(documents.num_tokens, 1):.1%}"
        unit = "documents" if documents is data.train else f"windows of {sequence_length:,}"
        if documents.paired:
            unit = "answers, two a pair"
        figures = (documents.num_documents, documents.num_tokens, learnt.sum(), without)
        rows.append([f"{name}, {unit}", *(f"{figure:,}" for figure in figures), share])
    return Table(rows, ["", "number", "tokens", "learnt", "without any learnt", "share learnt"])


def _learnt(documents: TokenizedDocuments) -> np.ndarray:
    """Labels of each document: of tokens that may be one all but a document's first, which nothing predicts."""
    lengths = np.diff(documents.offsets)
    if documents.labels_mask is None:
        return np.maximum(lengths - 1, 0)
    sums = np.concatenate([[0], np.cumsum(documents.labels_mask, dtype=np.int64)])
    first = np.zeros(len(lengths), dtype=np.int64)
    first[lengths > 0] = documents.labels_mask[documents.offsets[:-1][lengths > 0]]
    return sums[documents.offsets[1:]] - sums[documents.offsets[:-1]] - first


def few_sentence(held_out: TokenizedDocuments) -> str:
    """Where quality would be measured on too few tokens; of pairs that is done on chosen answers."""
    measured = int(_learnt(held_out)[:: 2 if held_out.paired else 1].sum())
    if not held_out.num_documents or measured >= FEW_TOKENS:
        return ""
    return f"Quality would be measured on {measured:,} held-out tokens, {TOO_FEW}."


def mixture_table(documents: TokenizedDocuments, config: DataSource) -> Table:
    """What each source holds, and how often an epoch reads it."""
    mixture, lengths = documents.mixture, np.diff(documents.offsets)
    if mixture is None:
        return Table([])
    held = np.bincount(mixture.parts, weights=lengths, minlength=len(config.mix))
    counts = np.bincount(mixture.parts, minlength=len(config.mix))
    shares = mixture.weights / mixture.weights.sum()
    rows = [
        [part.source, f"{count:,}", f"{tokens:,.0f}", f"{share:.1%}", f"{share * held.sum() / max(tokens, 1):.2f}×"]
        for part, count, tokens, share in zip(config.mix, counts, held, shares, strict=True)
    ]
    return Table(rows, ["source", "documents", "tokens", "of an epoch", "read in an epoch"])


def lengths_table(documents: TokenizedDocuments) -> Table:
    """Percentiles of the documents' lengths in tokens."""
    found = np.percentile(np.diff(documents.offsets), PERCENTILES, method="lower")
    heads = ["shortest", *(f"{percent} %" for percent in PERCENTILES[1:-1]), "longest"]
    return Table([["tokens", *(f"{length:,.0f}" for length in found)]], ["length", *heads])


def cut_sentence(documents: TokenizedDocuments, sequence_length: int) -> str:
    """How many documents are longer than a sequence, and what that costs."""
    if documents.paired:
        return _pairs_sentence(documents, sequence_length)
    longer = int((np.diff(documents.offsets) > sequence_length + 1).sum())
    if not longer:
        return f"No document is longer than the sequence_length of {sequence_length:,}: none is cut."
    pieces = cut(documents, sequence_length)
    unread = documents.num_tokens - documents.num_documents - int(pieces.length.sum())
    lost = f" {unread:,} tokens lie in pieces in which nothing is learnt, and are left out." if unread > 0 else ""
    share = f"{longer:,} of {documents.num_documents:,} documents"
    return f"{share} are longer than the sequence_length of {sequence_length:,} and cut into pieces of it.{lost}"


def _pairs_sentence(documents: TokenizedDocuments, sequence_length: int) -> str:
    """How many pairs lose the end of an answer, and how many are left out whole."""
    (shortened, left_out), pairs = count_unfit(documents, sequence_length), documents.num_documents // 2
    length = f"the sequence_length of {sequence_length:,}"
    if not shortened and not left_out:
        return f"No answer is longer than {length} with its prompt: all {pairs:,} pairs are whole."
    return (
        f"Of {pairs:,} pairs {shortened:,} have an answer that ends with {length}, {left_out:,} are left out, since "
        "their prompts fill it."
    )


def histogram(lengths: np.ndarray) -> str:
    """A bar for each doubling of the length."""
    exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(exponents)
    first = int(np.flatnonzero(counts)[0])
    bars = [
        f"to {2**exponent:>9,} tokens {'█' * -(-count * BAR // counts.max()):<{BAR}} {count:,}"
        for exponent, count in enumerate(counts.tolist())
        if exponent >= first
    ]
    return "\n".join(bars)


def preview(documents: TokenizedDocuments, number: int, tokenizer: Tokenizer, *, colour: bool) -> "Text":
    """The beginning of a document; what is learnt in colour, or in [brackets]."""
    from rich.text import Text

    first, end = documents.offsets[number], documents.offsets[number + 1]
    last = min(end, first + SHOWN_TOKENS)
    ids = documents.tokens[first:last]
    shown = Text()
    if documents.labels_mask is None:
        shown.append(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
    else:
        for run, learnt in _runs(ids, documents.labels_mask[first:last]):
            text = tokenizer.decode(run, skip_special_tokens=False)
            marked = f"[{text}]" if learnt and not colour else text
            shown.append(marked, style=LEARNT_STYLE if learnt else "")
    return shown.append(f" … and {end - last:,} tokens more" if last < end else "").append("\n")


def _runs(ids: np.ndarray, mask: np.ndarray) -> Iterator[tuple[list[int], bool]]:
    """Stretches of tokens that are all learnt, or all not."""
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    for start, stop in pairwise(borders):
        if start < stop:
            yield ids[start:stop].tolist(), bool(mask[start])


def made_later(recipe: Recipe) -> Mapping[str, str]:
    """Data sets that stages make, with the stage's name: there is nothing to show of them yet."""
    return {stage.data_out: stage.name for stage in recipe.plan() if stage.data_out is not None}
