"""Pairs of answers as people have them: each becomes the two documents that its conversations or texts would be."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from model.text.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import our_tokenizer
from train.data import DataConfig, TokenizedDocuments, prepare

USER, SYSTEM = {"role": "user", "content": "What is 1 + 1?"}, {"role": "system", "content": "Be kind."}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is 2.", "It is 3, sure."))
AGAIN = {"role": "user", "content": "Sure?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("Yes.", "No, not at all."))
SHORT = ([USER, GOOD], [USER, BAD])
LONG = ([SYSTEM, USER, GOOD, AGAIN, YES], [SYSTEM, USER, GOOD, AGAIN, NO])
FORMS: dict[str, tuple[dict[str, Any], tuple[list[Any], list[Any]]]] = {
    "explicit": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, SHORT),
    "implicit": ({"chosen": SHORT[0], "rejected": SHORT[1]}, SHORT),
    "UltraFeedback": (
        {
            "prompt": USER["content"],
            "messages": SHORT[0],
            "chosen": SHORT[0],
            "rejected": SHORT[1],
            "score_chosen": 7.5,
        },
        SHORT,
    ),
    "mixed": ({"prompt": USER["content"], "chosen": GOOD["content"], "rejected": [BAD]}, SHORT),
    "several turns": ({"prompt": LONG[0][:4], "chosen": [YES], "rejected": [NO]}, LONG),
    "implicit, several turns": ({"chosen": LONG[0], "rejected": LONG[1]}, LONG),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return our_tokenizer(template="chatml")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs_in(path: Path, tokenizer: Tokenizer, **settings: Any) -> TokenizedDocuments:
    config = DataConfig(str(path), **({"held_out": 0.0, "preference": True} | settings))
    return prepare(config, tokenizer, path.parent / "cache", progress=False).train


def documents_of(found: TokenizedDocuments) -> list[list[int]]:
    """Token ids of each document; -1 - id where one is learnt."""
    mask = found.labels_mask if found.labels_mask is not None else [1] * found.num_tokens
    ids = [-1 - token if learnt else token for token, learnt in zip(found.tokens.tolist(), mask, strict=True)]
    return [ids[start:end] for start, end in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_messages_become_the_conversations_that_they_are(form: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Earlier answers that both have stand there to be read: only what follows is learnt."""
    row, conversations = FORMS[form]
    found = pairs_in(write(tmp_path / "pairs.jsonl", [row]), tokenizer)
    assert found.paired
    rows = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in conversations]
    expected = pairs_in(write(tmp_path / "plain.jsonl", rows), tokenizer, preference=False)
    assert documents_of(found) == documents_of(expected) and not expected.paired


def test_texts_are_learnt_behind_their_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """With `chat` they are messages; without a field for it the prompt is what both begin with."""
    row = {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "three"}
    joined = {"chosen": "1 + 1 = 2", "rejected": "1 + 1 = three"}
    texts = [{"prompt": row["prompt"], "completion": row[side]} for side in ("chosen", "rejected")]
    expected = pairs_in(write(tmp_path / "plain.jsonl", texts), tokenizer, preference=False)
    for name, one in (("explicit", row), ("implicit", joined)):
        assert documents_of(pairs_in(write(tmp_path / f"{name}.jsonl", [one]), tokenizer)) == documents_of(expected)
    chat = pairs_in(write(tmp_path / "chat.jsonl", [row]), tokenizer, chat=True)
    talks = pairs_in(tmp_path / "plain.jsonl", tokenizer, preference=False, chat=True)
    assert documents_of(chat) == documents_of(talks)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json"])
