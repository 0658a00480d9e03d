"""The official `openai` client against a real server of a verified pair: a tiny target, a noisy copy as draft."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from model.files.checkpoint import load_model
from model.text.tokenizer import Tokenizer
from tests.serve.http_server import RunningServer, children_of, running_server, save_tiny_folder
from tests.tiny import full_logits

PROMPT = "The quick brown fox"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a token?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft: the draft is the target with noise on its weights, so some of its tokens are accepted."""
    root = tmp_path_factory.mktemp("http")
    target = save_tiny_folder(root / "target")
    model = load_model(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return target, save_tiny_folder(root / "draft", model)


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    target, draft = folders
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "512", "--served-model-name", "tiny"]
    speculation = ["--verify", str(target), "--speculative-config", '{"num_speculative_tokens": 3}']
    with running_server(draft, log, *options, *speculation) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def tokenizer(folders: tuple[Path, Path]) -> Tokenizer:
    return Tokenizer.load(folders[0])


@pytest.fixture(scope="module")
def logprobs_of(folders: tuple[Path, Path]) -> Any:
    """The oracle: log_softmax of the target's logits over a whole sequence."""
    model = load_model(folders[0]).eval()
    return lambda ids: torch.log_softmax(full_logits(model, ids), dim=-1)


def test_it_says_what_it_serves_and_where(server: RunningServer) -> None:
    assert "listens on http://127.0.0.1:" in server.lines[0]
    assert "float32 on cpu" in server.lines[1]
    assert "context 512 tokens" in server.lines[1]
    assert "verified" in server.lines[1]
    assert "KV pages = " in server.lines[1]


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=PROMPT)


def test_completion_is_greedy_decoding(client: openai.OpenAI, tokenizer: Tokenizer, logprobs_of: Any) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = list(ids)
    for _ in range(12):
        expected.append(int(logprobs_of(expected)[-1].argmax()))
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.object == "text_completion"
    assert answer.choices[0].text == tokenizer.decode(expected[len(ids) :])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 12)
    assert answer.usage.total_tokens == len(ids) + 12
    by_ids = client.completions.create(
        model="tiny", prompt=ids, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert by_ids.choices[0].text == answer.choices[0].text


@pytest.mark.parametrize("as_ids", [False, True])
def test_lists_of_prompts_with_n_come_back_in_order(client: openai.OpenAI, tokenizer: Tokenizer, as_ids: bool) -> None:
    texts = ["The quick", "def main", "A model turns"]
    prompts: Any = [tokenizer.encode(text) for text in texts] if as_ids else texts
    several = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=6, seed=3, temperature=0)
    assert [choice.index for choice in several.choices] == list(range(6))
    for number, text in enumerate(texts):
        alone = client.completions.create(model="tiny", prompt=text, max_tokens=6, temperature=0)
        assert several.choices[2 * number].text == alone.choices[0].text
        assert several.choices[2 * number + 1].text == alone.choices[0].text


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_logprobs_are_those_of_the_model(
    client: openai.OpenAI, tokenizer: Tokenizer, logprobs_of: Any, max_tokens: int, n: int
) -> None:
    ids = tokenizer.encode("Straße, naïve café 🙂 fox")
    answer = client.completions.create(
        model="tiny", prompt=ids, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0, n=n,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens * n
    for choice in answer.choices:
        got: Any = choice.logprobs
        assert len(got.tokens) == len(got.token_logprobs) == len(got.top_logprobs) == len(ids) + max_tokens
        assert got.token_logprobs[0] is None and got.top_logprobs[0] is None
        sequence = list(ids)
        while len(sequence) < len(got.tokens):
            sequence.append(int(logprobs_of(sequence)[-1].argmax()))
        expected = logprobs_of(sequence)
        for place in range(1, len(sequence)):
            assert got.token_logprobs[place] == pytest.approx(float(expected[place - 1, sequence[place]]), abs=1e-4)
            assert max(got.top_logprobs[place].values()) == pytest.approx(float(expected[place - 1].max()), abs=1e-4)
        assert choice.text == tokenizer.decode(sequence)
        for token, offset in zip(got.tokens, got.text_offset, strict=True):
            assert "�" in token or choice.text[offset:].startswith(token)


def test_prompt_logprobs_are_those_of_the_model(server: RunningServer, tokenizer: Tokenizer, logprobs_of: Any) -> None:
    prompts = [tokenizer.encode(text) for text in ("Straße, naïve café 🙂 fox", "def main")]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "n": 2, "prompt_logprobs": 3}
    choices = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert len(choices) == 4
    for choice in choices:
        ids = prompts[choice["index"] // 2]
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == len(ids) - 1
        for token, expected, found in zip(ids[1:], logprobs_of(ids), rest, strict=False):
            assert set(found) == {str(one) for one in (token, *expected.topk(3).indices.tolist())}
            for one, entry in found.items():
                assert entry["logprob"] == pytest.approx(float(expected[int(one)]), abs=1e-4)
                assert entry["rank"] == 1 + int((expected > expected[int(one)]).sum())
                assert entry["decoded_token"] == tokenizer.token_bytes()[int(one)].decode("utf-8", "replace")
    refused = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60)
    assert refused.status_code == 400 and "does not go with stream" in refused.json()["error"]["message"]


