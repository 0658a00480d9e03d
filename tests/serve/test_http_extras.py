"""vLLM's extra fields, by the official `openai` client over HTTP, on a server that speculates."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from model.files.checkpoint import load_model
from model.text.tokenizer import Tokenizer
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.tiny import full_logits

PROMPT = "The quick brown fox jumps over the lazy dog"
MESSAGES: list[Any] = [{"role": "user", "content": "What is a token?"}]
MAX_MODEL_LEN = 256
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("extras") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    options = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", str(MAX_MODEL_LEN)]
    names = ["--served-model-name", "tiny", "--max-stop-strings", "5"]
    log = folder.parent / "server.log"
    with running_server(folder, log, *options, *names, "--speculative-config", SPECULATION) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def logprobs_of(folder: Path) -> Any:
    """The oracle: log_softmax of the model's logits over a whole sequence."""
    model = load_model(folder).eval()
    return lambda ids: torch.log_softmax(full_logits(model, ids), dim=-1)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **settings: Any) -> Any:
    known = {name: settings.pop(name) for name in ("n", "stop", "logit_bias", "echo", "logprobs") if name in settings}
    known |= {"temperature": 0, "max_tokens": settings.pop("max_tokens", 16)}
    return client.completions.create(model="tiny", prompt=prompt, **known, extra_body={"ignore_eos": True} | settings)


def test_what_means_the_default_is_taken(client: openai.OpenAI) -> None:
    common: Any = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    plain = client.chat.completions.create(messages=MESSAGES, **common)
    full = client.chat.completions.create(
        messages=MESSAGES, store=False, metadata={"a": "b"}, parallel_tool_calls=True, service_tier="auto", user="u",
        modalities=["text"], functions=[], logit_bias=None, stop=None, tools=[], verbosity="medium", n=1,
        prompt_cache_key="k", safety_identifier="s", prediction=None, audio=None, reasoning_effort=None,
        extra_body={"best_of": 1, "skip_special_tokens": True, "spaces_between_special_tokens": True}, **common,
    )  # fmt: skip
    assert full.choices[0].message.content == plain.choices[0].message.content
    sentence = "store can only be false here: nothing that this client asks may be stored"
    with pytest.raises(openai.BadRequestError, match=sentence) as caught:
        client.chat.completions.create(messages=MESSAGES, store=True, **common)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "store")
    written = client.completions.create(prompt=PROMPT, best_of=1, suffix=None, user="u", **common)
    assert written.choices[0].text == client.completions.create(prompt=PROMPT, **common).choices[0].text


def test_max_completion_tokens_and_limits_by_option(client: openai.OpenAI) -> None:
    settings: Any = {"model": "tiny", "prompt": PROMPT, "extra_body": {"max_completion_tokens": 3, "ignore_eos": True}}
    answer = client.completions.create(**settings, stop=["1", "2", "3", "4", "5"])
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="stop has 6 strings; this server takes at most 5"):
        client.completions.create(**settings, stop=["1", "2", "3", "4", "5", "6"])


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_of_prompt_and_answer(
    client: openai.OpenAI, tokenizer: Tokenizer, logprobs_of: Any, stream: bool
) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = list(ids)
    for _ in range(12):
        expected.append(int(logprobs_of(expected)[-1].argmax()))
    settings: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12, "n": 2, "stream": stream}
    settings["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(prompt=PROMPT, **settings)
    chunks: list[Any] = list(answer) if stream else [answer]
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].prompt_token_ids == ids
        assert all(getattr(choice, "prompt_token_ids", None) is None for choice in mine[1:])
        assert [token for choice in mine for token in choice.token_ids] == expected[len(ids) :]
    conversation = client.chat.completions.create(messages=MESSAGES, **settings)
    chunks = list(conversation) if stream else [conversation]
    assert chunks[0].prompt_token_ids == tokenizer.chat_token_ids(MESSAGES, add_generation_prompt=True)
    assert all(getattr(chunk, "prompt_token_ids", None) is None for chunk in chunks[1:])
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        tokens = [token for choice in mine for token in getattr(choice, "token_ids", None) or []]
        text = "".join((choice.delta if stream else choice.message).content or "" for choice in mine)
        assert len(tokens) == 12 and tokenizer.decode(tokens) == text


def test_chat_prompt_logprobs_are_those_of_the_model(
    client: openai.OpenAI, tokenizer: Tokenizer, logprobs_of: Any
) -> None:
    ids = tokenizer.chat_token_ids(MESSAGES, add_generation_prompt=True)
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    first, *rest = answer.prompt_logprobs
    assert first is None and len(rest) == len(ids) - 1
    for token, expected, found in zip(ids[1:], logprobs_of(ids), rest, strict=False):
        assert set(found) == {str(one) for one in (token, *expected.topk(2).indices.tolist())}
        assert found[str(token)]["logprob"] == pytest.approx(float(expected[token]), abs=1e-4)
        assert found[str(token)]["rank"] == 1 + int((expected > expected[token]).sum())


