"""OpenAI's requests, strictly: every field has a type and bounds, and a field that is not here is an error by name.

Fields follow OpenAI's two generation routes plus vLLM's extras. `null` means "not given" wherever a field is optional.
Bounds keep one legal-looking request from holding the engine: they are checked before any work is done.

JSON that two parsers could read differently is refused. The standard library's parser takes duplicate keys (last one
wins), NaN, Infinity, numbers too large for a float, integers of any length and lone surrogates. On none of them do all
readers agree, and each has broken a server.
"""

import json
import math
import re
from collections import Counter
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from serve.http.errors import ApiError, invalid
from serve.sampling_params import MAX_SEED, SamplingParams

MAX_DEPTH = 32
MAX_INTEGER = 2**63 - 1
MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_DEADLINE_S = 3600.0

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1)]
ShortText = Annotated[str, Meta(max_length=512)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM: usage so far in every chunk."""


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions and chat share."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 keep all tokens."""
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Lower runs earlier; 0 unless given."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)] | None = None
    """potstill: seconds from arrival after which the request is given up with 504."""
    user: ShortText | None = None
    """OpenAI: a label for the end user. It has no effect and is not recorded."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    """vLLM: of each prompt token and of this many most probable ones at its place, by token id; not in a stream."""
    add_special_tokens: bool | None = None
    """vLLM: put the tokenizer's own special tokens (often a beginning-of-sequence) before a text prompt; true."""


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A content part; potstill's models read text only."""

    text: str


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """What an assistant called: `arguments` is JSON in a string, as the model wrote it."""

    name: ShortText
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """One tool call of an assistant message."""

    id: ShortText
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation. What a server answered comes back with the next question, as it was."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: ShortText | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: ShortText | None = None
    refusal: str | None = None
    """OpenAI: what an assistant said in place of content."""
    annotations: list[dict[str, Any]] | None = None
    """OpenAI: sources of an assistant's words; no template reads them."""
    type: Literal["text"] | None = None
    """lm-eval marks its messages so; it says nothing new."""


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A function the model may call; `parameters` is a JSON schema that only the template reads."""

    name: ShortText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of `tools`."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class ResponseFormat(msgspec.Struct):
    """Only `{"type": "text"}` is served; other types are refused before this is read."""

    type: Literal["text", "json_object", "json_schema"]


class ChatTemplateArguments(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The arguments that a request may hand to the chat template: a closed list, since templates are programs."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    tools_in_user_message: bool | None = None
    date_string: Annotated[str, Meta(max_length=64)] | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    """Taken where it asks for nothing: empty, or with tool_choice "none"."""
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /tokenize: text (`prompt`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


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
