"""The fields of OpenAI's requests, with vLLM's extras: types and bounds alone; `serve/http/protocol.py` reads them.

`null` means "not given" wherever a field is optional. Bounds keep one legal-looking request from holding the engine:
they are checked before any work is done.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serve.sampling_params import MAX_SEED

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
