"""`potstill data`: its figures are those of the batches that training reads; what is shown as learnt is what is."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from model.files.tokenizer_source import load_tokenizer
from model.text.tokenizer import Tokenizer
from pipeline.cli import main
from pipeline.data import counts_table, cut_sentence, data_sets, few_sentence, histogram, preview
from pipeline.measure.training_time import random_documents
from pipeline.recipe import load_recipe
from pipeline.stages.import_model.config import ModelSource
from pipeline.stages.import_model.run import import_model
from tests.model.test_gguf import write_model
from tests.pipeline.tiny_run import write_teacher
from train.data import prepare
from train.packing import cut, pack

RECIPE = """
name: mine
models: {{base: {{from: {home}/base, chat_template: plain}}}}
data:
  chat: {{source: {home}/chat.json, sequence_length: 64, held_out: 0.1}}
  both: {{mix: [{{source: {home}/chat.json}}, {{source: {home}/notes, weight: 3}}], sequence_length: 64, held_out: 0.2}}
stages:
  - synthesize: {{model: base, prompts: chat, out: answers}}
  - distill: {{teacher: base, student: {{from: base, layers: 2}}, data: both, tokens: 1k, micro_batch_tokens: 2048}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("data")
    write_teacher(home / "base")
    turns = [(f"What is {n}? [x]", "It is a still. " * (n % 9 + 1)) for n in range(40)]
    rows = [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in turns]
    (home / "chat.json").write_text(json.dumps(rows))
    (home / "notes").mkdir()
    for number in range(12):
        (home / "notes" / f"{number}.txt").write_text(f"note {number}")
    (home / "notes" / "scan.pdf").write_bytes(b"%PDF")
    (home / "recipe.yaml").write_text(RECIPE.format(home=home))
    return home


def test_the_command_shows_counts_lengths_cuts_and_what_is_learnt(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", str(home / "recipe.yaml"), "--cache", str(home / "cache")]) == 0
    shown = capsys.readouterr().out
    assert "chat.json (ShareGPT)" in shown and "(ShareGPT, text)" in shown
    assert "1 file was left out (of another kind than those that are read): scan.pdf" in shown
    assert "User:\nWhat is 0? [x]\n\nAssistant:\n[It is a still. <|im_end|>\n]" in shown
    assert "answers is made by the stage 01-synthesize" in shown
    assert "\x1b" not in shown, "plain text when piped"
    assert "75.0%" in shown, "the weight of the notes"
    assert shown.count("held-out tokens, too few to tell models apart") == 2


def test_quality_on_few_tokens_is_said_beforehand() -> None:
    text = random_documents(9, 500)  # each has 500 tokens to predict
    one, two = (replace(text, offsets=text.offsets[: count + 1]) for count in (1, 2))
    assert few_sentence(one).startswith("Quality would be measured on 500 held-out tokens, too few")
    assert few_sentence(two) == "" and few_sentence(replace(text, offsets=text.offsets[:1])) == ""
    assert "on 500 held-out" in few_sentence(replace(two, paired=True)), "of a pair the chosen answer"


def test_on_a_terminal_what_is_learnt_is_coloured_and_has_no_brackets(home: Path) -> None:
    chat = next(data_sets(load_recipe(home / "recipe.yaml"), home / "cache"))
    out = StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard")
    console.print(preview(chat.data.train, 0, chat.tokenizer, colour=True))
    assert "\x1b[1;32mIt is a still. <|im_end|>" in out.getvalue() and "[It is" not in out.getvalue()


def test_counts_are_those_of_the_batches(home: Path) -> None:
    for found in data_sets(load_recipe(home / "recipe.yaml"), home / "cache"):
        for row, documents in zip(
            counts_table(found.data, 64).rows, (found.data.train, found.data.held_out), strict=True
        ):
            pieces = cut(documents, 64)
            labels = pack(documents, pieces, np.arange(len(pieces))).num_labels
            assert [str(cell).replace(",", "") for cell in row[1:4]] == [
                str(figure) for figure in (documents.num_documents, documents.num_tokens, labels)
            ]
        pieces, lengths = cut(found.data.train, 64), np.diff(found.data.train.offsets)
        sentence = cut_sentence(found.data.train, 64)
        assert sentence.startswith(f"{len([n for n in lengths if n > 65])} of {len(lengths)} documents are longer")
        unread = int(np.maximum(lengths - 1, 0).sum() - pieces.length.sum())
        assert (f"{unread:,} tokens lie in pieces" in sentence) == (unread > 0)


def test_the_run_reads_the_same_tokens(home: Path) -> None:
    """What is shown is in the cache that the run opens: the tokenizer is the import's."""
    chat = next(data_sets(load_recipe(home / "recipe.yaml"), home / "cache"))
    import_model(ModelSource(origin=str(home / "base"), chat_template="plain"), home / "imported", home / "cache")
    tokenizer = Tokenizer.load(home / "imported")
    assert tokenizer.digest == chat.tokenizer.digest and tokenizer.eos_token_ids == chat.tokenizer.eos_token_ids
    before = set((home / "cache" / "data").iterdir())
    assert prepare(chat.config, tokenizer, home / "cache" / "data").train.digest == chat.data.train.digest
    assert set((home / "cache" / "data").iterdir()) == before
    assert AutoTokenizer.from_pretrained(home / "imported").chat_template == tokenizer.templates["default"].source


def test_the_tokenizer_of_a_gguf_file_needs_no_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", "llama")
    source = str(tmp_path / "tiny.gguf")
    found = load_tokenizer(source, revision=None, sha256=None, chat_template=None, cache=tmp_path)
    import_model(ModelSource(origin=source), tmp_path / "imported", tmp_path / "cache")
    published = Tokenizer.load(tmp_path / "imported")
    assert (found.digest, set(found.eos_token_ids)) == (published.digest, set(published.eos_token_ids))


def test_bars_are_as_long_as_what_they_count() -> None:
    lines = histogram(np.array([1, 3, 4, 4, 60, 64])).splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2", "4", "8", "16", "32", "64"]
    assert [line.count("█") for line in lines] == [14, 0, 40, 0, 0, 0, 27]
    assert [int(line.split()[-1]) for line in lines] == [1, 0, 3, 0, 0, 0, 2]


def test_a_mistake_is_one_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = f"data.chat.source={home / 'none.jsonl'}"
    assert main(["data", str(home / "recipe.yaml"), wrong, "--cache", str(home / "cache")]) == 2
    assert "none.jsonl' does not exist on this machine" in capsys.readouterr().err