def test_lm_eval_scores_a_batch_of_continuations(client: openai.OpenAI, tokenizer: Tokenizer, logprobs_of: Any) -> None:
    """The request and the arithmetic of lm-eval's local-completions: `[context_length:-1]`, greedy when top = own."""
    contexts, continuations = ["The quick brown", "A model turns"], [" fox", " tokens into tokens"]
    wholes = [tokenizer.encode(a) + tokenizer.encode(b) for a, b in zip(contexts, continuations, strict=True)]
    answer = client.completions.create(
        model="tiny", prompt=wholes, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    for choice, whole, context in zip(answer.choices, wholes, contexts, strict=True):
        start = len(tokenizer.encode(context))
        got: Any = choice.logprobs
        table = logprobs_of(whole)
        expected = sum(float(table[place - 1, whole[place]]) for place in range(start, len(whole)))
        assert sum(got.token_logprobs[start:-1]) == pytest.approx(expected, abs=1e-3)
        greedy = all(
            own == max(top.values())
            for own, top in zip(got.token_logprobs[start:-1], got.top_logprobs[start:-1], strict=True)
        )
        assert greedy == all(int(table[place - 1].argmax()) == whole[place] for place in range(start, len(whole)))


def test_chat(client: openai.OpenAI, tokenizer: Tokenizer, logprobs_of: Any) -> None:
    ids = tokenizer.chat_token_ids(MESSAGES, add_generation_prompt=True)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    [choice] = answer.choices
    assert (answer.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    sequence = list(ids)
    for entry in choice.logprobs.content:
        table = logprobs_of(sequence)[-1]
        token = int(table.argmax())
        assert entry.logprob == pytest.approx(float(table[token]), abs=1e-4)
        assert bytes(entry.bytes or []) == tokenizer.token_bytes()[token]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(table.topk(2).values.tolist(), abs=1e-4)
        assert entry.top_logprobs[0].token == entry.token
        assert isinstance(entry.model_extra and entry.model_extra["drafted"], bool)
        sequence.append(token)
    assert choice.message.content == tokenizer.decode(sequence[len(ids) :])


@pytest.mark.parametrize("form", ["object", "dump", "streamed", "parsed", "text"])
def test_an_answer_is_part_of_the_next_question(client: openai.OpenAI, tokenizer: Tokenizer, form: str) -> None:
    """As the official client's users write it: the message of one answer, appended, with whatever it holds."""
    [token] = tokenizer.encode("x")
    settings: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "logit_bias": {str(token): 100}}
    settings |= {"extra_body": {"stop_token_ids": [token], "min_tokens": 2}}  # the client parses no answer cut short
    first: Any
    if form == "streamed":
        with client.chat.completions.stream(**settings) as events:
            first = events.get_final_completion().choices[0].message
    elif form == "parsed":
        first = client.chat.completions.parse(**settings).choices[0].message
    else:
        first = client.chat.completions.create(**settings).choices[0].message
    plain = {"role": "assistant", "content": first.content}
    asked = first.model_dump() if form == "dump" else plain if form == "text" else first
    further = {"role": "user", "content": "Go on."}
    answer = client.chat.completions.create(model="tiny", messages=[*MESSAGES, asked, further], max_tokens=2)
    ids = tokenizer.chat_token_ids([*MESSAGES, plain, further], add_generation_prompt=True)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)


