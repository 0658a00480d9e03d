"""The fields of OpenAI's requests, with vLLM's extras: types and bounds alone; `serve/http/protocol.py` reads them.

`null` means "not given" wherever a field is optional. Bounds keep one legal-looking request from holding the engine:
they are checked before any work is done.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serve.sampling_params import MAX_SEED

MAX_LOGIT_BIAS = 300
MAX_STOP_BYTES = 1024
MAX_BAD_WORDS = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 128
TOOL_VARIABLES = ("tools", "xml_tools")
"""What chat templates call the tools; the second is SmolLM3's."""
MAX_DEADLINE_S = 3600.0

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
SomeText = Annotated[str, Meta(min_length=1)]
ShortText = Annotated[str, Meta(max_length=512)]
JsonSchema = dict[str, Any] | bool
Choices = Annotated[list[str], Meta(min_length=1)]
GRAMMAR_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "guided_whitespace_pattern",
)
"""What says in a request what the output must be."""
Labels = Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)]


def only(*values: Any, because: str) -> Meta:
    """Marks a field that takes these values alone, those that ask for nothing; `because` ends the refusal of others."""
    schema = {"enum": list(values), "description": f"The only value taken: {because}."}
    return Meta(extra_json_schema=schema, extra={"only": values, "because": because})


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM: usage so far in every chunk."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema of a response format; name and description are labels."""

    schema: JsonSchema
    name: ShortText | None = None
    description: str | None = None
    strict: bool | None = None
    """It is always kept to."""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI: what the output must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM: what the output must be, said by exactly one of the first five."""

    json: str | JsonSchema | None = None
    """A JSON schema, as an object or as its text."""
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    """Context-free: in Lark, or in GBNF."""
    json_object: Literal[True] | None = None
    whitespace_pattern: str | None = None
    """Of JSON: a regular expression of what may stand between its parts."""
    disable_any_whitespace: bool | None = None
    """Of JSON: nothing may."""
    disable_fallback: bool | None = None
    """There is one library, and no other to fall back to."""


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions and chat share."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 keep all tokens."""
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: SomeText | list[SomeText] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    """vLLM: let the text end behind the stop string, or the token, that ended it."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    """vLLM: only these tokens may be written."""
    bad_words: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(max_length=MAX_BAD_WORDS)] | None
    ) = None
    """vLLM: words that may not be written, as the tokenizer spells them."""
    skip_special_tokens: bool | None = None
    """vLLM: leave control tokens out of the text; true."""
    spaces_between_special_tokens: bool | None = None
    """vLLM: takes effect in slow tokenizers, of which there are none here: both values mean the same."""
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """OpenAI's newer name of max_tokens."""
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Count | None = None
    """vLLM: of each prompt token and of this many most probable ones at its place, by token id; not in a stream."""
    return_token_ids: bool | None = None
    """vLLM: `prompt_token_ids` and `token_ids` beside the text."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """vLLM: keep at most this many tokens of a prompt; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """vLLM: where truncate_prompt_tokens takes tokens away; left."""
    n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """OpenAI, earlier: how many choices are made to choose n from; 1, or n."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    """vLLM, earlier: the fields of structured_outputs, one by one."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Lower runs earlier; 0 unless given."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)] | None = None
    """potstill: seconds from arrival after which the request is given up with 504."""
    user: ShortText | None = None
    """OpenAI: a label for the end user. Labels have no effect and are not recorded."""
    safety_identifier: ShortText | None = None
    """OpenAI: the newer name of user."""
    metadata: Labels | None = None
    """OpenAI: further labels."""
    prompt_cache_key: ShortText | None = None
    """OpenAI: a label of requests that begin alike; prefixes are found without it."""
    store: bool | None = None
    """OpenAI: whether prompt and answer may be stored, for distillation alone. True is taken only from those whom the
    server's operator has named in --label-consent, whose requests are stored unless they say false."""
    service_tier: ShortText | None = None
    """OpenAI: auto, default, or a class of requests that the server's operator has given the API key."""
    use_beam_search: Annotated[bool, only(False, because="there is no beam search")] | None = None
    length_penalty: Annotated[float, only(1.0, because="there is no beam search")] | None = None
    early_stopping: Annotated[bool, only(False, because="there is no beam search")] | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    suffix: Annotated[str, only("", because="potstill does not fill in the middle")] | None = None
    logprobs: Count | None = None
    add_special_tokens: bool | None = None
    """vLLM: put the tokenizer's own special tokens (often a beginning-of-sequence) before a text prompt; true."""


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A content part; potstill's models read text only."""

    type: Literal["text"]
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
    reasoning: str | None = None
    reasoning_content: str | None = None
    """What an assistant thought, by vLLM's newer and its older name; templates see it by both."""
    annotations: list[dict[str, Any]] | None = None
    """OpenAI: sources of an assistant's words; no template reads them."""
    parsed: Any = None
    """What a client made of the content, which says the same; no template reads it."""
    type: Literal["text"] | None = None
    """lm-eval marks its messages so; it says nothing new."""


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A function the model may call; `parameters` is the JSON schema of its arguments."""

    name: ShortText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One entry of `tools`; templates show it in this order."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name of one of the tools."""

    name: ShortText


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The function that is to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatTemplateArguments(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The arguments that a request may hand to the chat template: a closed list, since templates are programs."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    tools_in_user_message: bool | None = None
    date_string: Annotated[str, Meta(max_length=64)] | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    """What the model may call; shown to it unless tool_choice is "none"."""
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """OpenAI: whether one answer may hold several calls."""
    functions: Annotated[list[dict[str, Any]], only([], because="use tools")] | None = None
    function_call: Annotated[str, only("auto", "none", because="use tool_choice")] | None = None
    modalities: Annotated[list[str], only(["text"], because="potstill writes text")] | None = None
    verbosity: Annotated[str, only("medium", because="no model here knows another")] | None = None
    documents: Annotated[list[dict[str, Any]], only([], because="put them into a message")] | None = None
    echo: Annotated[bool, only(False, because="potstill does not repeat the last message")] | None = None
    add_special_tokens: Annotated[bool, only(False, because="the template writes them")] | None = None
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
