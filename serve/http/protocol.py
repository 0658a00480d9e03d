"""OpenAI's requests, strictly: every field has a type and bounds, and a field that is not here is an error by name.

The fields stand in `serve/http/requests.py`. JSON that two parsers could read differently is refused. The standard
library's parser takes duplicate keys (last one wins), NaN, Infinity, numbers too large for a float, integers of any
length and lone surrogates. On none of them do all readers agree, and each has broken a server.
"""

import json
import math
import re
from collections import Counter
from functools import cache
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import msgspec

from serve.http.errors import ApiError, invalid, unsupported
from serve.http.options import RequestLimits
from serve.http.requests import (
    MAX_STOP_BYTES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from serve.sampling_params import SamplingParams

MAX_DEPTH = 32
MAX_INTEGER = 2**63 - 1

UNSUPPORTED = {
    "audio": "audio is not supported: potstill writes text",
    "chat_template": "chat_template is not supported: the server's operator gives one by --chat-template",
    "prediction": "prediction is not supported: drafts come from the server's own",
    "web_search_options": "web_search_options is not supported: potstill reads nothing but the request",
    "reasoning_effort": "reasoning_effort is not supported: use chat_template_kwargs.enable_thinking",
}
"""Fields that clients do send, with a better sentence than "unknown", unless a kind of request has them."""
NULL_DEPTHS = {
    "messages": 3,
    "tools": 2,
    "response_format": 2,
    "structured_outputs": 1,
    "stream_options": 1,
    "chat_template_kwargs": 1,
}
"""How deep in these fields null means "not given"; further in are JSON schemas, where it is a value.

A kind of request of another protocol has its own, as `null_depths`.
"""

AnyRequest = TypeVar("AnyRequest", bound=msgspec.Struct)
DEFAULT_LIMITS = RequestLimits()


@cache
def restricted(kind: type[msgspec.Struct]) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Fields of a kind of request that are marked by `only`: their values, and the reason."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for part in get_args(hint):
            for mark in getattr(part, "__metadata__", ()):
                if mark.extra is not None:
                    found[name] = mark.extra["only"], mark.extra["because"]
    return found


def read(value: dict[str, Any], kind: type[AnyRequest], limits: RequestLimits = DEFAULT_LIMITS) -> AnyRequest:
    """`value` as a request of this kind, or ApiError 400 naming the field at fault. null means "not given"."""
    known = without_nulls(value)
    for name in (UNSUPPORTED.keys() - set(kind.__struct_fields__)) & known.keys():
        raise unsupported(UNSUPPORTED[name], name)
    depths = getattr(kind, "null_depths", NULL_DEPTHS)
    for name in depths.keys() & known.keys():
        known[name] = without_nulls(known[name], depths[name])
    try:
        request = msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    check_only(request)
    if isinstance(request, GenerationRequest):
        _check_generation(request, limits)
    if isinstance(request, ChatRequest):
        _check_chat(request, limits)
    if isinstance(request, CompletionRequest):
        _check_completion(request, limits)
    return request


def without_nulls(value: Any, depth: int = 1) -> Any:
    """An object's fields but those that are null, so many objects deep; lists do not count."""
    if not depth:
        return value
    if isinstance(value, list):
        return [without_nulls(item, depth) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: without_nulls(field, depth - 1) for name, field in value.items() if field is not None}


def _named(message: str) -> ApiError:
    """msgspec's message, rewritten to begin with the field: "max_tokens: expected an integer, got `str`"."""
    if unknown := re.search(r"contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", message, re.DOTALL):
        name = shown(".".join(part for part in (unknown[2], unknown[1]) if part))
        return ApiError(400, f"unknown or unsupported field: {name}", code="unknown_parameter", param=name)
    if missing := re.search(r"missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$", message, re.DOTALL):
        name = shown(".".join(part for part in (missing[2], missing[1]) if part))
        return ApiError(400, f"{name} is required", code="missing_required_parameter", param=name)
    what, _, where = message.replace(" - at `key` in `$.", " - at `$.").partition(" - at `$.")
    where = shown(where.rstrip("`"))
    what = what[:1].lower() + what[1:200]
    return invalid(f"{where}: {what}" if where else what, where or None)


def _check_generation(request: GenerationRequest, limits: RequestLimits) -> None:
    stops = stop_strings(request)
    _check_limit("stop", len(stops), limits.max_stop_strings, "strings")
    if any(len(text.encode()) > MAX_STOP_BYTES for text in stops):
        raise invalid(f"a stop string may have at most {MAX_STOP_BYTES} bytes", "stop")
    _check_limit("n", request.n or 1, limits.max_n)
    _check_limit("prompt_logprobs", request.prompt_logprobs or 0, limits.max_logprobs)
    if request.best_of not in (None, 1, request.n):
        raise unsupported("best_of can only be 1 or n: use n, and choose among the choices yourself", "best_of")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs does not go with stream", "prompt_logprobs")
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens must be at least 1, or -1 for what fits", "truncate_prompt_tokens")
    for token in request.logit_bias or ():
        if not re.fullmatch(r"[0-9]{1,10}", token):
            raise invalid(f"the keys of logit_bias are token ids, not {shown(token)!r}", "logit_bias")
    most = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(most) > 1:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")


def check_only(request: msgspec.Struct, where: str = "") -> None:
    """ApiError 400 for another value than a field takes; `where` is what stands before its name, of an inner object."""
    for name, (values, because) in restricted(type(request)).items():
        if getattr(request, name) not in (None, *values):
            allowed = " or ".join(json.dumps(value) for value in values)
            raise unsupported(f"{where}{name} can only be {allowed}: {because}", where + name)


def _check_limit(name: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        size = f"has {value} {unit}" if unit else f"is {value}"
        raise invalid(f"{name} {size}; this server takes at most {limit}", name)


def _check_completion(request: CompletionRequest, limits: RequestLimits) -> None:
    _check_limit("logprobs", request.logprobs or 0, limits.max_logprobs)
    if request.prompt_logprobs is not None and request.echo:
        raise invalid("prompt_logprobs does not go with echo, which shows those of logprobs", "prompt_logprobs")
    prompts = request.prompt
    if isinstance(prompts, str):
        return
    kinds = set(map(type, prompts))
    if len(kinds) != 1:
        raise invalid("prompt is a string, a list of token ids, or a list of strings or of such lists", "prompt")
    if kinds != {int}:
        _check_limit("prompt", len(prompts), limits.max_prompts, "prompts")


def _check_chat(request: ChatRequest, limits: RequestLimits) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    _check_limit("top_logprobs", request.top_logprobs or 0, limits.max_logprobs)
    if request.tool_choice not in (None, "auto", "none") and not request.tools:
        raise invalid("tool_choice needs tools to choose from", "tool_choice")
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
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    shown_special_tokens: tuple[int, ...] = (),
) -> SamplingParams:
    """The engine's parameters. Fields not given take OpenAI's defaults, which are those of SamplingParams."""
    names = (
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("seed", "min_tokens", "ignore_eos", "n", "stop_token_ids", "allowed_token_ids", "bad_words"),
        *("skip_special_tokens", "include_stop_str_in_output"),
    )
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **given,
        top_k=max(request.top_k or 0, 0),
        stop=stop_strings(request),
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        shown_special_tokens=shown_special_tokens,
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