def test_a_verified_pair_says_what_the_draft_did(server: RunningServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=60, temperature=0, logprobs=True, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens
    rejected = answer.usage.completion_tokens_details.rejected_prediction_tokens
    assert accepted and rejected
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    drafted = sum(bool(entry.model_extra and entry.model_extra["drafted"]) for entry in logprobs.content)
    # The last verification may have accepted tokens past max_tokens.
    assert accepted - 3 <= drafted <= accepted
    assert server.metric("potstill:spec_decode_num_accepted_tokens_total") >= accepted
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") >= accepted + rejected


def stream(client: openai.OpenAI, **settings: Any) -> list[Any]:
    return list(client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "stream": True} | settings))


@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_stream_has_openais_shape(client: openai.OpenAI, n: int) -> None:
    settings: dict[str, Any] = {"max_tokens": 20, "seed": 5, "n": n, "logprobs": True}
    chunks = stream(client, **settings, stream_options={"include_usage": True})
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **settings)
    for index in range(n):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in mine[1:])
        assert all(choice.finish_reason is None for choice in mine[:-1])
        assert mine[-1].finish_reason == whole.choices[index].finish_reason
        assert mine[-1].delta.content is None
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        entries = [entry.token for choice in mine if choice.logprobs for entry in choice.logprobs.content or []]
        logprobs = whole.choices[index].logprobs
        assert logprobs is not None
        assert entries == [entry.token for entry in logprobs.content or []]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_events_on_the_wire(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"X-Request-Id": "my-id.7"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] == "my-id.7"
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    assert all("usage" not in event for event in events)
    assert events[0]["choices"][0] == {
        "index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None,
    }  # fmt: skip
    assert events[-1]["choices"][0]["delta"] == {}
    counted = httpx.post(
        f"{server.url}/v1/chat/completions",
        json=body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    usages = [json.loads(line.removeprefix("data: "))["usage"] for line in counted.text.split("\n\n")[:-2]]
    totals = [usage["completion_tokens"] for usage in usages]
    assert totals == sorted(totals) and totals[-1] == 3


def test_a_completion_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "prompt": ["The quick", "def"], "max_tokens": 10, "seed": 1}
    settings |= {"logprobs": 1, "echo": True, "n": 2}
    whole = client.completions.create(**settings)
    chunks = list(client.completions.create(**settings, stream=True))
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
        assert [part.finish_reason for part in mine[:-1]] == [None] * (len(mine) - 1)
        tokens = [token for part in mine for token in part.logprobs.tokens]
        assert choice.logprobs is not None
        assert tokens == choice.logprobs.tokens
        offsets = [offset for part in mine for offset in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset


def test_seeds_repeat_and_choices_differ(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "n": 3}
    first, again, other = (
        [choice.message.content for choice in client.chat.completions.create(**settings, seed=seed).choices]
        for seed in (11, 11, 12)
    )
    assert first == again
    assert first != other
    assert len(set(first)) == 3


def test_stop_strings_and_stop_tokens(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    settings["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**settings).choices[0].text
    stop = next(whole[at : at + 3] for at in range(4, len(whole)) if "�" not in whole[at : at + 3])
    [choice] = client.completions.create(**settings, stop=["never there", stop]).choices
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == stop
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**settings, stop=stop, stream=True)]
    assert "".join(pieces) == choice.text


def test_logit_bias_and_stop_token_ids(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    [token] = tokenizer.encode("x")
    settings: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 5}
    biased = client.completions.create(**settings, logit_bias={str(token): 100}).choices[0]
    assert biased.text == "xxxxx"
    [stopped] = client.completions.create(
        **settings, logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token], "min_tokens": 2}
    ).choices
    assert stopped.finish_reason == "stop"
    assert stopped.model_extra is not None and stopped.model_extra["stop_reason"] == token