def test_pairs_come_from_every_kind_of_file(suffix: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"question": f"{n} + {n}?", "good": f"{2 * n}", "bad": "no idea", "id": str(n)} for n in range(5)]
    names = {"prompt_field": "question", "chosen_field": "good", "rejected_field": "bad"}
    path = tmp_path / f"pairs{suffix}"
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            lines = csv.DictWriter(file, rows[0])
            lines.writeheader()
            lines.writerows(rows)
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows))
    found = documents_of(pairs_in(path, tokenizer, **names))
    expected = documents_of(pairs_in(write(tmp_path / "pairs.jsonl", rows), tokenizer, **names))
    assert found == expected and len(found) == 10


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a", "chosen_response": "b", "rejected": "c"}, "did you mean chosen_field: chosen_response?"),
        ({"text": "a"}, "has no field 'chosen' and 'rejected' (found: text); preference pairs are rows with"),
        (
            {"chosen": "b", "rejected": "c"},
            "no prompt: no field 'prompt', and nothing that both answers begin",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, "there is no prompt"),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, "'chosen' must be text, not int"),
        (
            {"prompt": [AGAIN], "chosen": SHORT[0], "rejected": SHORT[1]},
            "'chosen' must begin with the assistant's",
        ),
        ({"chosen": [USER, AGAIN, GOOD], "rejected": [USER, BAD]}, "must part where the assistant answers"),
        ({"prompt": "a", "chosen": [USER, {"role": "assistant"}], "rejected": "c"}, "message 2 of 'chosen'"),
    ],
)
def test_what_is_wrong_with_a_pair_is_one_sentence_with_its_place(
    row: dict[str, Any], sentence: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError) as wrong:
        pairs_in(write(tmp_path / "pairs.jsonl", [row]), tokenizer)
    assert sentence in str(wrong.value) and "pairs.jsonl, line 1" in str(wrong.value)


def test_pairs_that_do_not_fit_are_counted_and_named(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": "one", "chosen": "two", "rejected": "three"}
    long_prompts = [{"prompt": "word " * 80, "chosen": "a", "rejected": str(n)} for n in range(2)]
    long_answers = [row | {"rejected": f"{n} {'word ' * 80}"} for n in range(7)]
    path = write(tmp_path / "pairs.jsonl", [row, *long_answers, *long_prompts])
    with caplog.at_level(logging.WARNING):
        found = pairs_in(path, tokenizer, sequence_length=24)
    shortened, left_out = caplog.messages
    assert "7 pairs are longer than the sequence_length of 24" in shortened
    assert f"{path}, line 2, " in shortened and shortened.endswith("line 6 and 2 more.")
    assert "2 pairs are left out" in left_out and f"{path}, line 9, {path}, line 10" in left_out
    assert found.num_documents == 20, "what is trained on is cut where batches are made"


def test_held_out_pairs_stay_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Of an answer that is longer than a sequence its beginning; a pair without one is left out."""
    rows = [{"prompt": f"{n}", "chosen": f"{n} two", "rejected": "word " * (40 * (n % 2))} for n in range(60)]
    rows += [{"prompt": f"{'word ' * 40}{n}", "chosen": "a", "rejected": "b"} for n in range(20)]
    config = DataConfig(str(write(tmp_path / "pairs.jsonl", rows)), held_out=0.5, preference=True, sequence_length=16)
    held_out = prepare(config, tokenizer, tmp_path / "cache", progress=False).held_out
    found = documents_of(held_out)
    assert held_out.paired and 20 < len(found) < 120 and len(found) % 2 == 0
    for chosen, rejected in zip(found[::2], found[1::2], strict=True):
        assert chosen[0] == rejected[0] and len(rejected) <= 17
        assert any(token < 0 for token in chosen) and any(token < 0 for token in rejected)


def test_of_pairs_one_that_fits_is_held_out_at_least(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = [{"prompt": f"{'word ' * 40}{n}", "chosen": "a", "rejected": "b"} for n in range(20)]
    path = write(tmp_path / "pairs.jsonl", [*long, {"prompt": "one", "chosen": "two", "rejected": "three"}])
    config = DataConfig(str(path), held_out=1e-9, preference=True, sequence_length=16)
    assert prepare(config, tokenizer, tmp_path / "cache", progress=False).held_out.num_documents == 2
    write(path, long)
    with pytest.raises(
        ValueError, match="none of its 20 pairs can be held out: in each of them sequence_length=16 ends"
    ):
        prepare(config, tokenizer, tmp_path / "cache", progress=False)


def test_pairs_are_no_part_of_a_mixture() -> None:
    with pytest.raises(ValueError, match="preference stands beside mix"):
        DataConfig(mix=({"source": "a.jsonl"},), preference=True)  # type: ignore[arg-type]
