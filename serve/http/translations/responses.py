"""POST /v1/responses: OpenAI's newer protocol, of items in and items out, on the path of chat.

Nothing is stored: a conversation goes on by sending its items again, and what refers to stored ones is refused.
Source: https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serve.http.errors import ApiError, invalid
from serve.http.generation import Service
from serve.http.requests import Count, Labels, ShortText, only
from serve.http.responses import (
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FunctionDelta,
    ResponseMetrics,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from serve.http.translations.base import Extras, Translation, named_event
from serve.http.translations.response_items import Item, ItemStream

LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}
"""What chat calls otherwise."""
UNSUPPORTED = {
    "previous_response_id": "no response is stored; send the earlier items in input",
    "conversation": "no conversation is stored; send its items in input",
    "prompt": "no prompt is stored; send it in instructions and input",
    "max_tool_calls": "tools are called by the client, which can count",
}
STATUS = {"length": "incomplete"}
"""By finish reason; others end as completed."""


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an item's content; potstill's models read text only."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None


Content = str | list[InputPart]


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message, thoughts, a call that the model made, or what came of it; what was answered comes back as it was."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: ShortText | None = None
    name: ShortText | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[InputPart] | None = None
    """Of thoughts; what they say stands in the content."""
    id: ShortText | None = None
    status: ShortText | None = None
    phase: ShortText | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: ShortText
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the text must be: anything, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: ShortText | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """No effort can be chosen; an object that chooses none is taken."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class EventOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Whether events may be padded, so that their sizes tell less; they never are."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Extras, kw_only=True):
    """POST /v1/responses."""

    null_depths: ClassVar = {"input": 2, "tools": 1}
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stop: Any = None
    """vLLM: stop strings, as in chat."""
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Reasoning is never encrypted: asking for it where there is none changes nothing."""
    top_logprobs: Count | None = None
    truncation: Annotated[str, only("disabled", because="what does not fit is refused")] | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: EventOptions | None = None
    background: Annotated[bool, only(False, because="responses are not stored")] | None = None
    store: Annotated[bool, only(False, because="responses are not stored")] | None = None
    metadata: Labels | None = None
    """Comes back in the response; it has no effect and is not recorded."""
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    max_tool_calls: Count | None = None


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Both as chat has them, from a server that speculates."""


class ResponsesUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, frozen=True):
    """A whole response, or its state in an event of a stream."""

    id: str
    created_at: int
    status: str
    model: str
    output: list[Item]
    usage: ResponsesUsage | None
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_p: float | None
    metrics: ResponseMetrics | UnsetType = UNSET
    """As chat has them, of an answer that has ended."""
    previous_response_id: None = None
    background: bool = False
    store: bool = False
    truncation: str = "disabled"
    object: str = "response"


class ResponsesReply(Translation):
    """One request to /v1/responses."""

    id_prefix = "resp"

    def __init__(self, asked: ResponsesRequest, service: Service) -> None:
        super().__init__(chat_body(asked), NAMES, service)
        self._asked = asked
        self._num_events = 0
        self._items = ItemStream(self.id.removeprefix(f"{self.id_prefix}-"))
        self._status = "completed"

    def translate_whole(self, whole: ChatCompletion) -> Response:
        [choice] = whole.choices
        message, entries = choice.message, _entries(choice.logprobs)
        calls = [
            ToolCallDelta(number, FunctionDelta(call.function.name, call.function.arguments), call.id)
            for number, call in enumerate(message.tool_calls or ())
        ]
        self._status = STATUS.get(choice.finish_reason or "", "completed")
        deltas = Delta(reasoning=message.reasoning), Delta(content=message.content or ""), Delta(tool_calls=calls)
        for delta in deltas:
            list(self._items.add(delta, entries if delta.content else []))
        list(self._items.finish(self._status))
        return self._response(self._status, whole.usage)

    def _response(self, status: str, usage: Usage | None = None, error: ApiError | None = None) -> Response:
        asked = self._asked
        text_format = asked.text.format if asked.text and asked.text.format else TextFormat("text")
        return Response(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=self._items.items,
            usage=None if usage is None else _usage(usage),
            error=None if error is None else {"code": "server_error", "message": error.message},
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=asked.temperature,
            text={"format": text_format},
            tool_choice=asked.tool_choice or "auto",
            tools=asked.tools or [],
            top_p=asked.top_p,
            metrics=UNSET if usage is None else self.usage.metrics(),
        )

    # A stream

    def translate(self, chunk: ChatChunk) -> Iterator[bytes]:
        [choice] = chunk.choices
        if not self._num_events:
            yield self._event("created", response=self._response("in_progress"))
            yield self._event("in_progress", response=self._response("in_progress"))
        for kind, fields in self._items.add(choice.delta, _entries(choice.logprobs)):
            yield self._event(kind, **fields)
        if choice.finish_reason is not None:
            self._status = STATUS.get(choice.finish_reason, "completed")
            for kind, fields in self._items.finish(self._status):
                yield self._event(kind, **fields)

    def last_events(self, usage: Usage) -> bytes:
        return self._event(self._status, response=self._response(self._status, usage))

    def failure_events(self, error: ApiError) -> bytes:
        return self._event("failed", response=self._response("failed", error=error))

    def _event(self, kind: str, **fields: Any) -> bytes:
        named = {"type": f"response.{kind}", "sequence_number": self._num_events} | fields
        self._num_events += 1
        return named_event(f"response.{kind}", named)


