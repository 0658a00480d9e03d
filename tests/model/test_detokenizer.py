"""Streams of text: never half a character, never a byte more or less than decoding at once."""

import itertools
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.text.detokenizer import StreamDecoder
from model.text.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import ANY_TEXT, KINDS, TEXT, decoded, our_tokenizer, tokenizer_json
from tests.trials import trials

REPLACEMENT = "\ufffd"


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    edges = [0, *sorted(cuts), len(ids)]
    return [*(decoder.push(ids[start:stop]) for start, stop in itertools.pairwise(edges)), decoder.flush()]


@pytest.mark.parametrize("skip", [False, True])
def test_byte_level_decoding_equals_the_library_on_any_ids(skip: bool) -> None:
    """Any ids: most of these do not form UTF-8."""
    ours, theirs = our_tokenizer(), tokenizers.Tokenizer.from_str(tokenizer_json("byte-level"))
    rng = random.Random(0)
    for length in range(300):
        ids = [rng.randrange(600) for _ in range(length)]
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_equals_the_library_on_text(kind: str) -> None:
    ours, theirs = our_tokenizer(kind), tokenizers.Tokenizer.from_str(tokenizer_json(kind))
    for line in TEXT.splitlines(keepends=True):
        ids = ours.encode(line)
        assert ours.decode(ids) == theirs.decode(ids) == decoded(kind, line)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=trials(150, 2000), deadline=None, derandomize=True)
@given(text=ANY_TEXT, seed=st.integers(0, 1000))
def test_deltas_join_to_the_whole_and_split_no_character(kind: str, text: str, seed: int) -> None:
    tokenizer = our_tokenizer(kind)
    ids = tokenizer.encode(text)
    rng = random.Random(seed)
    for cuts in (list(range(len(ids))), [rng.randrange(len(ids) + 1) for _ in range(3)], []):
        deltas = stream(tokenizer, ids, cuts)
        assert "".join(deltas) == tokenizer.decode(ids) == decoded(kind, text)
        assert deltas[-1] == ""
        assert REPLACEMENT in text or not any(REPLACEMENT in delta for delta in deltas)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=trials(150, 2000), deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 750), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_deltas_join_to_the_whole_for_any_ids(kind: str, ids: list[int], cuts: list[int]) -> None:
    tokenizer = our_tokenizer(kind)
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    """Three bytes of a character wait; the fourth releases it. A byte that cannot go on releases a replacement."""
    tokenizer = our_tokenizer()
    smile = tokenizer.encode("😀")
    letter = tokenizer.encode("a")
    assert len(smile) == 4
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push([index]) for index in smile] == ["", "", "", "😀"]
    assert decoder.push(smile[:3] + letter) == REPLACEMENT + "a"
    assert decoder.push(smile[:2]) == ""
    assert decoder.flush() == REPLACEMENT
    assert decoder.flush() == ""


def test_control_tokens_are_skipped_unless_wanted() -> None:
    tokenizer = our_tokenizer()
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", allow_special=True)
    assert StreamDecoder(tokenizer).push(ids) == tokenizer.decode(ids) == "hi"
    assert StreamDecoder(tokenizer, skip_special_tokens=False).push(ids) == "<|im_start|>hi<|im_end|>"


def test_ids_without_a_token_have_no_text() -> None:
    """Models may have more rows in their embeddings than the tokenizer has tokens."""
    assert our_tokenizer().decode([9999, *our_tokenizer().encode("a"), 10**9]) == "a"


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
def test_a_continuation_keeps_its_first_space(kind: str) -> None:
    tokenizer = our_tokenizer(kind)
    ids = tokenizer.encode("return x")
    assert StreamDecoder(tokenizer).push(ids) == "return x"
    assert StreamDecoder(tokenizer, continues=True).push(ids) == " return x"
    # Only the text's first space is dropped, and that also when nothing came before it.
    decoder = StreamDecoder(tokenizer)
    assert decoder.push([]) + decoder.push(ids) + decoder.push(ids) == "return x return x"


def test_the_bytes_of_tokens_join_to_the_text() -> None:
    for kind in KINDS:
        tokenizer = our_tokenizer(kind)
        ids = tokenizer.encode("世界 naïve <s>")
        joined = b"".join(tokenizer.token_bytes()[index] for index in ids)
        assert joined.decode().removeprefix(" " if tokenizer.drops_first_space else "") == "世界 naïve <s>"


def test_work_is_linear_even_when_no_character_ever_ends() -> None:
    """A window that is decoded again with each token would need hours here."""
    tokenizer = our_tokenizer()
    lead = tokenizer.encode("😀")[0]
    decoder = StreamDecoder(tokenizer)
    text = "".join(decoder.push([lead]) for _ in range(200_000)) + decoder.flush()
    assert text == REPLACEMENT * 200_000
