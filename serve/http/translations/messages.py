"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol, on the path of chat.

An assistant's message at the end of a conversation is the beginning of the answer, which goes on from there.
Source: https://docs.anthropic.com/en/api/messages
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serve.http.chat import conversation_ids, tools_used
from serve.http.errors import ApiError, invalid
from serve.http.generation import Service
from serve.http.requests import ShortText
from serve.http.responses import AssistantMessage, ChatChunk, ChatCompletion, ResponseMetrics, Usage, encoder
from serve.http.translations.base import Extras, Translation, call_input, chat_request, named_event, said

NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""What chat calls otherwise."""
ENDS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""What Anthropic calls finish reasons that have but one meaning."""
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Where a prefix ends that will come again; prefixes are found without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """A part of a message."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text"):
    text: str
    citations: list[dict[str, Any]] | None = None


class ToolUseBlock(Block, tag="tool_use"):
    id: ShortText
    name: ShortText
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ThinkingBlock(Block, tag="thinking"):
    """What an assistant thought before; nothing here is signed."""

    thinking: str
    signature: str | None = None


class ToolResultBlock(Block, tag="tool_result"):
    tool_use_id: ShortText
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    """No template knows of errors: the content says it."""


AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: ShortText
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model calls, and what."""

    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model thinks before it answers; how long it may, cannot be said."""

    type: Literal["disabled", "adaptive"]


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the text must be; no effort can be chosen."""

    format: JsonFormat | None = None


class RequestMetadata(msgspec.Struct, forbid_unknown_fields=True):
    """A label of the end user, without effect."""

    user_id: ShortText | None = None


class CountTokensRequest(Extras, kw_only=True):
    """POST /v1/messages/count_tokens, and what both requests share."""

    null_depths: ClassVar = {"messages": 2, "tools": 1}
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    metadata: RequestMetadata | None = None


