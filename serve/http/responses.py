"""OpenAI's responses, whole and in chunks. Fields that may be null are always present; UNSET ones are left out."""

import msgspec
from msgspec import UNSET, UnsetType

from serve.http.requests import ToolCall


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache."""


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """How the draft did: tokens it proposed that the target accepted, and that it rejected."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens read and written; each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only from a server that speculates."""


class SpeculativeDecoding(msgspec.Struct, frozen=True):
    """vLLM's: how the draft did, place by place, in all choices of a request together."""

    mean_acceptance_length: float
    """Tokens that a verification brought, the target's own included."""
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    """At place j: verifications that accepted exactly j draft tokens."""
    num_spec_steps: int
    """Verifications of at least one draft token."""
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """Of the longest draft."""


class ResponseMetrics(msgspec.Struct, frozen=True):
    """What vLLM reports of a request beside its usage."""

    speculative_decoding: SpeculativeDecoding


class LegacyLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of /v1/completions: parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in the choice's text, in characters."""
    drafted: list[bool] | UnsetType = UNSET
    """True where the draft proposed the token; only from a server that speculates."""


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probabilities of /v1/chat/completions: one object a token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]
    drafted: bool | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's: of one token at one place of a prompt."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    decoded_token: str


class CompletionChoice(msgspec.Struct, frozen=True):
    """A choice of a whole completion, or its part in a chunk."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    """Of each prompt token, by token id, where that was asked for; of the first there are none."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    """Both where return_token_ids asks for them; of a stream, the prompt's come with the first chunk."""


class Completion(msgspec.Struct, frozen=True):
    """A whole completion, or a chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    """With the last usage, where draft tokens were verified."""
    object: str = "text_completion"


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str | None
    """null where there is nothing but tool calls or thoughts."""
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same as reasoning, by the name that vLLM had for it before."""


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    object: str = "chat.completion"


class FunctionDelta(msgspec.Struct, frozen=True):
    """The next part of a call: first its name, then pieces of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A part of the call number `index` of an answer; id and type come with the first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    object: str = "chat.completion.chunk"


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of /v1/models: the model, or an adapter of it."""

    id: str
    created: int
    max_model_len: int
    root: str
    """The model's first name; the folder of an adapter."""
    parent: str | None = None
    """Of an adapter, the model's first name."""
    owned_by: str = "potstill"
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


encoder = msgspec.json.Encoder()


DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