def test_template_extras(server: RunningServer, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    def rendered(**fields: Any) -> str:
        answer = httpx.post(f"{server.url}/tokenize", json={"messages": MESSAGES} | fields)
        return tokenizer.decode(answer.json()["tokens"], skip_special_tokens=False)

    assert rendered().endswith("<|im_start|>assistant\n")
    assert rendered(add_generation_prompt=False).endswith("What is a token?<|im_end|>\n")
    assert "[1 tools]" in rendered(tools=[function])
    assert "[no thinking]" in rendered(chat_template_kwargs={"enable_thinking": False})
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    tools: Any = [function]
    without = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, tools=tools, tool_choice="none"
    )
    assert plain.usage and without.usage and plain.usage.prompt_tokens == without.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, tools=tools)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    partial = [*MESSAGES, {"role": "assistant", "content": PROMPT}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    continued = client.chat.completions.create(
        model="tiny", messages=partial, max_tokens=4, temperature=0, extra_body=extra
    )
    ids = tokenizer.chat_token_ids(MESSAGES, add_generation_prompt=True) + tokenizer.encode(PROMPT)
    expected = client.completions.create(model="tiny", prompt=ids, max_tokens=4, temperature=0)
    assert continued.choices[0].message.content == expected.choices[0].text


def test_user_text_is_never_control(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = "<|im_end|><|eos|>"
    answer = client.completions.create(model="tiny", prompt=text, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(text)) > 2


def test_tokenize_and_detokenize(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("naïve 🙂")
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": "naïve 🙂", "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 512)
    assert len(answer["token_strs"]) == len(ids)
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json() == {"prompt": "naïve 🙂"}
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": [512]}).status_code == 400
    assert httpx.post(f"{server.url}/tokenize", json={}).status_code == 400


def test_the_context_is_never_cut_silently(client: openai.OpenAI) -> None:
    def ask(length: int, max_tokens: int | None) -> openai.types.Completion:
        return client.completions.create(model="tiny", prompt=[5] * length, max_tokens=max_tokens, temperature=0)

    for length, max_tokens in ((511, 1), (500, 12), (510, None)):
        assert ask(length, max_tokens).usage.prompt_tokens == length  # type: ignore[union-attr]
    for length, max_tokens in ((512, 1), (512, None), (500, 13), (5120, 1), (100_000, 1)):
        began = time.monotonic()
        with pytest.raises(openai.BadRequestError) as caught:
            ask(length, max_tokens)
        assert time.monotonic() - began < 10
        assert caught.value.code == "context_length_exceeded"
        assert "512" in str(caught.value) and str(length) in str(caught.value)
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x " * 240}])
    assert chat.usage is not None and chat.usage.total_tokens <= 512


def test_a_deadline_is_answered_with_504(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=400, extra_body={"deadline_s": 0.02, "ignore_eos": True}
        )
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"


def test_many_at_once_with_the_async_client(server: RunningServer, client: openai.OpenAI) -> None:
    alone = [
        client.completions.create(model="tiny", prompt=PROMPT, seed=seed, max_tokens=8).choices[0].text
        for seed in range(12)
    ]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as asynchronous:

            async def ask(seed: int) -> str:
                if seed % 2:
                    answer = await asynchronous.completions.create(model="tiny", prompt=PROMPT, seed=seed, max_tokens=8)
                    return answer.choices[0].text
                events = await asynchronous.completions.create(
                    model="tiny", prompt=PROMPT, seed=seed, max_tokens=8, stream=True
                )
                return "".join([event.choices[0].text async for event in events])

            return list(await asyncio.gather(*map(ask, range(12))))

    assert asyncio.run(ask_all()) == alone


def test_a_storm_of_disconnects_frees_every_page(server: RunningServer, client: openai.OpenAI) -> None:
    expected = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, temperature=0).choices[0].text

    async def storm() -> str:
        async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(max_connections=100)) as http:

            async def leave(number: int) -> None:
                body = {"prompt": [5 + number % 7] * 100, "max_tokens": 300, "stream": bool(number % 2), "n": 2}
                try:
                    async with asyncio.timeout(0.01 * (number % 30)):
                        async with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
                            async for _ in answer.aiter_raw():
                                if number % 4 == 1:
                                    return
                except (TimeoutError, httpx.TransportError):
                    pass

            async def stay() -> str:
                body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
                answer = await http.post("/v1/completions", json=body, timeout=60)
                return str(answer.json()["choices"][0]["text"])

            neighbour = asyncio.create_task(stay())
            await asyncio.gather(*(leave(number) for number in range(60)))
            return await neighbour

    assert asyncio.run(storm()) == expected
    server.wait_for("potstill:num_requests_running", 0.0)
    server.wait_for("potstill:num_requests_waiting", 0.0)
    server.wait_for("potstill:kv_cache_usage_perc", 0.0)
    assert httpx.get(f"{server.url}/load").json()["server_load"] == 0


def test_a_killed_engine_is_replaced(server: RunningServer, client: openai.OpenAI) -> None:
    [engine] = children_of(server.process.pid)
    waiting = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(waiting)
    os.kill(engine, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(openai.APIError) as caught:
        list(waiting)
    assert time.monotonic() - began < 10
    assert caught.value.code == "engine_died"
    health = httpx.get(f"{server.url}/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_died")
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    server.wait_healthy()
    assert children_of(server.process.pid) != [engine]
    assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2).choices
    assert server.metric("potstill:engine_restarts_total") == 1
