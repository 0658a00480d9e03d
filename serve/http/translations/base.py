"""What all translations share: the chat request that a request of another protocol means, and its chunks in theirs.

A translation has no generation path of its own. Room in the queue, limits, keys, metrics, log lines and clients that
leave are those of chat; only the words differ.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from serve.http.chat import ChatReply
from serve.http.errors import ApiError
from serve.http.generation import Service
from serve.http.options import RequestLimits
from serve.http.protocol import AnyRequest, loads_object, read
from serve.http.requests import ChatRequest, ChatTemplateArguments, ToolCall
from serve.http.responses import ChatChunk, ChatCompletion, Usage, encoder
from serve.outputs import RequestOutput


class Extras(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of chat that a translated request may bring under their own names; chat checks their bounds."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    store: bool | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None

    def carried(self) -> dict[str, Any]:
        """Those that were given, as chat reads them."""
        given = {name: getattr(self, name) for name in Extras.__struct_fields__}
        return {name: msgspec.to_builtins(value) for name, value in given.items() if value is not None}


class Translation(ChatReply):
    """One request of another protocol, answered as the chat request that it means."""

    def __init__(self, chat: dict[str, Any], names: Mapping[str, str], service: Service) -> None:
        """`chat`: the body of that chat request; `names`: what the protocol calls fields that chat calls otherwise."""
        super().__init__(chat_request(chat, names, service.options), service)

    @abstractmethod
    def translate(self, chunk: ChatChunk) -> Iterator[bytes]:
        """A chunk of the chat's stream in this protocol."""

    @abstractmethod
    def translate_whole(self, whole: ChatCompletion) -> msgspec.Struct:
        """The chat's whole answer in this protocol."""

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        return b"".join(part for chunk in self.chunks(prompt_index, output) for part in self.translate(chunk))

    def response(self, usage: Usage) -> bytes:
        return encoder.encode(self.translate_whole(self.whole(usage)))


def chat_request(chat: dict[str, Any], names: Mapping[str, str], limits: RequestLimits) -> ChatRequest:
    """The checked chat request of a body; an ApiError speaks of fields as the protocol calls them."""
    return meant_request(chat, ChatRequest, names, limits)


def meant_request(
    body: dict[str, Any], kind: type[AnyRequest], names: Mapping[str, str], limits: RequestLimits
) -> AnyRequest:
    """The checked request of this kind that a translated body is; an ApiError as `chat_request` has it."""
    try:
        return read(body, kind, limits)
    except ApiError as error:
        pattern = re.compile(rf"\b({'|'.join(names)})\b")
        message, param = (pattern.sub(lambda match: names[match[1]], text) for text in (str(error), error.param or ""))
        raise ApiError(error.status, message, code=error.code, param=param or None) from None


def named_event(name: str, data: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + encoder.encode(data) + b"\n\n"


def said(value: str | UnsetType) -> str:
    """The text of a part of a chunk; empty where the chunk has none."""
    return "" if value is UNSET else str(value)


def call_input(call: ToolCall) -> dict[str, Any]:
    """A call's arguments as an object; empty where max_tokens cut them."""
    try:
        return loads_object(call.function.arguments.encode())
    except ApiError:
        return {}
