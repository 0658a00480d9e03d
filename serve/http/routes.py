"""The HTTP routes of one server, each a few lines: read the body, check it, hand over."""

import asyncio
import logging
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from kernels import __version__
from serve.http.adapters import LoadLoraAdapterRequest, UnloadLoraAdapterRequest, load_adapter
from serve.http.chat import ChatReply, conversation_ids
from serve.http.completions import CompletionReply
from serve.http.docs import docs_page
from serve.http.engine_client import EngineClient
from serve.http.errors import ApiError, invalid, unavailable
from serve.http.generation import GenerationResponse, Reply, Service, token_text
from serve.http.load import load_of
from serve.http.openapi import openapi_document, operation
from serve.http.options import RequestLimits
from serve.http.page import page_routes
from serve.http.protocol import AnyRequest, loads_object, read
from serve.http.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve.http.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
    encoder,
)
from serve.http.translations import messages, ollama, ollama_models
from serve.http.translations.embeddings import Embeddings, EmbeddingsReply, EmbeddingsRequest
from serve.http.translations.messages import (
    AnthropicMessage,
    CountTokensRequest,
    MessagesReply,
    MessagesRequest,
    TokenCount,
)
from serve.http.translations.ollama import GenerateRequest, OllamaAnswer, OllamaChatRequest, OllamaReply
from serve.http.translations.ollama_embed import Embedded, EmbedReply, EmbedRequest
from serve.http.translations.responses import Response as ResponsesBody
from serve.http.translations.responses import ResponsesReply, ResponsesRequest
from serve.messages import Ready

INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread."""
BODY_S = 30.0
"""How long a client may take to send its body."""
FRESH_STATS_S = 0.5
"""How long a scrape waits for the engine's newest numbers before it takes those at hand."""
Wanted = TypeVar("Wanted", bound=msgspec.Struct)
log = logging.getLogger("potstill.server")


class Routes:
    """The endpoints, bound to what they share."""

    error_bodies: ClassVar = {"/v1/messages": messages.error_body, "/api/": ollama.error_body}
    """How errors look below a path, where that is not OpenAI's way."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.router = Router(
            [
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
                Route("/v1/messages", self.messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
                Route("/api/chat", self.ollama_chat, methods=["POST"]),
                Route("/api/generate", self.ollama_generate, methods=["POST"]),
                Route("/api/embed", self.ollama_embed, methods=["POST"]),
                Route("/api/tags", self.ollama_tags),
                Route("/api/show", self.ollama_show, methods=["POST"]),
                Route("/api/version", self.version),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health", self.health),
                Route("/ping", self.health, methods=["GET", "POST"]),
                Route("/metrics", self.metrics),
                Route("/version", self.version),
                Route("/load", self.load),
                Route("/openapi.json", self.openapi),
                Route("/docs", self.docs),
                Route("/v1/load_lora_adapter", self.load_lora_adapter, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload_lora_adapter, methods=["POST"]),
                *page_routes(),
            ],
            redirect_slashes=False,
        )

    @property
    def paths(self) -> list[str]:
        """Paths without parameters: what logs and labels may show."""
        return [route.path for route in self.router.routes if isinstance(route, Route) and "{" not in route.path]

    async def _read(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        """A route's request. A large body is parsed in a thread, so that it holds nobody up."""
        limits = self._service.options
        body = await read_body(request, limits.max_body_bytes)
        large = len(body) > INLINE_BYTES
        wanted = await asyncio.to_thread(parse, body, kind, limits) if large else parse(body, kind, limits)
        name = getattr(wanted, "model", None)
        if self._service.options.replicas is not None and name is not None:
            await self._load_on_demand(name)
        self._service.check_model(name)
        return wanted

    async def _load_on_demand(self, name: str) -> None:
        """Load an adapter from below --allowed-lora-path that nobody has asked this replica for yet, if it is one."""
        adapters, names = self._service.engine.adapters, self._service.options.model_names
        if (root := self._service.options.allowed_lora_path) is None or name in adapters or name in names:
            return
        try:
            await load_adapter(adapters, LoadLoraAdapterRequest(name, name), Path(root), names)
        except ApiError as error:
            if name not in adapters:  # as it is when another request has had it loaded meanwhile
                log.info("no adapter is loaded on demand: %s", error.message)

    @operation(
        "Continue prompts, given as texts or as token ids.",
        request=CompletionRequest,
        answer=Completion,
        events=Completion,
        example={"prompt": "A potstill is", "max_tokens": 32},
    )
    async def completions(self, request: Request) -> GenerationResponse:
        wanted = await self._read(request, CompletionRequest)
        return GenerationResponse(CompletionReply(wanted, self._service), request.state.account)

    @operation(
        "Answer a conversation.",
        request=ChatRequest,
        answer=ChatCompletion,
        events=ChatChunk,
        example={"messages": [{"role": "user", "content": "What is a potstill?"}], "max_tokens": 64},
    )
    async def chat_completions(self, request: Request) -> GenerationResponse:
        wanted = await self._read(request, ChatRequest)
        return GenerationResponse(ChatReply(wanted, self._service), request.state.account)

    @operation(
        "OpenAI's Responses.",
        request=ResponsesRequest,
        answer=ResponsesBody,
        events=dict[str, Any],
        example={"input": "What is a potstill?", "max_output_tokens": 64},
    )
    async def responses(self, request: Request) -> GenerationResponse:
        return await self._translated(request, await self._read(request, ResponsesRequest), ResponsesReply)

    @operation(
        "One vector for each text.",
        request=EmbeddingsRequest,
        answer=Embeddings,
        example={"input": "A potstill is"},
    )
    async def embeddings(self, request: Request) -> GenerationResponse:
        return await self._translated(request, await self._read(request, EmbeddingsRequest), EmbeddingsReply)

    @operation(
        "Anthropic's Messages.",
        request=MessagesRequest,
        answer=AnthropicMessage,
        events=dict[str, Any],
        errors=dict[str, Any],
        example={"messages": [{"role": "user", "content": "What is a potstill?"}], "max_tokens": 64},
    )
    async def messages(self, request: Request) -> GenerationResponse:
        return await self._translated(request, await self._read(request, MessagesRequest), MessagesReply)

    @operation(
        "Ollama's chat.",
        request=OllamaChatRequest,
        answer=OllamaAnswer,
        events=OllamaAnswer,
        stream="application/x-ndjson",
        errors=dict[str, str],
        example={"messages": [{"role": "user", "content": "What is a potstill?"}], "options": {"num_predict": 64}},
    )
    async def ollama_chat(self, request: Request) -> ASGIApp:
        return await self._ollama(request, await self._read(request, OllamaChatRequest))

    @operation(
        "Ollama's generate.",
        request=GenerateRequest,
        answer=OllamaAnswer,
        events=OllamaAnswer,
        stream="application/x-ndjson",
        errors=dict[str, str],
        example={"prompt": "What is a potstill?", "options": {"num_predict": 64}},
    )
    async def ollama_generate(self, request: Request) -> ASGIApp:
        return await self._ollama(request, await self._read(request, GenerateRequest))

    @operation(
        "One vector for each text, as Ollama gives them.",
        request=EmbedRequest,
        answer=Embedded,
        errors=dict[str, str],
        example={"model": "NAME", "input": "A potstill is"},
    )
    async def ollama_embed(self, request: Request) -> GenerationResponse:
        return await self._translated(request, await self._read(request, EmbedRequest), EmbedReply)

    async def _ollama(self, request: Request, wanted: OllamaChatRequest | GenerateRequest) -> ASGIApp:
        loaded = ollama.loaded(wanted)
        return await self._translated(request, wanted, OllamaReply) if loaded is None else json_response(loaded)

    async def _translated(
        self, request: Request, wanted: Wanted, reply: Callable[[Wanted, Service], Reply[Any]]
    ) -> GenerationResponse:
        """The answer to a request of another protocol, which is translated in a thread: it may be large."""
        return GenerationResponse(await asyncio.to_thread(reply, wanted, self._service), request.state.account)

    @operation("The models, as Ollama lists them.", answer=ollama_models.OllamaModels, errors=dict[str, str])
    async def ollama_tags(self, request: Request) -> Response:
        return json_response(await asyncio.to_thread(ollama_models.tags, self._service, self._info()))

    @operation(
        "One of them, as Ollama shows it.",
        request=ollama_models.ShowRequest,
        answer=ollama_models.ShownModel,
        errors=dict[str, str],
        example={"model": "NAME"},
    )
    async def ollama_show(self, request: Request) -> Response:
        wanted = await self._read(request, ollama_models.ShowRequest)
        return json_response(await asyncio.to_thread(ollama_models.show, self._service, self._info(), wanted.model))

    @operation(
        "How many tokens Anthropic's Messages would be.",
        request=CountTokensRequest,
        answer=TokenCount,
        errors=dict[str, Any],
        example={"messages": [{"role": "user", "content": "What is a potstill?"}]},
    )
    async def count_tokens(self, request: Request) -> Response:
        wanted = await self._read(request, CountTokensRequest)
        return json_response(await asyncio.to_thread(messages.count_tokens, wanted, self._service))

    @operation("The model and its adapters.", answer=ModelList)
    async def models(self, request: Request) -> Response:
        names = *self._service.options.model_names, *self._service.engine.adapters.folders
        return json_response(ModelList([self._card(name) for name in names]))

    @operation("One of them.", answer=ModelCard)
    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.check_model(name)
        return json_response(self._card(name))

    @operation(
        "Load a LoRA adapter.",
        request=LoadLoraAdapterRequest,
        text="text/plain",
        example={"lora_name": "NAME", "lora_path": "FOLDER"},
    )
    async def load_lora_adapter(self, request: Request) -> Response:
        root = self._adapter_root()
        wanted = await self._read(request, LoadLoraAdapterRequest)
        adapters, names = self._check_engine().adapters, self._service.options.model_names
        return Response(await load_adapter(adapters, wanted, root, names), media_type="text/plain")

    def _adapter_root(self) -> Path:
        """From below which adapters may come. ApiError 404 unless the operator has said so."""
        if (root := self._service.options.allowed_lora_path) is None:
            raise ApiError(404, "adapters come and go only with --allowed-lora-path", code="not_found")
        if self._service.options.replicas is not None:
            raise ApiError(404, "each replica loads an adapter when it is first asked for", code="not_found")
        return Path(root)

    @operation(
        "Unload a LoRA adapter.", request=UnloadLoraAdapterRequest, text="text/plain", example={"lora_name": "NAME"}
    )
    async def unload_lora_adapter(self, request: Request) -> Response:
        self._adapter_root()
        wanted = await self._read(request, UnloadLoraAdapterRequest)
        await self._service.engine.adapters.unload(wanted.lora_name)
        return Response(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.", media_type="text/plain")

    def _card(self, name: str) -> ModelCard:
        service, base = self._service, self._service.options.model_names[0]
        folder = service.engine.adapters.folders.get(name)
        root, parent = (base, None) if folder is None else (folder, base)
        return ModelCard(name, service.created, self._info().max_model_len, root, parent)

    def _info(self) -> Ready:
        """What the engine said of itself; ApiError 503 before the first is there."""
        if self._service.engine.info is None:
            raise self._service.engine.absence()
        return self._service.engine.info

    @operation(
        "The tokens of a text or of a conversation.",
        request=TokenizeRequest,
        answer=Tokenized,
        example={"prompt": "A potstill is"},
    )
    async def tokenize(self, request: Request) -> Response:
        wanted = await self._read(request, TokenizeRequest)
        tokens = await asyncio.to_thread(self._tokens, wanted)
        texts = [token_text(self._service.tokenizer, token) for token in tokens] if wanted.return_token_strs else None
        return json_response(Tokenized(len(tokens), self._info().max_model_len, tokens, texts))

    def _tokens(self, wanted: TokenizeRequest) -> list[int]:
        if (wanted.prompt is None) == (wanted.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if wanted.messages is None:
            special = wanted.add_special_tokens is not False
            return self._service.tokenizer.encode(wanted.prompt or "", add_special_tokens=special)
        return conversation_ids(
            self._service.tokenizer,
            wanted.messages,
            tools=wanted.tools,
            arguments=wanted.chat_template_kwargs,
            add_generation_prompt=wanted.add_generation_prompt,
            continue_final_message=bool(wanted.continue_final_message),
        )

    @operation("The text of tokens.", request=DetokenizeRequest, answer=Detokenized, example={"tokens": [1, 2, 3]})
    async def detokenize(self, request: Request) -> Response:
        wanted = await self._read(request, DetokenizeRequest)
        size = self._info().vocab_size
        if any(token >= size for token in wanted.tokens):
            raise invalid(f"a token is outside the vocabulary of {size} tokens", "tokens")
        return json_response(Detokenized(self._service.tokenizer.decode(wanted.tokens, skip_special_tokens=False)))

    @operation("Whether a request sent now would be worked on.", answer=dict[str, str])
    async def health(self, request: Request) -> Response:
        """200 when a request sent now would be worked on: the engine's loop has just answered a ping."""
        engine = self._check_engine()
        if not await engine.ping(self._service.options.health_timeout_s):
            raise unavailable("the engine does not answer", "engine_stalled")
        return json_response({"status": "ok"})

    def _check_engine(self) -> EngineClient:
        """ApiError 503 unless the engine takes requests."""
        engine = self._service.engine
        if engine.draining:
            raise unavailable("the server is shutting down", "draining")
        if not engine.is_ready:
            raise engine.absence()
        return engine

    @operation("Prometheus metrics.")
    async def metrics(self, request: Request) -> Response:
        await self._service.engine.ping(FRESH_STATS_S)
        return Response(self._service.metrics.expose(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    @operation("The version of potstill.", answer=dict[str, str])
    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    @operation("How busy the server is.", answer=dict[str, Any])
    async def load(self, request: Request) -> Response:
        return json_response(load_of(self._service.engine.num_calls, self._service.metrics))

    @cached_property
    def _openapi(self) -> bytes:
        return encoder.encode(openapi_document(self.router.routes, has_keys=self._service.options.has_keys))

    @operation("This description.", answer=dict[str, Any])
    async def openapi(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(lambda: self._openapi), media_type="application/json")

    @operation("This description as a page.", text="text/html")
    async def docs(self, request: Request) -> Response:
        return docs_page()


def json_response(content: msgspec.Struct | dict[str, Any]) -> Response:
    return Response(encoder.encode(content), media_type="application/json")


def parse(body: bytes, kind: type[AnyRequest], limits: RequestLimits) -> AnyRequest:
    """A body as a checked request, or ApiError 400."""
    return read(loads_object(body), kind, limits)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a JSON request, unpacked. ApiError 413 as soon as the limit is passed, packed or unpacked; 400 for
    another content type, 415 for another encoding than gzip."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise invalid("the Content-Type must be application/json", "Content-Type")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _body_too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for portion in request.stream():
                body += portion
                if len(body) > max_bytes:
                    raise _body_too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s", code="body_timeout") from None
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return bytes(body)
    if encoding != "gzip":
        raise ApiError(415, "the Content-Encoding can only be gzip", code="unsupported_encoding")
    return await asyncio.to_thread(unpacked, bytes(body), max_bytes)


def unpacked(body: bytes, max_bytes: int) -> bytes:
    """What a gzip body holds; no more than the limit is ever unpacked."""
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = stream.decompress(body, max_bytes + 1)
    except zlib.error:
        raise invalid("the body is not gzip, as its Content-Encoding says") from None
    if len(content) > max_bytes:
        raise _body_too_large(max_bytes)
    if not stream.eof or stream.unused_data:
        raise invalid("the body is not one whole gzip stream")
    return content


def _body_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
