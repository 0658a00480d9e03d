"""Streamed text: joined pieces are the whole text, cut before the first stop string, and no piece ever shows one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.text.detokenizer import StreamDecoder
from serve.engine.requests import TextStream
from serve.sampling_params import SamplingParams
from tests.serve.toys import make_engine, toy_tokenizer
from tests.tiny import tiny_model
from tests.trials import trials

TOKENIZER = toy_tokenizer()


def stream(stop: tuple[str, ...] = (), *, shows_stop: bool = False) -> TextStream:
    return TextStream(StreamDecoder(TOKENIZER, continues=True), stop, shows_stop=shows_stop)


@settings(max_examples=trials(400, 2000), deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="abcé☃", max_size=40),
    stop=st.lists(st.text(alphabet="abcé☃", min_size=1, max_size=4), max_size=3),
)
def test_pieces_join_to_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    tokens = TOKENIZER.encode(text)  # single bytes: characters and stop strings span tokens
    shown, matched = "", None
    streamed = stream(tuple(stop))
    for token in tokens:
        matched = streamed.push(token)
        shown += streamed.take()
        assert not any(s in shown for s in stop)
        if matched is not None:
            break
    if matched is None:
        shown += streamed.finish()
        assert shown == text and not any(s in text for s in stop)
        return
    # Decoding stops with the token that completes the first match; the text ends where that match begins.
    end = min(text.find(s) + len(s) for s in stop if s in text)
    begin = min(text[:end].find(s) for s in stop if s in text[:end])
    assert shown == text[:begin] and text[:end].endswith(matched) and text[begin:end] == matched


@settings(max_examples=trials(200, 2000), deadline=None, derandomize=True)
@given(text=st.text(alphabet="abé", max_size=40), stop=st.text(alphabet="abé", min_size=1, max_size=4))
def test_a_stop_string_is_shown_when_asked_for(text: str, stop: str) -> None:
    streamed, shown = stream((stop,), shows_stop=True), ""
    for token in TOKENIZER.encode(text):
        matched = streamed.push(token)
        shown += streamed.take()
        if matched is not None:
            assert shown == text[: text.index(stop) + len(stop)]
            return
    assert shown + streamed.finish() == text and stop not in text


@settings(max_examples=trials(200, 2000), deadline=None, derandomize=True)
@given(text=st.text(alphabet="ab", max_size=30), stop=st.text(alphabet="ab", min_size=1, max_size=4))
def test_nothing_is_held_back_that_cannot_become_a_stop_string(text: str, stop: str) -> None:
    streamed, shown = stream((stop,)), ""
    for at, token in enumerate(TOKENIZER.encode(text), 1):
        if streamed.push(token) is not None:
            return
        shown += streamed.take()
        held = text[len(shown) : at]
        assert not held or stop.startswith(held)


def test_text_before_min_tokens_belongs_to_no_stop_string() -> None:
    streamed = stream(("ab",))
    a, b = TOKENIZER.encode("ab")
    assert streamed.push(a, may_stop=False) is None
    assert streamed.push(b) is None
    assert streamed.push(a) is None
    assert streamed.push(b) == "ab"
    assert streamed.take() == "ab"


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_an_unfinished_character_shows_at_the_end_only(stop: tuple[str, ...]) -> None:
    streamed = stream(stop)
    for token in TOKENIZER.encode("☃")[:2]:
        streamed.push(token)
        assert streamed.take() == ""
    assert streamed.finish() == "\ufffd"


@pytest.mark.eager
def test_control_tokens_that_are_to_be_shown_are_in_the_text() -> None:
    """The engine may write <s> and a alone, and draws the same twice."""
    engine = make_engine(tiny_model(seed=3))
    bos, letter = TOKENIZER.bos_token_id, TOKENIZER.encode("a")[0]
    assert bos is not None
    texts = {}
    for shown in ((), (bos,)):
        params = SamplingParams(
            max_tokens=12,
            temperature=100.0,
            ignore_eos=True,
            allowed_token_ids=(bos, letter),
            shown_special_tokens=shown,
            seed=1,
        )
        engine.add_request(str(shown), [5, 6], params)
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        texts[shown] = "".join(output.new_text for output in outputs)
    assert 0 < texts[(bos,)].count("<s>") < 12
    assert texts[(bos,)].replace("<s>", "") == texts[()]
