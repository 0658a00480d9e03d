"""POST /v1/embeddings: hidden states of prompts, pooled and of length one, on the path of completions.

The engine computes the prompts among everything else, in chunks, and draws one token behind each, which is dropped.
Source: https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
import math
import sys
from array import array
from dataclasses import replace
from typing import Any, Literal

import msgspec

from serve.http.completions import CompletionReply
from serve.http.errors import ApiError
from serve.http.generation import Service
from serve.http.requests import CompletionRequest, ShortText, TokenId
from serve.http.responses import Usage, encoder
from serve.http.translations.base import meant_request
from serve.outputs import RequestOutput
from serve.sampling_params import Pooling, SamplingParams

NAMES = {"prompt": "input", "prompts": "inputs"}
"""What completions call otherwise."""
CARRIED = (
    *("model", "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "cache_salt"),
    *("priority", "service_tier", "deadline_s"),
)


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/embeddings; the input has the forms of a prompt."""

    input: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: ShortText | None = None
    pooling: Pooling | None = None
    """potstill: the mean of all tokens' hidden states, unless given, or the last token's."""
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None


class Embedding(msgspec.Struct, frozen=True):
    """One input's vector: numbers, or base64 of little-endian fp32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingsUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: str = "list"


class EmbeddingsReply(CompletionReply):
    """One request to /v1/embeddings."""

    id_prefix = "embd"

    def __init__(self, asked: EmbeddingsRequest, service: Service) -> None:
        if asked.dimensions is not None:
            text = "dimensions is not supported: embeddings are as wide as the model's hidden states"
            raise ApiError(400, text, code="unsupported_parameter", param="dimensions")
        super().__init__(meant_request(completion_body(asked), CompletionRequest, NAMES, service.options), service)
        self._asked = asked
        self.vectors: dict[int, list[float]] = {}
        """By prompt, not normalised."""

    def params(self, room: int) -> SamplingParams:
        return replace(super().params(room), pooling=self._asked.pooling or "mean")

    def received(self, output: RequestOutput) -> RequestOutput:
        return replace(output, num_output_tokens=0)

    def collect(self, prompt_index: int, output: RequestOutput) -> None:
        if output.embedding is not None:
            self.vectors[prompt_index] = output.embedding

    def response(self, usage: Usage) -> bytes:
        data = [Embedding(index, self._written(vector)) for index, vector in sorted(self.vectors.items())]
        return encoder.encode(Embeddings(data, self.model, EmbeddingsUsage(usage.prompt_tokens, usage.total_tokens)))

    def _written(self, vector: list[float]) -> list[float] | str:
        vector = normalized(vector)
        return base64_floats(vector) if self._asked.encoding_format == "base64" else vector


def completion_body(asked: EmbeddingsRequest) -> dict[str, Any]:
    """A request as the body of the request to /v1/completions that computes the same prompts."""
    given = {name: getattr(asked, name) for name in CARRIED}
    carried = {name: value for name, value in given.items() if value is not None}
    return carried | {"prompt": asked.input, "max_tokens": 1}


def normalized(vector: list[float]) -> list[float]:
    """The vector at length one; zeros stay zeros."""
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]


def base64_floats(vector: list[float]) -> str:
    """The vector as base64 of little-endian fp32."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