class AnthropicUsage(msgspec.Struct, frozen=True):
    """Tokens; `input_tokens` are those that were not found in the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class OutputPart(msgspec.Struct, frozen=True, tag_field="type"):
    """A part of an answer; while it is streamed it begins without content."""


class OutputText(OutputPart, frozen=True, tag="text"):
    text: str = ""


class OutputThinking(OutputPart, frozen=True, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class OutputToolUse(OutputPart, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


OutputBlock = OutputText | OutputThinking | OutputToolUse


class AnthropicMessage(msgspec.Struct, frozen=True):
    """A whole answer, or its beginning in a stream."""

    id: str
    model: str
    content: list[OutputBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    metrics: ResponseMetrics | UnsetType = UNSET
    """As chat has them."""
    role: str = "assistant"
    type: str = "message"


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessagesReply(Translation):
    """One request to /v1/messages."""

    id_prefix = "msg"
    named_call_end = "tool_calls"

    def __init__(self, asked: MessagesRequest, service: Service) -> None:
        own = {"max_tokens": asked.max_tokens, "stop": asked.stop_sequences or None}
        super().__init__(chat_body(asked) | own, NAMES, service)
        self._has_started = False
        self._num_blocks = 0
        self._open: type[OutputBlock] | None = None
        """Of what type the block is that is being streamed, the last of them."""
        self._end: dict[str, str | None] = {}

    def translate_whole(self, whole: ChatCompletion) -> AnthropicMessage:
        [choice] = whole.choices
        end = _end(choice.finish_reason, choice.stop_reason)
        return self._message(_blocks(choice.message), whole.usage, **end)

    def _message(
        self, content: list[OutputBlock], usage: Usage, stop_reason: str | None = None, stop_sequence: str | None = None
    ) -> AnthropicMessage:
        metrics = self.usage.metrics()
        return AnthropicMessage(self.id, self.model, content, stop_reason, stop_sequence, _usage(usage), metrics)

    # A stream

    def translate(self, chunk: ChatChunk) -> Iterator[bytes]:
        [choice] = chunk.choices
        if not self._has_started:
            self._has_started = True
            yield _event("message_start", message=self._message([], self.usage.total(self.speculates)))
        if thoughts := said(choice.delta.reasoning):
            yield from self._begin(OutputThinking())
            yield self._delta("thinking_delta", thinking=thoughts)
        if text := said(choice.delta.content):
            yield from self._begin(OutputText())
            yield self._delta("text_delta", text=text)
        for call in choice.delta.tool_calls or ():
            if call.id:
                yield from self._begin(OutputToolUse(said(call.id), said(call.function.name)))
            if arguments := said(call.function.arguments):
                yield self._delta("input_json_delta", partial_json=arguments)
        if choice.finish_reason is not None:
            stop_reason = None if choice.stop_reason is msgspec.UNSET else choice.stop_reason
            self._end = _end(choice.finish_reason, stop_reason)

    def last_events(self, usage: Usage) -> bytes:
        closing = b"".join(self._close())
        metrics = {} if (found := self.usage.metrics()) is UNSET else {"metrics": found}
        end = _event("message_delta", delta=self._end, usage=_usage(usage), **metrics)
        return closing + end + _event("message_stop")

    def _begin(self, block: OutputBlock) -> Iterator[bytes]:
        """Begins a block, unless the one that is open goes on; every call has its own."""
        if self._open is type(block) and not isinstance(block, OutputToolUse):
            return
        yield from self._close()
        self._open = type(block)
        yield _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta={"type": kind} | fields)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._num_blocks)
            self._open = None
            self._num_blocks += 1

    def failure_events(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind} | fields)


def _blocks(message: AssistantMessage) -> list[OutputBlock]:
    blocks: list[OutputBlock] = [OutputThinking(message.reasoning)] if message.reasoning else []
    if message.content:
        blocks.append(OutputText(message.content))
    calls = [OutputToolUse(call.id, call.function.name, call_input(call)) for call in message.tool_calls or ()]
    return [*blocks, *calls]


def _end(finish_reason: str | None, stop_reason: Any) -> dict[str, str | None]:
    """Why an answer ended, in Anthropic's words."""
    if finish_reason in ENDS:
        return {"stop_reason": ENDS[finish_reason], "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> AnthropicUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return AnthropicUsage(usage.prompt_tokens - cached, cached, usage.completion_tokens)


def error_body(error: ApiError) -> bytes:
    """An error as Anthropic's clients read it."""
    detail = {"type": ERROR_TYPES.get(error.status, "invalid_request_error"), "message": error.message}
    return encoder.encode({"type": "error", "error": detail})


def count_tokens(asked: CountTokensRequest, service: Service) -> TokenCount:
    """How many tokens a conversation has as a prompt. ApiError 400 where it could not be one."""
    chat = chat_request(chat_body(asked), NAMES, service.options)
    use = tools_used(chat, service.formats)
    ids = conversation_ids(
        service.tokenizer,
        chat.messages if use is None else use.conversation(chat.messages),
        tools=None if use is None else use.shown,
        arguments=chat.chat_template_kwargs,
        add_generation_prompt=None,
        continue_final_message=bool(chat.continue_final_message),
    )
    return TokenCount(len(ids))


# The chat request that it means


def chat_body(asked: CountTokensRequest) -> dict[str, Any]:
    """A request as the body of the chat request that it means."""
    messages = [{"role": "system", "content": _chat_content(asked.system)}] if asked.system else []
    for number, message in enumerate(asked.messages):
        messages += _chat_messages(message, f"messages[{number}]")
    body = asked.carried() | {"messages": messages}
    if messages[-1]["role"] == "assistant":
        body["continue_final_message"] = True
    if asked.tools:
        body["tools"] = [_chat_tool(tool) for tool in asked.tools]
    if asked.tools and asked.tool_choice is not None:
        body |= _tool_choice(asked.tool_choice)
    if asked.output_config and asked.output_config.format:
        schema = {"schema": asked.output_config.format.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if asked.thinking is not None:
        thinks = asked.thinking.type != "disabled"
        body["chat_template_kwargs"] = body.get("chat_template_kwargs", {}) | {"enable_thinking": thinks}
    if asked.service_tier == "standard_only":
        body["service_tier"] = "default"
    return body


def _chat_content(content: str | list[TextBlock] | None) -> str | list[dict[str, str]]:
    if not isinstance(content, list):
        return content or ""
    return [{"type": "text", "text": block.text} for block in content]


def _chat_messages(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """What comes of calls are messages of their own, before the rest of the user's."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    if (calls or thoughts) and message.role != "assistant":
        raise invalid(f"{where}: only an assistant's message holds tool_use and thinking", where)
    if results and message.role != "user":
        raise invalid(f"{where}: only a user's message holds tool_result", where)
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": result.tool_use_id, "content": _chat_content(result.content)}
        for result in results
    ]
    if texts or not results:
        messages.append({"role": message.role, "content": _chat_content(texts)})
    if thoughts:
        messages[-1]["reasoning"] = "\n".join(thoughts)
    if calls:
        messages[-1]["tool_calls"] = [_chat_call(call) for call in calls]
    return messages


def _chat_call(call: ToolUseBlock) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": encoder.encode(call.input).decode()}}


def _chat_tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    """The fields of chat that say the same."""
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid('tool_choice has a name exactly when its type is "tool"', "tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields
