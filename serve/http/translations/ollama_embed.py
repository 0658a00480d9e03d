"""POST /api/embed: what /v1/embeddings computes, as Ollama's clients ask for it and read it."""

import time

import msgspec

from serve.http.generation import Service
from serve.http.responses import Usage, encoder
from serve.http.translations.embeddings import EmbeddingsReply, EmbeddingsRequest, normalized
from serve.http.translations.ollama import OllamaOptions, check_context


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /api/embed."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    """False refuses a text that is longer than the context; else its end is left out."""
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class Embedded(msgspec.Struct, frozen=True):
    """Unit vectors in the order of the input; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class EmbedReply(EmbeddingsReply):
    """One request to /api/embed."""

    id_prefix = "ollama"

    def __init__(self, asked: EmbedRequest, service: Service) -> None:
        check_context(asked.options, service)
        most, side = (None, None) if asked.truncate is False else (-1, "right")
        meant = {"input": asked.input, "model": asked.model, "dimensions": asked.dimensions}
        meant |= {"truncate_prompt_tokens": most, "truncation_side": side}
        super().__init__(msgspec.convert(meant, EmbeddingsRequest), service)
        self._began_ns = time.monotonic_ns()

    def response(self, usage: Usage) -> bytes:
        vectors = [normalized(vector) for _, vector in sorted(self.vectors.items())]
        took_ns = time.monotonic_ns() - self._began_ns
        return encoder.encode(Embedded(self.model, vectors, took_ns, usage.prompt_tokens))