@pytest.mark.parametrize("stream", [False, True])
def test_only_allowed_tokens_and_no_bad_words(
    client: openai.OpenAI, tokenizer: Tokenizer, logprobs_of: Any, stream: bool
) -> None:
    allowed = tokenizer.encode("abcdefgh xyz")
    free = complete(client, allowed_token_ids=allowed).choices[0].text
    bad = free[2:4]
    spelled = [tokenizer.encode(bad), tokenizer.encode(" " + bad)]
    expected, prompt = [], tokenizer.encode(PROMPT)
    for _ in range(16):
        ranked = logprobs_of(prompt + expected)[-1].argsort(descending=True).tolist()
        runs = [[*expected, token] for token in ranked if token in allowed]
        expected = next(run for run in runs if not any(run[-len(ids) :] == ids for ids in spelled))
    settings: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 16, "n": 2, "stream": stream}
    extra = {"allowed_token_ids": allowed, "bad_words": [bad], "ignore_eos": True}
    answer = client.completions.create(**settings, extra_body=extra)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    for index in range(2):
        text = "".join(choice.text for choice in choices if choice.index == index)
        assert text == tokenizer.decode(expected) != free
        assert bad not in text
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids must be between"):
        complete(client, allowed_token_ids=[512])
    with pytest.raises(openai.BadRequestError, match="names only tokens that end the text"):
        complete(client, allowed_token_ids=[1], stop_token_ids=[1], min_tokens=1)


def test_the_text_may_end_with_what_stopped_it(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    whole = complete(client, max_tokens=40).choices[0].text
    stop = next(whole[at : at + 3] for at in range(4, len(whole)) if "\ufffd" not in whole[at : at + 3])
    [shown] = complete(client, max_tokens=40, stop=[stop], include_stop_str_in_output=True).choices
    assert shown.text == whole[: whole.index(stop) + len(stop)]
    assert (shown.finish_reason, shown.stop_reason) == ("stop", stop)
    [token] = tokenizer.encode("x")
    bias: dict[str, Any] = {"logit_bias": {str(token): 100}, "stop_token_ids": [token], "min_tokens": 3}
    assert complete(client, **bias).choices[0].text.endswith("x") is False
    assert complete(client, **bias, include_stop_str_in_output=True).choices[0].text.endswith("x")


def test_control_tokens_are_shown_when_asked_for(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_ids[0]
    bias = {"logit_bias": {str(eos): 100}, "max_tokens": 3}
    assert complete(client, **bias).choices[0].text == ""
    assert complete(client, **bias, skip_special_tokens=False).choices[0].text == "<|eos|>" * 3
    ids = [*tokenizer.encode("ab"), eos, *tokenizer.encode("c")]
    [choice] = complete(client, ids, echo=True, logprobs=0, skip_special_tokens=False, max_tokens=2).choices
    assert choice.text.startswith("ab<|eos|>c")
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert "\ufffd" in token or choice.text[offset:].startswith(token)


def test_prompts_are_truncated_when_asked_for(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    for side, kept in (("left", ids[-5:]), ("right", ids[:5]), (None, ids[-5:])):
        cut = complete(client, truncate_prompt_tokens=5, **({"truncation_side": side} if side else {}))
        assert cut.usage.prompt_tokens == 5
        assert cut.choices[0].text == complete(client, kept).choices[0].text
        echoed = complete(client, truncate_prompt_tokens=5, truncation_side=side, echo=True)
        assert echoed.choices[0].text == tokenizer.decode(kept) + cut.choices[0].text
    assert complete(client, truncate_prompt_tokens=500).usage.prompt_tokens == len(ids)
    long = complete(client, [5, 6, 7] * 200, truncate_prompt_tokens=-1, max_tokens=10)
    assert long.usage.prompt_tokens == MAX_MODEL_LEN - 10
    chat = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=1,
        extra_body={"truncate_prompt_tokens": 4, "return_token_ids": True},
    )
    assert chat.usage is not None and chat.usage.prompt_tokens == 4
    assert chat.prompt_token_ids == tokenizer.chat_token_ids(MESSAGES, add_generation_prompt=True)[-4:]  # type: ignore[attr-defined]


def test_what_is_far_too_long_is_refused_by_its_bytes(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = PROMPT * 400
    for ask in (
        lambda: complete(client, text),
        lambda: complete(client, ["short", text]),
        lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}]),
    ):
        with pytest.raises(openai.BadRequestError, match="the prompt has at least") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    cut = complete(client, text, truncate_prompt_tokens=7)
    assert cut.usage.prompt_tokens == 7


def test_an_answer_without_extras_has_none(server: RunningServer) -> None:
    chat = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}, timeout=20)
    completion = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=20)
    for answer in (chat, completion):
        assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & set(json.dumps(answer.json()).split('"'))
