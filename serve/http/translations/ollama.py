"""Ollama's protocol on the path of chat: /api/chat and /api/generate, in lines of JSON where they stream.

What only says how Ollama would run a model (threads, memory, how long it stays) changes no answer and is taken.
Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serve.http.errors import ApiError, invalid
from serve.http.generation import Service
from serve.http.protocol import check_only
from serve.http.requests import Count, ShortText, Tool, ToolCall, only
from serve.http.responses import (
    AssistantMessage,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    ResponseMetrics,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    encoder,
)
from serve.http.tools.answer import message_of
from serve.http.translations.base import Translation, call_input, said
from serve.outputs import RequestOutput

SAME = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
"""Options that chat calls as Ollama does."""
CARRIED = ("model", "logprobs", "top_logprobs", "priority", "service_tier", "deadline_s")
"""Likewise, beside the options."""
NAMES = {name: f"options.{name}" for name in SAME} | {
    "repetition_penalty": "options.repeat_penalty",
    "max_completion_tokens": "options.num_predict",
    "response_format": "format",
}
"""What chat calls otherwise, or has elsewhere."""

NoImages = Annotated[list[str], only([], because="the models here read text")]


class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How to sample; what comes last only says how Ollama would run the model."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    """Most tokens of the answer; -1 and -2: until it ends or the context is full."""
    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    """At most the context that is served, all of which a request may use."""
    repeat_last_n: Annotated[int, only(-1, because="repeat_penalty sees the whole text")] | None = None
    penalize_newline: Annotated[bool, only(True, because="repeat_penalty sees all tokens")] | None = None
    typical_p: Annotated[float, only(1.0, because="use top_p or min_p")] | None = None
    tfs_z: Annotated[float, only(1.0, because="use top_p or min_p")] | None = None
    mirostat: Annotated[int, only(0, because="use top_p or min_p")] | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    numa: bool | None = None


class OllamaRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both requests share."""

    model: str
    stream: bool | None = None
    """True unless given."""
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    """JSON, or JSON of this schema."""
    think: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    keep_alive: float | str | None = None
    """The model is always kept."""
    priority: int | None = None
    service_tier: str | None = None
    deadline_s: float | None = None
    """potstill: these three as in chat."""


class OllamaFunction(msgspec.Struct, forbid_unknown_fields=True):
    """What an assistant called."""

    name: ShortText
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(msgspec.Struct, forbid_unknown_fields=True):
    """One call of an assistant's message."""

    function: OllamaFunction
    id: ShortText | None = None
    type: Literal["function"] | None = None


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: ShortText | None = None
    tool_call_id: ShortText | None = None
    thinking: str | None = None
    images: NoImages | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class GenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: Annotated[bool, only(False, because="send a prompt without template to /v1/completions")] | None = None
    template: Annotated[str, only("", because="the server's operator gives one by --chat-template")] | None = None
    suffix: Annotated[str, only("", because="potstill does not fill in the middle")] | None = None
    context: Annotated[list[int], only([], because="no conversation is kept; use /api/chat")] | None = None
    images: NoImages | None = None


class OllamaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a stream, or the whole answer; durations are in nanoseconds."""

    model: str
    created_at: str
    message: dict[str, Any] | UnsetType = UNSET
    """In an answer to /api/chat."""
    response: str | UnsetType = UNSET
    """In an answer to /api/generate."""
    thinking: str | UnsetType = UNSET
    """In an answer to /api/generate; one to /api/chat has it in the message."""
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    """As chat has them."""


class OllamaReply(Translation):
    """One request to /api/chat or /api/generate."""

    id_prefix = "ollama"
    stream_type = b"application/x-ndjson"

    def __init__(self, asked: OllamaChatRequest | GenerateRequest, service: Service) -> None:
        check_context(asked.options, service)
        super().__init__(chat_body(asked), NAMES, service)
        self._is_chat = isinstance(asked, OllamaChatRequest)
        self._began_ns = time.monotonic_ns()
        self._first_ns: int | None = None
        self._reason = "stop"
        self._calls: list[ToolCallDelta] = []
        """Parts of calls, which are sent when all is said."""

    def received(self, output: RequestOutput) -> RequestOutput:
        self._first_ns = self._first_ns or time.monotonic_ns()
        return output

    def translate_whole(self, whole: ChatCompletion) -> OllamaAnswer:
        [choice] = whole.choices
        done = self._done(whole.usage, choice.finish_reason or "stop")
        return self._answer(choice.message, choice.logprobs, done)

    def translate(self, chunk: ChatChunk) -> Iterator[bytes]:
        [choice] = chunk.choices
        text, thoughts = said(choice.delta.content), choice.delta.reasoning
        self._calls += choice.delta.tool_calls or ()
        if text or thoughts or choice.logprobs is not None:
            yield _line(self._answer(AssistantMessage(text, reasoning=thoughts), choice.logprobs))
        self._reason = choice.finish_reason or self._reason

    def last_events(self, usage: Usage) -> bytes:
        calls = _line(self._answer(message_of([Delta(tool_calls=self._calls)]), None)) if self._calls else b""
        return calls + _line(self._answer(AssistantMessage(""), None, self._done(usage, self._reason)))

    def failure_events(self, error: ApiError) -> bytes:
        return error_body(error) + b"\n"

    def _answer(
        self, message: AssistantMessage, logprobs: ChatLogprobs | None, done: dict[str, Any] | None = None
    ) -> OllamaAnswer:
        text = message.content or ""
        thoughts = {"thinking": message.reasoning} if message.reasoning else {}
        own: dict[str, Any] = {"response": text} | thoughts
        if self._is_chat:
            calls = [_call(call) for call in message.tool_calls or ()]
            called = {"tool_calls": calls} if calls else {}
            own = {"message": {"role": "assistant", "content": text} | thoughts | called}
        entries = UNSET if logprobs is None else logprobs.content
        return OllamaAnswer(model=self.model, created_at=now(), logprobs=entries, **own, **(done or {}))

    def _done(self, usage: Usage, reason: str) -> dict[str, Any]:
        """What ends an answer."""
        ended_ns = time.monotonic_ns()
        first_ns = self._first_ns or ended_ns
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": ended_ns - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first_ns - self._began_ns,
            "eval_count": usage.completion_tokens,
            "eval_duration": ended_ns - first_ns,
            "metrics": self.usage.metrics(),
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.function.name, "arguments": call_input(call)}}


def _line(answer: OllamaAnswer) -> bytes:
    return encoder.encode(answer) + b"\n"


def error_body(error: ApiError) -> bytes:
    """An error as Ollama's clients read it."""
    return encoder.encode({"error": error.message})


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(asked: OllamaChatRequest | GenerateRequest) -> OllamaAnswer | None:
    """The answer to a request that says nothing, by which clients load a model; None for others."""
    if isinstance(asked, OllamaChatRequest):
        own: dict[str, Any] = {"message": {"role": "assistant", "content": ""}}
        is_empty = not asked.messages
    else:
        own, is_empty = {"response": ""}, not asked.prompt
    if not is_empty:
        return None
    return OllamaAnswer(model=asked.model, created_at=now(), done=True, done_reason="load", **own)


# The chat request that it means


def check_context(options: OllamaOptions | None, service: Service) -> None:
    """ApiError 400 for a context that is longer than what is served."""
    info = service.engine.info
    wanted = options.num_ctx if options else None
    if wanted is not None and info is not None and wanted > info.max_model_len:
        text = f"options.num_ctx is {wanted}, but this model's context length is {info.max_model_len} tokens"
        raise invalid(text, "options.num_ctx")


def chat_body(asked: OllamaChatRequest | GenerateRequest) -> dict[str, Any]:
    """A request as the body of the chat request that it means. ApiError 400 for what potstill does not do."""
    options = asked.options or OllamaOptions()
    check_only(options, "options.")
    if options.num_predict == 0:
        raise invalid("options.num_predict must be at least 1, or negative for no limit", "options.num_predict")
    body: dict[str, Any] = {name: getattr(options, name) for name in SAME}
    body |= {name: getattr(asked, name) for name in CARRIED} | {
        "messages": _messages(asked),
        "stream": asked.stream is not False,
        "repetition_penalty": options.repeat_penalty,
        "max_completion_tokens": options.num_predict if (options.num_predict or -1) > 0 else None,
        "response_format": _response_format(asked.format),
        "chat_template_kwargs": None if asked.think is None else {"enable_thinking": asked.think},
    }
    if isinstance(asked, OllamaChatRequest) and asked.tools:
        body["tools"] = [msgspec.to_builtins(tool) for tool in asked.tools]
    return {name: value for name, value in body.items() if value is not None}


def _messages(asked: OllamaChatRequest | GenerateRequest) -> list[dict[str, Any]]:
    if isinstance(asked, OllamaChatRequest):
        return [_chat_message(message, f"messages[{number}].") for number, message in enumerate(asked.messages or ())]
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    return [*system, {"role": "user", "content": asked.prompt}]


def _chat_message(message: OllamaMessage, where: str) -> dict[str, Any]:
    check_only(message, where)
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    chat |= {"name": message.tool_name, "tool_call_id": message.tool_call_id, "reasoning": message.thinking}
    if message.tool_calls:
        chat["tool_calls"] = [_chat_call(call, number) for number, call in enumerate(message.tool_calls)]
    return chat


def _chat_call(call: OllamaCall, number: int) -> dict[str, Any]:
    arguments = encoder.encode(call.function.arguments).decode()
    return {"id": call.id or f"call-{number}", "function": {"name": call.function.name, "arguments": arguments}}


def _response_format(wanted: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(wanted, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}
    return {"type": "json_object"} if wanted else None
