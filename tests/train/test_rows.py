"""What a row of each format becomes: the same tokens and labels as transformers makes of its messages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.text.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import ANY_TEXT, KINDS, our_tokenizer, their_tokenizer
from train.data import DataConfig, TokenizedDocuments, prepare
from train.rows import Completion, Continuation, recognise
from train.sources import open_source

SYSTEM, ASKED = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 1 + 1?"}
ANSWERED = {"role": "assistant", "content": "It is 2."}
AGAIN, SURE = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}
LONG = [SYSTEM, ASKED, ANSWERED, AGAIN, SURE]
SHAREGPT = [
    {"from": "human", "value": "What is 1 + 1?"},
    {"from": "gpt", "value": "It is 2."},
    {"from": "human", "value": "Sure?"},
    {"from": "gpt", "value": "Yes."},
]
ALPACA = {"instruction": "What is 1 + 1?", "input": "", "output": "It is 2."}
TOLD = {"instruction": "Sure?", "output": "Yes.", "history": [["What is 1 + 1?", "It is 2."]]}
CONVERSATIONS: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
    ({"messages": LONG}, LONG),
    ({"conversations": LONG}, LONG),
    ({"conversations": [{"from": "system", "value": "Be kind."}, *SHAREGPT]}, LONG),
    ({"conversations": SHAREGPT, "system": "Be kind."}, LONG),
    ({"conversations": SHAREGPT, "id": "7"}, LONG[1:]),
    (ALPACA, [ASKED, ANSWERED]),
    (ALPACA | {"text": None} | {"input": None}, [ASKED, ANSWERED]),
    (ALPACA | {"input": "In words."}, [{"role": "user", "content": "What is 1 + 1?\nIn words."}, ANSWERED]),
    (TOLD | {"system": "Be kind."}, LONG),
    ({"prompt": [ASKED], "completion": [ANSWERED]}, [ASKED, ANSWERED]),
    ({"prompt": [ASKED], "completion": "It is 2."}, [ASKED, ANSWERED]),
]  # fmt: skip


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(folder: Path, row: Any, tokenizer: Tokenizer, **settings: Any) -> tuple[list[int], list[int]]:
    """Ids and labels of a data set of one row."""
    config = DataConfig(str(write(folder, row)), **({"held_out": 0.0} | settings))
    documents: TokenizedDocuments = prepare(config, tokenizer, folder / "cache", progress=False).train
    mask = np.ones(documents.num_tokens) if documents.labels_mask is None else documents.labels_mask
    return documents.tokens.tolist(), mask.astype(int).tolist()


@pytest.mark.parametrize(("row", "messages"), CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("chat", [False, True])
def test_conversations_are_those_of_transformers(
    row: dict[str, Any], messages: list[dict[str, str]], chat: bool, tmp_path: Path
) -> None:
    if row.get("text", "") is None:
        row = {name: value for name, value in row.items() if name != "text" or chat}
    ids, mask = prepared(tmp_path, row, our_tokenizer(template="generation"), chat=chat)
    theirs = their_tokenizer(template="generation").apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (ids, mask) == (theirs["input_ids"], theirs["assistant_masks"])


def test_a_completion_of_messages_leaves_earlier_answers_out(tmp_path: Path) -> None:
    row = {"prompt": LONG[:4], "completion": [SURE]}
    ids, mask = prepared(tmp_path, row, our_tokenizer(template="generation"))
    theirs = their_tokenizer(template="generation")
    before = theirs.apply_chat_template(LONG[:4], add_generation_prompt=True)["input_ids"]
    whole = theirs.apply_chat_template(LONG, return_dict=True, return_assistant_tokens_mask=True)
    assert ids == whole["input_ids"]
    assert mask == [0] * len(before) + whole["assistant_masks"][len(before) :]
    assert 0 < sum(mask) < sum(whole["assistant_masks"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(prompt=ANY_TEXT, completion=ANY_TEXT)
def test_a_completion_begins_where_its_first_byte_lies(kind: str, prompt: str, completion: str) -> None:
    """By counting the bytes of tokens; as TRL has it where the prompt's tokens are those of the whole's beginning."""
    tokenizer, theirs = our_tokenizer(kind), their_tokenizer(kind)
    ids, mask = tokenizer.completion_mask(prompt, completion)
    assert ids == tokenizer.encode(prompt + completion, add_special_tokens=True)
    first = mask.index(1) if 1 in mask else len(mask)
    assert mask == [0] * first + [1] * (len(mask) - first)
    if kind == "byte-level":
        sizes = [len(tokenizer.token_bytes()[index]) for index in ids]
        assert sum(sizes[:first]) <= len(prompt.encode())
        assert not completion or sum(sizes[: first + 1]) > len(prompt.encode())
    alone = theirs(prompt)["input_ids"]
    if completion and alone == ids[: len(alone)]:
        assert first == len(alone)


def test_a_completion_ends_with_the_end_of_text_which_is_learnt(tmp_path: Path) -> None:
    tokenizer = our_tokenizer(template="chatml")
    ids, mask = prepared(tmp_path, {"prompt": "def f():\n", "completion": "    return 1\n"}, tokenizer)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False) in (
        "    return 1\n<|im_end|>",
        "\n    return 1\n<|im_end|>",
    )
    named = {"question": "def f():\n", "answer": "    return 1\n"}
    fields = {"prompt_field": "question", "completion_field": "answer"}
    assert prepared(tmp_path, named, tokenizer, **fields) == (ids, mask)
    asked = [{"role": "user", "content": "def f():\n"}, {"role": "assistant", "content": "    return 1\n"}]
    assert prepared(tmp_path, named, tokenizer, chat=True, **fields) == tokenizer.assistant_mask(asked)


@pytest.mark.parametrize(
    ("fields", "chat", "name"),
    [
        (["text", "messages"], False, "text"),
        (["text", "messages"], True, "messages"),
        (["text", "instruction", "output"], True, "Alpaca"),
        (["prompt", "prompt_id", "messages"], False, "messages"),
        (["conversations", "id"], False, "ShareGPT"),
        (["completion", "prompt"], False, "prompt and completion"),
    ],
)
def test_a_format_is_recognised_by_its_fields(fields: list[str], chat: bool, name: str) -> None:
    assert recognise(fields, DataConfig("x", chat=chat), "here").name == name


@pytest.mark.parametrize(
    ("rows", "chat", "sentence"),
    [
        (
            [{"body": 1}],
            False,
            "line 1 has the fields body, which are no known format: expected is text (text) or mess",
        ),
        ([{"text": "x"}], True, "line 1 has text in 'text', but no conversation; leave `chat` out to train on text"),
        ([[1]], False, "line 1 begins a list; a row is an object"),
        ([{"text": "x"}, {"body": 1}], False, "line 2 has no field 'text' (found: body); the first row holds text"),
        ([{"text": "x"}, "y"], False, "line 2 is of type str; a row is an object"),
        ([{"messages": "Hi"}], False, "line 1: 'messages' must be a list of messages"),
        ([{"messages": [{"role": "user"}]}], False, "message 1 of 'messages' must be a list of messages, each with"),
        ([{"conversations": [{"from": "me", "value": "x"}]}], False, "line 1: 'me' is nobody who speaks"),
        ([{"instruction": "x", "output": None}], False, "line 1: 'output' must be text, not NoneType"),
        ([ALPACA | {"history": ["x"]}], False, "line 1: 'history' must be a list of pairs"),
        ([{"prompt": "x", "completion": 3}], False, "line 1: 'completion' must be text, not int"),
    ],
)
def test_what_is_wrong_with_a_row_is_one_sentence_with_its_place(
    rows: list[Any], chat: bool, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        list(open_source(DataConfig(str(write(tmp_path, *rows)), chat=chat)).documents())
    assert "rows.jsonl, line" in str(caught.value) and sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_chat_template_is_named_with_the_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: the model has no chat template .*chatml"):
        prepared(tmp_path, ALPACA, our_tokenizer())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
FIELDS = ["text", "messages", "conversations", "instruction", "input", "output", "prompt", "completion", "system"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=5), st.booleans())
def test_any_row_is_read_or_refused_in_a_sentence(row: dict[str, Any], chat: bool) -> None:
    try:
        content = recognise(row, DataConfig("x", chat=chat), "row 1").content(row, "row 1")
    except ValueError as reason:
        assert str(reason).startswith("row 1")
        return
    if isinstance(content, str | Completion):
        assert not chat and all(isinstance(text, str) for text in ([content] if isinstance(content, str) else content))
        return
    messages = [*content.prompt, *content.completion] if isinstance(content, Continuation) else content
    assert all(isinstance(message["role"], str) and "content" in message for message in messages)
