"""The bound is never above the number of tokens, whatever the text, and high enough to refuse what is far too long."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.text.token_bound import TokenBound
from model.text.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import ANY_TEXT, TEXT, byte_level_json, our_tokenizer

TOKENIZERS = {kind: our_tokenizer(kind) for kind in ("byte-level", "prepend", "metaspace")}
RAW = json.loads(byte_level_json())


def with_normalizer(normalizer: dict[str, Any]) -> Tokenizer:
    return Tokenizer(json.dumps(RAW | {"normalizer": normalizer}))


TOKENIZERS["composing"] = with_normalizer({"type": "NFC"})


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=ANY_TEXT
    | st.lists(st.sampled_from([TEXT[:300], "<|im_end|>", "  ", "e\u0301\u0323", "한", "🙂"])).map("".join)
)
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, allow_special=True))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_it_is_not_far_below(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.least_tokens(TEXT) > len(tokenizer.encode(TEXT)) / 12
    assert tokenizer.least_tokens("") == 0


def test_each_byte_counts_by_the_longest_token_that_holds_it() -> None:
    bound = TokenBound([b"a", b"b", b"aaaa", b"abc", b"zz"])
    assert bound.least("b" * 8) == 2  # 1/4 each, 3 being rounded up to a power of two
    assert bound.least("a" * 9) == 3
    assert bound.least("z" * 100) == 0


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Lowercase"},
        {"type": "Replace", "pattern": {"String": "a"}, "content": ""},
        {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, {"type": "Strip", "strip_left": True, "strip_right": True}],
        },
    ],
)
def test_nothing_is_said_where_text_is_changed_before_it_is_split(normalizer: dict[str, Any]) -> None:
    assert with_normalizer(normalizer).least_tokens("x" * 10_000) == 0


def test_nothing_is_said_where_bytes_are_dropped() -> None:
    splits = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, RAW["pre_tokenizer"]]}
    assert Tokenizer(json.dumps(RAW | {"pre_tokenizer": splits})).least_tokens("x" * 10_000) == 0
    assert TokenBound.of({"model": {}}, [b"a"]) is None
