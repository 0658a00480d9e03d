"""What clients send without meaning anything by it is taken; what would change the answer is refused by name."""

from typing import Any

import pytest

from serve.http.chat import template_message
from serve.http.errors import ApiError
from serve.http.options import RequestLimits
from serve.http.protocol import read, restricted, sampling_params, without_nulls
from serve.http.requests import ChatRequest, CompletionRequest, GenerationRequest
from serve.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": MESSAGES}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
KINDS: list[tuple[type[GenerationRequest], dict[str, Any]]] = [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)]
LABELS = {
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "metadata": {"purpose": "test"},
    "spaces_between_special_tokens": True,
}
DEFAULTS = {
    "store": False, "service_tier": "auto", "best_of": 1, "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
    "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
    "stop": [], "stop_token_ids": [], "bad_words": [], "min_tokens": 0, "ignore_eos": False, "stream": False,
    "skip_special_tokens": True, "include_stop_str_in_output": False, "use_beam_search": False, "length_penalty": 1,
    "early_stopping": False, "return_token_ids": False,
}  # fmt: skip
CHAT_DEFAULTS = {
    "parallel_tool_calls": True, "functions": [], "function_call": "none", "tools": [], "tool_choice": "none",
    "modalities": ["text"], "verbosity": "medium", "documents": [], "echo": False, "add_special_tokens": False,
    "logprobs": False, "response_format": {"type": "text"}, "add_generation_prompt": True,
}  # fmt: skip
COMPLETION_DEFAULTS = {"suffix": "", "echo": False, "add_special_tokens": True}


def params_of(value: dict[str, Any], kind: type[GenerationRequest]) -> SamplingParams:
    return sampling_params(read(value, kind), max_tokens=3, logprobs=None)  # type: ignore[type-var]


@pytest.mark.parametrize(("kind", "base"), KINDS)
def test_defaults_labels_and_nulls_change_nothing(kind: type[GenerationRequest], base: dict[str, Any]) -> None:
    own = CHAT_DEFAULTS if kind is ChatRequest else COMPLETION_DEFAULTS
    given = DEFAULTS | own | LABELS
    plain = params_of(base, kind)
    assert params_of(base | given, kind) == plain == SamplingParams(max_tokens=3)
    nulls = dict.fromkeys(kind.__struct_fields__) | {"unheard_of": None, "reasoning_effort": None, "audio": None}
    assert params_of(nulls | base, kind) == plain
    for name, value in given.items():
        read(base | {name: value}, kind)  # type: ignore[type-var]
        read(base | {name: None}, kind)  # type: ignore[type-var]


def test_what_is_deeper_than_nulls_may_be_is_not_walked_through() -> None:
    ids = [7] * 1000
    assert without_nulls({"prompt": ids, "user": None}) == {"prompt": ids}
    assert without_nulls({"prompt": ids})["prompt"] is ids


def test_nulls_inside_objects_are_as_good_as_absent_but_not_inside_schemas() -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [None, 1], "default": None}}}
    function = {"name": "f", "description": None, "strict": None, "parameters": schema}
    value = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}], "name": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "index": None,
                        "function": {"name": "f", "arguments": "{}", "x": None},
                    }
                ],
            },
        ],
        "tools": [{"type": "function", "function": function, "extra": None}],
        "tool_choice": "none",
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": None},
        "response_format": {"type": "text", "json_schema": None},
    }
    request = read(value, ChatRequest)
    assert request.tools is not None and request.tools[0].function.parameters == schema
    assert "name" not in template_message(request.messages[0])


@pytest.mark.parametrize(("kind", "base"), KINDS)
def test_other_values_of_what_is_not_supported_are_refused_by_name(
    kind: type[GenerationRequest], base: dict[str, Any]
) -> None:
    others: dict[str, Any] = {
        "service_tier": "flex", "use_beam_search": True, "length_penalty": 0.5, "early_stopping": True,
        "suffix": "x", "functions": [{"name": "f"}], "function_call": "f", "modalities": ["text", "audio"],
        "verbosity": "low", "documents": [{"text": "x"}], "echo": True, "add_special_tokens": True,
    }  # fmt: skip
    assert restricted(kind).keys() <= others.keys()
    for name in restricted(kind):
        with pytest.raises(ApiError) as caught:
            read(base | {name: others[name]}, kind)  # type: ignore[type-var]
        assert (caught.value.status, caught.value.param) == (400, name)
        assert caught.value.code == "unsupported_parameter"
        assert caught.value.message.startswith(f"{name} can only be ")
    with pytest.raises(ApiError, match="best_of can only be 1 or n") as caught:
        read(base | {"best_of": 3, "n": 2}, kind)  # type: ignore[type-var]
    read(base | {"best_of": 2, "n": 2}, kind)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("fields", "limit", "param"),
    [
        ({"n": 3}, {"max_n": 2}, "n"),
        ({"stop": ["a", "b"]}, {"max_stop_strings": 1}, "stop"),
        ({"stop": "a"}, {"max_stop_strings": 0}, "stop"),
        ({"prompt": ["a"] * 3}, {"max_prompts": 2}, "prompt"),
        ({"prompt": [[1], [2], [3]]}, {"max_prompts": 2}, "prompt"),
        ({"logprobs": 6}, {"max_logprobs": 5}, "logprobs"),
        ({"prompt_logprobs": 6}, {"max_logprobs": 5}, "prompt_logprobs"),
        ({"logprobs": 21}, {}, "logprobs"),
    ],
)
def test_limits_are_options(fields: dict[str, Any], limit: dict[str, int], param: str) -> None:
    with pytest.raises(ApiError, match="takes at most") as caught:
        read(COMPLETION | fields, CompletionRequest, RequestLimits(**limit))
    assert caught.value.param == param
    more = {name: value + 1 for name, value in (limit or {"max_logprobs": 20}).items()}
    read(COMPLETION | fields, CompletionRequest, RequestLimits(**more))


def test_a_prompt_of_many_tokens_is_one_prompt() -> None:
    read({"prompt": [1] * 50}, CompletionRequest, RequestLimits(max_prompts=1))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"metadata": {"x": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
@pytest.mark.parametrize(("kind", "base"), KINDS)
def test_new_fields_have_bounds(
    kind: type[GenerationRequest], base: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(base | fields, kind)  # type: ignore[type-var]
    assert caught.value.status == 400 and str(caught.value.param).startswith(param)
    assert param in caught.value.message


def test_new_fields_reach_the_engine() -> None:
    fields = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    lists = {"allowed_token_ids": [3, 4], "bad_words": ["a"], "stop_token_ids": [5]}
    for kind, base in KINDS:
        assert params_of(base | fields | lists, kind) == SamplingParams(
            max_tokens=3,
            allowed_token_ids=(3, 4),
            bad_words=("a",),
            stop_token_ids=(5,),
            **fields,  # type: ignore[arg-type]
        )
