"""OpenAI's requests, strictly: every field has a type and bounds, and a field that is not here is an error by name.

The fields stand in `serve/http/requests.py`. JSON that two parsers could read differently is refused. The standard
library's parser takes duplicate keys (last one wins), NaN, Infinity, numbers too large for a float, integers of any
length and lone surrogates. On none of them do all readers agree, and each has broken a server.
"""

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn, TypeVar

import msgspec

from serve.http.errors import ApiError, invalid
from serve.http.requests import (
    MAX_PROMPTS,
    MAX_STOP_BYTES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from serve.sampling_params import SamplingParams

MAX_DEPTH = 32
MAX_INTEGER = 2**63 - 1

UNSUPPORTED = {
    "best_of": "best_of is not supported: use n, and choose among the choices yourself",
    "suffix": "suffix is not supported: potstill does not fill in the middle",
    "functions": "functions is not supported: potstill cannot call tools yet",
    "function_call": "function_call is not supported: potstill cannot call tools yet",
    "parallel_tool_calls": "parallel_tool_calls is not supported: potstill cannot call tools yet",
    "reasoning_effort": "reasoning_effort is not supported: use chat_template_kwargs.enable_thinking",
    "prompt_logprobs": "prompt_logprobs is not supported here: send the prompt's token ids to /v1/completions",
    "guided_json": "guided_json is not supported: potstill does not constrain output yet",
    "guided_regex": "guided_regex is not supported: potstill does not constrain output yet",
    "guided_grammar": "guided_grammar is not supported: potstill does not constrain output yet",
    "guided_choice": "guided_choice is not supported: potstill does not constrain output yet",
}
"""Fields that clients do send, with a better sentence than "unknown", unless a kind of request has them.

null is taken, since it asks for nothing.
"""

AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def read(value: dict[str, Any], kind: type[AnyRequest]) -> AnyRequest:
    """`value` as a request of this kind, or ApiError 400 naming the field at fault."""
    unsupported = UNSUPPORTED.keys() - set(kind.__struct_fields__)
    for name in unsupported & value.keys():
        if value[name] is not None:
            raise _unsupported(UNSUPPORTED[name], name)
    known = {name: field for name, field in value.items() if name not in unsupported}
    if isinstance(messages := known.get("messages"), list):
        # Clients send an answer back with all the nulls that their own type of it has.
        known["messages"] = [without_nulls(item) if isinstance(item, dict) else item for item in messages]
    try:
        request = msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    if isinstance(request, GenerationRequest):
        _check_generation(request)
    if isinstance(request, ChatRequest):
        _check_chat(request)
    if isinstance(request, CompletionRequest):
        _check_completion(request)
    return request


def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """An object's fields but those that are null."""
    return {name: field for name, field in value.items() if field is not None}


def _unsupported(message: str, param: str) -> ApiError:
    """400: something of OpenAI's that potstill does not do."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def _named(message: str) -> ApiError:
    """msgspec's message, rewritten to begin with the field: "max_tokens: expected an integer, got `str`"."""
    if unknown := re.search(r"contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", message, re.DOTALL):
        name = shown(".".join(part for part in (unknown[2], unknown[1]) if part))
        return ApiError(400, f"unknown or unsupported field: {name}", code="unknown_parameter", param=name)
    if missing := re.search(r"missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$", message, re.DOTALL):
        name = shown(".".join(part for part in (missing[2], missing[1]) if part))
        return ApiError(400, f"{name} is required", code="missing_required_parameter", param=name)
    what, _, where = message.partition(" - at `$.")
    where = shown(where.rstrip("`"))
    what = what[:1].lower() + what[1:200]
    return invalid(f"{where}: {what}" if where else what, where or None)


def _check_generation(request: GenerationRequest) -> None:
    for text in stop_strings(request):
        if len(text.encode()) > MAX_STOP_BYTES:
            raise invalid(f"a stop string may have at most {MAX_STOP_BYTES} bytes", "stop")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    for token in request.logit_bias or ():
        if not re.fullmatch(r"[0-9]{1,10}", token):
            raise invalid(f"the keys of logit_bias are token ids, not {shown(token)!r}", "logit_bias")


def _check_completion(request: CompletionRequest) -> None:
    if request.prompt_logprobs is not None and (request.stream or request.echo):
        raise invalid("prompt_logprobs goes with neither stream nor echo", "prompt_logprobs")
    prompts = request.prompt
    if isinstance(prompts, str):
        return
    kinds = {type(item) for item in prompts}
    if len(kinds) != 1:
        raise invalid("prompt is a string, a list of token ids, or a list of strings or of such lists", "prompt")
    if kinds != {int} and len(prompts) > MAX_PROMPTS:
        raise invalid(f"prompt holds {len(prompts)} prompts; one request takes at most {MAX_PROMPTS}", "prompt")


def _check_chat(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if request.response_format is not None and request.response_format.type != "text":
        kind = request.response_format.type
        text = f"response_format {kind} is not supported: potstill does not constrain output yet"
        raise _unsupported(text, "response_format")
    if request.tool_choice not in (None, "auto", "none"):
        raise _unsupported('tool_choice must be "auto" or "none": potstill cannot call tools yet', "tool_choice")
    if request.tools and request.tool_choice != "none":
        text = 'tools is not supported: potstill cannot call tools yet; leave it out, or give tool_choice "none"'
        raise _unsupported(text, "tools")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise invalid("continue_final_message excludes add_generation_prompt", "continue_final_message")
        if request.messages[-1].role != "assistant":
            raise invalid("continue_final_message needs an assistant message at the end", "continue_final_message")


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """The stop strings as a tuple, whichever form they came in."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def sampling_params(
    request: GenerationRequest, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The engine's parameters. Fields not given take OpenAI's defaults, which are those of SamplingParams."""
    names = (
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("seed", "min_tokens", "ignore_eos", "n"),
    )
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **given,
        top_k=max(request.top_k or 0, 0),
        stop=stop_strings(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def loads(body: bytes) -> Any:
    """The value in `body` (UTF-8), or ApiError 400 saying what is wrong with it."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise invalid("the body is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise invalid(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # Python reads no more than 4300 digits
        raise invalid("an integer in the body is too large") from None
    except RecursionError:
        raise invalid(f"the body nests deeper than {MAX_DEPTH} levels") from None
    _check(value)
    return value


def loads_object(body: bytes) -> dict[str, Any]:
    """Like `loads`, for a body that must be an object."""
    value = loads(body)
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = shown(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
        raise invalid(f"the key {twice} appears twice in one object", twice)
    return result


def _no_constant(name: str) -> NoReturn:
    raise invalid(f"{name} is not a JSON number")


def _check(value: Any) -> None:
    """Depth, size of numbers and encodable text, level by level (no recursion, so no depth can hurt)."""
    level, depth = [value], 0
    while level:
        depth += 1
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, int):
                if not -MAX_INTEGER - 1 <= item <= MAX_INTEGER:
                    raise invalid("an integer in the body is too large")
            elif isinstance(item, str):
                _check_text(item)
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise invalid("a number in the body is too large")
            elif isinstance(item, list | dict):
                if depth > MAX_DEPTH:
                    raise invalid(f"the body nests deeper than {MAX_DEPTH} levels")
                deeper.extend(item)  # of an object: its keys
                if isinstance(item, dict):
                    deeper.extend(item.values())
        level = deeper


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("a string in the body holds half a surrogate pair, which is no character") from None


def shown(name: str) -> str:
    """A name from the request, fit to be repeated in a message: short and printable."""
    return "".join(character for character in name[:64] if character.isprintable())