def _entries(logprobs: ChatLogprobs | None) -> list[TokenLogprob]:
    return [] if logprobs is None else logprobs.content


def _usage(usage: Usage) -> ResponsesUsage:
    details = usage.completion_tokens_details
    return ResponsesUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(0) if details is UNSET else OutputDetails(0, *msgspec.structs.astuple(details)),
        usage.total_tokens,
    )


# The chat request that it means


def chat_body(asked: ResponsesRequest) -> dict[str, Any]:
    """A request as the body of the chat request that it means. ApiError 400 for what potstill does not do."""
    for name, instead in UNSUPPORTED.items():
        if getattr(asked, name) is not None:
            text = f"{name} is not supported: {instead}"
            raise ApiError(400, text, code="unsupported_parameter", param=name)
    wants_logprobs = LOGPROBS in (asked.include or ())
    if asked.top_logprobs is not None and not wants_logprobs:
        raise invalid(f'top_logprobs needs include: ["{LOGPROBS}"]', "top_logprobs")
    body = {
        "messages": chat_messages(asked),
        "max_completion_tokens": asked.max_output_tokens,
        "stop": asked.stop,
        "response_format": _response_format(asked),
        "verbosity": asked.text.verbosity if asked.text else None,
        "tools": [_chat_tool(tool) for tool in asked.tools or ()] or None,
        "tool_choice": _tool_choice(asked.tool_choice) if asked.tools else None,
        "parallel_tool_calls": asked.parallel_tool_calls if asked.tools else None,
        "logprobs": wants_logprobs or None,
        "top_logprobs": asked.top_logprobs,
    }
    return asked.carried() | {name: value for name, value in body.items() if value is not None}


def chat_messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions and items as messages; calls join the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for number, item in enumerate(asked.input):
        _check_item(item, f"input[{number}]")
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _chat_content(item.output)})
        elif item.type == "message" and item.role != "assistant":
            messages.append({"role": item.role, "content": _chat_content(item.content)})
        else:
            _add_to_assistant(messages, item)
    return messages


def _add_to_assistant(messages: list[dict[str, Any]], item: InputItem) -> None:
    """An answer's items, which are thoughts, then words, then calls, make up one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    if not last or (item.type != "function_call" and (item.type == "reasoning" or last["content"] is not None)):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    if item.type == "reasoning":
        last["reasoning"] = _plain_text(item.content)
    elif item.type == "message":
        last["content"] = _chat_content(item.content)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})


def _plain_text(content: Content | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


NEEDED = {
    "message": ("role", "content"),
    "reasoning": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""What an item of each type must have; it has none of what the others need."""


def _check_item(item: InputItem, where: str) -> None:
    needed = NEEDED[item.type]
    for name in ("role", "content", "call_id", "name", "arguments", "output"):
        is_given = getattr(item, name) is not None
        if name in needed and not is_given:
            raise invalid(f"{where}.{name} is required in an item of type {item.type}", where)
        if is_given and name not in needed:
            raise invalid(f"{where}.{name} does not belong into an item of type {item.type}", where)


def _chat_content(content: Content | None) -> str | list[dict[str, str]] | None:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """A named function, as chat has it, is one level deeper."""
    if isinstance(choice, dict) and choice.get("type") == "function" and choice.keys() == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(asked: ResponsesRequest) -> dict[str, Any] | None:
    wanted = None if asked.text is None else asked.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    fields = msgspec.to_builtins(wanted)
    del fields["type"]
    return {"type": "json_schema", "json_schema": fields}
