"""What requests and frames may look like, without a server."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model.text.tokenizer import Tokenizer
from serve.http.chat import chat_logprobs, conversation_ids, template_message
from serve.http.completions import LegacyLogprobsWriter
from serve.http.errors import ApiError
from serve.http.generation import LOWEST
from serve.http.metrics import Metrics
from serve.http.protocol import loads, loads_object, read, sampling_params
from serve.http.requests import ChatRequest, CompletionRequest, Message
from serve.messages import LENGTH, Abort, Add, Pong, ProtocolError, Report, decode_from_engine, decode_to_engine, frame
from serve.outputs import EngineStats, RequestOutput, TokenLogprobs
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant
from tests.serve.http_server import save_tiny_folder

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NULLS = dict.fromkeys(["refusal", "audio", "function_call", "annotations", "tool_calls", "parsed", "reasoning_content"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("protocol") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Iterator[Tokenizer]:
    yield Tokenizer.load(folder)


# JSON


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": 1} {"b": 2}', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": "\xc0\xaf"}', "UTF-8"),
        (b'{"a": "tab\there"}', "not valid JSON"),
        (rb'{"a": "\ud800"}', "surrogate"),
        (rb'{"\udc00": 1}', "surrogate"),
        (b'{"a": 1, "a": 2}', "the key a appears twice"),
        (b'{"b": {"c": 1, "c": 1}}', "the key c appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "a number in the body is too large"),
        (b'{"a": ' + b"9" * 20 + b"}", "an integer in the body is too large"),
        (b'{"a": -' + b"1" * 100_000 + b"}", "an integer in the body is too large"),
        (b"[" * 33 + b"]" * 33, "deeper than 32"),
        (b"[" * 100_000 + b"]" * 100_000, "deeper than 32"),
        (b'{"a":' * 100_000, "deeper than 32"),
    ],
)
def test_json_that_readers_disagree_on_is_refused(body: bytes, complaint: str) -> None:
    with pytest.raises(ApiError, match=complaint) as caught:
        loads(body)
    assert caught.value.status == 400


def test_json_that_everybody_reads_alike_is_read() -> None:
    assert loads(b"[" * 32 + b"]" * 32) is not None
    assert loads(rb'{"a": "\ud83d\ude42", "b": [1, -2.5e3, true, null], "c": 9223372036854775807}') == {
        "a": "🙂",
        "b": [1, -2500.0, True, None],
        "c": 2**63 - 1,
    }
    with pytest.raises(ApiError, match="must be a JSON object"):
        loads_object(b"[1]")


def test_one_hundred_thousand_keys_with_a_late_twin_cost_little() -> None:
    body = b"{" + b",".join(b'"%d":0' % number for number in range(90_000)) + b',"89999":0}'
    with pytest.raises(ApiError, match="the key 89999 appears twice"):
        loads(body)


# Requests

REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (CompletionRequest, {}, "prompt"),
    (CompletionRequest, {"prompt": None}, "prompt"),
    (CompletionRequest, {"prompt": 7}, "prompt"),
    (CompletionRequest, {"prompt": []}, "prompt"),
    (CompletionRequest, {"prompt": ["a", [1]]}, "prompt"),
    (CompletionRequest, {"prompt": [1, "a"]}, "prompt"),
    (CompletionRequest, {"prompt": [-1]}, "prompt[0]"),
    (CompletionRequest, {"prompt": [1.5]}, "prompt[0]"),
    (CompletionRequest, {"prompt": [True]}, "prompt[0]"),
    (CompletionRequest, {"prompt": [[1], [2**31]]}, "prompt[1][0]"),
    (CompletionRequest, {"prompt": ["a"] * 1025}, "prompt"),
    (CompletionRequest, COMPLETION | {"suffix": "x"}, "suffix"),
    (CompletionRequest, COMPLETION | {"best_of": 2}, "best_of"),
    (CompletionRequest, COMPLETION | {"logprobs": 21}, "logprobs"),
    (CompletionRequest, COMPLETION | {"logprobs": True}, "logprobs"),
    (CompletionRequest, COMPLETION | {"messages": []}, "messages"),
    (ChatRequest, {}, "messages"),
    (ChatRequest, {"messages": []}, "messages"),
    (ChatRequest, {"messages": "hi"}, "messages"),
    (ChatRequest, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    (ChatRequest, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (ChatRequest, {"messages": [{"role": "user", "content": "hi", "mood": 1}]}, "messages[0].mood"),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (ChatRequest, CHAT | {"top_logprobs": 2}, "top_logprobs"),
    (ChatRequest, CHAT | {"logprobs": 2}, "logprobs"),
    (ChatRequest, CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (ChatRequest, CHAT | {"response_format": {"type": "yaml"}}, "response_format.type"),
    (ChatRequest, CHAT | {"response_format": {"type": "json_schema", "json_schema": 1}}, "response_format.json_schema"),
    (ChatRequest, CHAT | {"response_format": {"type": "xml"}}, "response_format.type"),
    (ChatRequest, CHAT | {"tool_choice": "required"}, "tool_choice"),
    (ChatRequest, CHAT | {"tools": [{"type": "function"}]}, "tools[0].function"),
    (ChatRequest, CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    (ChatRequest, CHAT | {"functions": [{"name": "f"}]}, "functions"),
    (ChatRequest, CHAT | {"reasoning_effort": "high"}, "reasoning_effort"),
    (ChatRequest, CHAT | {"chat_template": "{{ x }}"}, "chat_template"),
    (ChatRequest, CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (ChatRequest, CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    (ChatRequest, CHAT | {"continue_final_message": True}, "continue_final_message"),
    (ChatRequest, CHAT | {"modalities": ["audio"]}, "modalities"),
    (ChatRequest, CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
    (ChatRequest, CHAT | {"stream": True, "stream_options": {"include_everything": True}}, "stream_options.include_"),
    (ChatRequest, CHAT | {"stream": "yes"}, "stream"),
    (ChatRequest, CHAT | {"temperature": -0.1}, "temperature"),
    (ChatRequest, CHAT | {"temperature": 2.1}, "temperature"),
    (ChatRequest, CHAT | {"temperature": "1"}, "temperature"),
    (ChatRequest, CHAT | {"top_p": 0}, "top_p"),
    (ChatRequest, CHAT | {"top_p": 1.01}, "top_p"),
    (ChatRequest, CHAT | {"top_k": -2}, "top_k"),
    (ChatRequest, CHAT | {"top_k": 1.5}, "top_k"),
    (ChatRequest, CHAT | {"min_p": -0.1}, "min_p"),
    (ChatRequest, CHAT | {"repetition_penalty": 0}, "repetition_penalty"),
    (ChatRequest, CHAT | {"presence_penalty": 2.5}, "presence_penalty"),
    (ChatRequest, CHAT | {"frequency_penalty": -2.5}, "frequency_penalty"),
    (ChatRequest, CHAT | {"logit_bias": {"a": 1}}, "logit_bias"),
    (ChatRequest, CHAT | {"logit_bias": {"-1": 1}}, "logit_bias"),
    (ChatRequest, CHAT | {"logit_bias": {"1": 101}}, "logit_bias"),
    (ChatRequest, CHAT | {"logit_bias": [1]}, "logit_bias"),
    (ChatRequest, CHAT | {"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
    (ChatRequest, CHAT | {"seed": 2**63}, "seed"),
    (ChatRequest, CHAT | {"seed": 0.5}, "seed"),
    (ChatRequest, CHAT | {"stop": ""}, "stop"),
    (ChatRequest, CHAT | {"stop": ["a", ""]}, "stop"),
    (ChatRequest, CHAT | {"stop": ["a"] * 5}, "stop"),
    (ChatRequest, CHAT | {"stop": "é" * 513}, "stop"),
    (ChatRequest, CHAT | {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    (ChatRequest, CHAT | {"max_tokens": -1}, "max_tokens"),
    (ChatRequest, CHAT | {"max_tokens": 2**40}, "max_tokens"),
    (ChatRequest, CHAT | {"min_tokens": -1}, "min_tokens"),
    (ChatRequest, CHAT | {"n": 0}, "n"),
    (ChatRequest, CHAT | {"n": 16385}, "n"),
    (ChatRequest, CHAT | {"priority": 2**31}, "priority"),
    (ChatRequest, CHAT | {"cache_salt": ""}, "cache_salt"),
    (ChatRequest, CHAT | {"deadline_s": 0}, "deadline_s"),
    (ChatRequest, CHAT | {"user": 5}, "user"),
    (ChatRequest, CHAT | {"model": ["a"]}, "model"),
    (ChatRequest, CHAT | {"prediction": {"type": "content", "content": "x"}}, "prediction"),
]


@pytest.mark.parametrize(("kind", "value", "param"), REFUSED, ids=lambda item: str(item)[:60])
def test_what_is_out_of_bounds_or_unknown_is_refused_by_name(kind: Any, value: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(value, kind)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    error = msgspec.json.decode(caught.value.body())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert param.split("[")[0].split(".")[0] in error["message"]


def test_every_bound_itself_is_taken() -> None:
    extremes = {
        "temperature": 2, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 100, "presence_penalty": -2,
        "frequency_penalty": 2.0, "logit_bias": {str(token): -100 for token in range(300)}, "seed": -(2**63),
        "stop": ["a" * 1024] * 4, "max_tokens": 2**31 - 1, "min_tokens": 0, "n": 16384, "logprobs": True,
        "top_logprobs": 20, "tool_choice": "auto", "response_format": {"type": "text"}, "user": "x" * 512,
    }  # fmt: skip
    read(CHAT | extremes, ChatRequest)
    nulls = dict.fromkeys(extremes, None) | {"best_of": None, "functions": None}
    params = sampling_params(read(CHAT | nulls, ChatRequest), max_tokens=3, logprobs=None)
    assert params == SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
def test_tools_that_ask_for_no_call_are_taken(harmless: dict[str, Any]) -> None:
    read(CHAT | harmless, ChatRequest)


def test_all_fields_reach_the_engine() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 4, "min_tokens": 2, "ignore_eos": True, "n": 3,
    }  # fmt: skip
    wire = fields | {"stop": "x", "stop_token_ids": [3], "logit_bias": {"7": -1.5}}
    params = sampling_params(read(COMPLETION | wire, CompletionRequest), max_tokens=9, logprobs=1, prompt_logprobs=2)
    expected = SamplingParams(
        **fields, stop=("x",), stop_token_ids=(3,), logit_bias={7: -1.5}, max_tokens=9, logprobs=1, prompt_logprobs=2
    )
    assert params == expected


def test_messages_repeat_no_more_of_the_request_than_a_name() -> None:
    with pytest.raises(ApiError) as caught:
        read(CHAT | {"x" * 10_000 + "\n\x1b[31m": 1}, ChatRequest)
    assert len(caught.value.message) < 200
    assert caught.value.message.isprintable()


# Conversations


def test_a_final_message_is_continued_where_it_ends(tokenizer: Tokenizer) -> None:
    messages = [Message("user", "Say x"), Message("assistant", "The quick brown x ")]

    def ids(open_ended: bool) -> list[int]:
        return conversation_ids(
            tokenizer,
            messages,
            tools=None,
            arguments=None,
            add_generation_prompt=None if open_ended else False,
            continue_final_message=open_ended,
        )

    whole = tokenizer.decode(ids(False), skip_special_tokens=False)
    assert whole == "<|im_start|>user\nSay x<|im_end|>\n<|im_start|>assistant\nThe quick brown x<|im_end|>\n"
    assert tokenizer.decode(ids(True), skip_special_tokens=False) == whole.removesuffix("<|im_end|>\n")


def test_content_parts_and_tool_calls_reach_the_template_in_its_own_form(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    value = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "type": "text"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
            {"role": "assistant", "content": "c", "annotations": [], "tool_calls": None, "name": None} | NULLS,
            {"role": "assistant", "content": None} | NULLS | {"refusal": "no"},
        ]
    }
    messages = [template_message(message) for message in read(value, ChatRequest).messages]
    assert messages == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call | {"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "no"},
    ]


# Log-probabilities


def test_text_offsets_point_at_the_tokens_in_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 🙂 日本 x"
    ids = tokenizer.encode(text)
    writer = LegacyLogprobsWriter(tokenizer, continues=False)
    pieces = [writer.write([token], [TokenLogprobs(token, -1.0, 1)]) for token in ids]
    offsets = [offset for piece in pieces for offset in piece.text_offset]
    spelled = tokenizer.token_bytes()
    for number, offset in enumerate(offsets):
        before = b"".join(spelled[token] for token in ids[:number])
        assert offset == len(before.decode("utf-8", "ignore"))
    assert len(set(offsets)) < len(offsets), "no character took two tokens"


def test_impossible_tokens_have_a_number_in_json(tokenizer: Tokenizer) -> None:
    position = TokenLogprobs(300, -math.inf, 400, ((301, -0.5),))
    [entry] = chat_logprobs(tokenizer, [position], None).content
    assert entry.logprob == LOWEST
    legacy = LegacyLogprobsWriter(tokenizer, continues=True).write([300], [position])
    assert legacy.token_logprobs == [LOWEST]
    top = legacy.top_logprobs[0]
    assert top is not None
    assert max(top.values()) == -0.5
    assert b"drafted" not in msgspec.json.encode(legacy)


# Frames


def test_messages_survive_the_wire() -> None:
    params = SamplingParams(stop=("a",), logit_bias={3: 1.5}, seed=-(2**63))
    add = Add("r", [1, 2], params, arrival=1.25, priority=-1, deadline=None, tenant=Tenant("k", 2.0, "s"))
    assert decode_to_engine(frame(add)[LENGTH.size :]) == add
    assert decode_to_engine(frame(Abort(["r"]))[LENGTH.size :]) == Abort(["r"])
    position = TokenLogprobs(1, -math.inf, 2, ((5, -0.5), (6, -1.0)))
    output = RequestOutput(
        "r", 1, [7], "é", "stop", 9, [position], [None, position], 2, 0, 1, 3, 2, [True], None, [0.5]
    )
    report = Report([output], EngineStats(accepted_per_position=(2, 1)), ["r"])
    assert decode_from_engine(frame(report)[LENGTH.size :]) == report


def test_a_frame_that_is_no_message_is_an_error() -> None:
    pong = frame(Pong(1, EngineStats()))[LENGTH.size :]
    for body in (b"", b"\xc1", pong[:-1], pong + b"\x00", b"\x80" + pong):
        with pytest.raises(ProtocolError):
            decode_from_engine(body)
    with pytest.raises(ProtocolError):
        decode_to_engine(pong)


# Metrics


def test_metrics_have_vllm_names_and_go_on_after_a_restart() -> None:
    metrics = Metrics('a "model"')
    stats = EngineStats(num_running=1, num_pages=10, num_pages_used=5, num_generation_tokens=7, num_preemptions=1)
    metrics.record_stats(stats)
    metrics.record_stats(stats)
    text = metrics.expose().decode()
    for prefix in ("potstill:", "vllm:"):
        assert f'{prefix}generation_tokens_total{{model_name="a \\"model\\""}} 7.0' in text
        assert f'{prefix}kv_cache_usage_perc{{model_name="a \\"model\\""}} 0.5' in text
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
        *("generation_tokens_total", "request_success_total", "num_preemptions_total", "admission_rejections_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "time_to_first_token_seconds_bucket"),
        *("inter_token_latency_seconds_sum", "request_time_per_output_token_seconds_count"),
        *("e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_sum"),
        *("request_decode_time_seconds_sum", "request_prompt_tokens_sum", "request_generation_tokens_sum"),
        *("iteration_tokens_total_sum", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
        *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
        "cache_config_info",
    ):
        family = name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        assert f"# HELP vllm:{family}" in text, name
        assert f"# HELP potstill:{family}" in text, name
