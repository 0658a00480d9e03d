"""What both generation routes share: from a checked request to a whole response or a stream of events.

    reserve room -> tokenize (in a thread) -> check lengths -> submit -> outputs -> one response, or events

A client that leaves, at any point of this, aborts its request. A client that does not read is given up.
"""

import asyncio
import functools
import hashlib
import logging
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from serve.http.accounts import Account
from serve.http.engine_client import Call, EngineClient
from serve.http.errors import ApiError, context_exceeded, invalid, late, model_not_found, unsupported
from serve.http.grammar_check import GrammarChecker
from serve.http.metrics import Metrics
from serve.http.options import EVERYBODY, ServerOptions
from serve.http.requests import GRAMMAR_FIELDS, GenerationRequest, StreamOptions
from serve.http.responses import (
    DONE,
    CompletionTokensDetails,
    PromptLogprob,
    PromptTokensDetails,
    ResponseMetrics,
    SpeculativeDecoding,
    Usage,
    encoder,
)
from serve.http.structured_outputs import Grammar, gbnf_of, grammar_of
from serve.messages import Ready
from serve.outputs import RequestOutput, TokenLogprobs
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from serve.http.tools.formats import Formats

Result = TypeVar("Result")
LOWEST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot hold; vLLM writes the same."""
NO_ANSWER = ("deadline", "error", "abort")
"""Finish reasons of choices that have become none."""
SEND_S = 30.0
"""How long a client may take to make room for the next event."""
log = logging.getLogger("potstill.server")


@dataclass
class Service:
    """Everything that the routes of one server share."""

    options: ServerOptions
    engine: EngineClient
    tokenizer: "Tokenizer"
    metrics: Metrics
    formats: "Formats"
    accounts: list[Account] = field(default_factory=list)
    """Of all API keys."""
    created: int = field(default_factory=lambda: int(time.time()))
    salt_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @cached_property
    def grammars(self) -> GrammarChecker:
        """Tries what requests want their output to be."""
        return GrammarChecker(self.tokenizer)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 unless the request means the model that is served, or one of its adapters."""
        if name is not None and name not in self.options.model_names and name not in self.engine.adapters:
            raise model_not_found(*self.options.model_names, *self.engine.adapters.folders)

    def cache_salt(self, tenant: bytes, wish: str | None) -> str:
        """The salt of a request's cached prefixes, of fixed size and not to be guessed: by key and by client's wish."""
        return hashlib.sha256(self.salt_secret + tenant + b"\0" + (wish or "").encode()).hexdigest()


Request = TypeVar("Request", bound=GenerationRequest)


class Reply(ABC, Generic[Request]):
    """How one route turns a request into prompts, and outputs into a response. One object per request."""

    id_prefix: str
    stream_type = b"text/event-stream; charset=utf-8"
    """Media type of a stream."""

    def __init__(self, request: Request, service: Service) -> None:
        self.request = request
        self.service = service
        self.tokenizer = service.tokenizer
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.adapter = None if request.model in service.options.model_names else request.model
        self.model = self.adapter or service.options.model_names[0]
        self.num_choices = request.n or 1
        self.stream_options = request.stream_options or StreamOptions()
        self.usage = UsageCounter()
        self.prompt_ids: list[list[int]] = []
        """The prompts as they are sent to the engine."""
        self.has_form = any(getattr(request, name) is not None for name in GRAMMAR_FIELDS)
        self.lark: str | None = None
        """What the grammar that the request gives in GBNF has become."""

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def speculates(self) -> bool:
        return self.service.options.engine.draft is not None

    @property
    def max_tokens(self) -> int | None:
        """The most output tokens that the request asks for, if it says."""
        newer = self.request.max_completion_tokens
        return self.request.max_tokens if newer is None else newer

    def check_text(self, text: str) -> None:
        """ApiError 400 for text that cannot fit, before it is tokenized: its bytes alone tell."""
        info = self.service.engine.info
        if info is None or len(text) <= info.max_model_len or self.request.truncate_prompt_tokens is not None:
            return
        least, num_output = self.tokenizer.least_tokens(text), self.max_tokens or 1
        if least + num_output > info.max_model_len:
            raise context_exceeded(info.max_model_len, f"at least {least}", num_output)

    def truncated(self, prompt: list[int], max_model_len: int) -> list[int]:
        """What truncate_prompt_tokens leaves of a prompt."""
        most = self.request.truncate_prompt_tokens
        if most is None:
            return prompt
        if most < 0:
            most = max(max_model_len - (self.max_tokens or 1), 1)
        return prompt[:most] if self.request.truncation_side == "right" else prompt[-most:]

    @property
    def skips_special_tokens(self) -> bool:
        return self.request.skip_special_tokens is not False

    def shown_ids(self, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
        """Token ids for the response, where return_token_ids asks for them."""
        return token_ids if self.request.return_token_ids else msgspec.UNSET

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the output must be, if the request says so. ApiError 400 where it says it wrongly."""
        return grammar_of(self.request, lark=self.lark) if self.has_form else None

    def prepare(self) -> tuple[list[list[int]], Grammar | None]:
        """What may be long work, for a worker thread: the prompts, and then the grammar."""
        return self.tokenize(), self.grammar

    @abstractmethod
    def tokenize(self) -> list[list[int]]:
        """The prompts as token ids, before any is truncated."""

    @abstractmethod
    def params(self, room: int) -> SamplingParams:
        """The engine's parameters; `room` is how many tokens the longest prompt leaves."""

    @abstractmethod
    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[msgspec.Struct]:
        """The events that an output becomes in a stream."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The last event of a stream that was asked for usage."""

    @abstractmethod
    def collect(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in an output for the whole response."""

    @abstractmethod
    def whole(self, usage: Usage) -> msgspec.Struct:
        """The response, once every output has been collected."""

    def by_token(self, positions: Sequence[TokenLogprobs | None]) -> list[dict[int, PromptLogprob] | None]:
        """prompt_logprobs as vLLM writes them: at each place the prompt's own token, and the most probable ones."""

        def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
            return PromptLogprob(max(logprob, LOWEST), rank, token_text(self.tokenizer, token_id))

        return [
            None
            if position is None
            else {position.token_id: entry(position.token_id, position.logprob, position.rank)}
            | {token_id: entry(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, 1)}
            for position in positions
        ]

    def received(self, output: RequestOutput) -> RequestOutput:
        """An output as this route wants to see it."""
        return output

    def response(self, usage: Usage) -> bytes:
        """The body of the whole response."""
        return encoder.encode(self.whole(usage))

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events, none or several, that an output becomes in a stream."""
        return b"".join(event(chunk) for chunk in self.chunks(prompt_index, output))

    def last_events(self, usage: Usage) -> bytes:
        """What ends a stream in which every choice has finished."""
        return (event(self.usage_chunk(usage)) if self.stream_options.include_usage else b"") + DONE

    def failure_events(self, error: ApiError) -> bytes:
        """What ends a stream that has failed."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def chunk_usage(self) -> Usage | msgspec.UnsetType | None:
        """What a chunk says of usage: nothing; null, as OpenAI has it, when a usage chunk will follow; or so far."""
        if self.stream_options.continuous_usage_stats:
            return self.usage.total(self.speculates)
        return None if self.stream_options.include_usage else msgspec.UNSET


def token_text(tokenizer: "Tokenizer", token_id: int) -> str:
    """A token as text; bytes that are no character by themselves show as U+FFFD."""
    return tokenizer.token_bytes()[token_id].decode("utf-8", "replace")


NOTHING = RequestOutput("", 0)
"""What a choice has said before its first output."""


class UsageCounter:
    """Counts tokens from the running totals that outputs carry."""

    def __init__(self) -> None:
        self._prompts: dict[int, RequestOutput] = {}
        self._choices: dict[tuple[int, int], RequestOutput] = {}
        self._verifications: Counter[tuple[int, int]] = Counter()
        """How many had so many draft tokens, and accepted so many of them."""

    def record(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompts.setdefault(prompt_index, output)
        choice = (prompt_index, output.index)
        before = self._choices.get(choice, NOTHING)
        if output.num_drafted > before.num_drafted:
            drafted, accepted = output.num_drafted - before.num_drafted, output.num_accepted - before.num_accepted
            self._verifications[drafted, accepted] += 1
        self._choices[choice] = output

    def total(self, speculates: bool) -> Usage:
        """Usage so far."""
        prompt = sum(output.num_prompt_tokens for output in self._prompts.values())
        cached = sum(output.num_cached_tokens for output in self._prompts.values())
        completion = sum(output.num_output_tokens for output in self._choices.values())
        accepted = sum(output.num_accepted for output in self._choices.values())
        rejected = sum(output.num_drafted for output in self._choices.values()) - accepted
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached),
            completion_tokens_details=CompletionTokensDetails(accepted, rejected) if speculates else msgspec.UNSET,
        )

    def metrics(self) -> ResponseMetrics | msgspec.UnsetType:
        """How verifications went so far, if there were any: an output comes of one step, which has one at most."""
        if not self._verifications:
            return msgspec.UNSET
        steps = self._verifications.total()
        drafted, accepted = (sum(pair[i] * n for pair, n in self._verifications.items()) for i in (0, 1))
        longest = max(drafted for drafted, _ in self._verifications)
        histogram = [0] * (longest + 1)
        for (_, number), times in self._verifications.items():
            histogram[number] += times
        return ResponseMetrics(
            SpeculativeDecoding(
                mean_acceptance_length=1 + accepted / steps,
                draft_acceptance_rate=accepted / drafted,
                acceptance_histogram=histogram,
                num_spec_steps=steps,
                num_accepted_draft_tokens=accepted,
                num_draft_tokens=drafted,
                num_spec_tokens=longest,
            )
        )


class GenerationResponse:
    """The ASGI response of both routes."""

    def __init__(self, reply: Reply[Any], account: Account | None) -> None:
        self._reply = reply
        self._account = account
        self._service = reply.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._reply
        num_choices = reply.num_prompts * reply.num_choices
        account, (priority, deadline_s) = self._account, self._terms()
        with self._service.engine.open_call(num_choices, deadline_s=deadline_s) as call:
            scope["state"]["call"], call.priority = call, priority
            if account is not None:
                account.admit_request()
            try:
                await while_connected(receive, self._answer(call, scope, send))
            finally:
                if account is not None:
                    account.spend(self._usage().completion_tokens)

    def _terms(self) -> tuple[int, float | None]:
        """Priority and deadline: what the request asks for, or what the class has that its key gives it."""
        asked = self._reply.request
        if self._account is not None:
            return self._account.terms(asked.service_tier, asked.priority, asked.deadline_s)
        if asked.service_tier not in (None, "auto", "default"):
            raise invalid("service_tier can be auto or default here: there are no classes of requests", "service_tier")
        return asked.priority or 0, asked.deadline_s

    async def _answer(self, call: Call, scope: Scope, send: Send) -> None:
        params = await self._submit(call)
        if self._reply.request.stream:
            await self._stream(call, scope, send)
        else:
            much = (params.logprobs, params.prompt_logprobs, params.pooling) != (None, None, None)
            await send_json(send, await self._whole(call, much=much))

    async def _submit(self, call: Call) -> SamplingParams:
        reply, engine = self._reply, self._service.engine
        if reply.has_form and (gbnf := gbnf_of(reply.request)) is not None:
            reply.lark = await self._in_time(call, self._service.grammars.lark(gbnf))
        prompts, grammar = await self._in_time(call, asyncio.to_thread(reply.prepare))
        if engine.info is None:
            raise engine.absence()
        prompts = reply.prompt_ids = [reply.truncated(prompt, engine.info.max_model_len) for prompt in prompts]
        room = check_prompts(prompts, reply.max_tokens or 1, engine.info)
        params = self._params(room, engine.info.vocab_size)
        if grammar is not None:
            await self._in_time(call, self._service.grammars.check(grammar))
        if self._account is not None:
            self._account.admit_prompts(sum(map(len, prompts)))
        call.submit(prompts, params, tenant=self._tenant(), adapter=reply.adapter)
        return params

    def _tenant(self) -> Tenant | None:
        account, wish = self._account, self._reply.request.cache_salt
        if account is None:
            return None if wish is None else Tenant(cache_salt=self._service.cache_salt(b"", wish))
        return Tenant(account.name, account.weight, self._service.cache_salt(account.digest, wish))

    def _params(self, room: int, vocab_size: int) -> SamplingParams:
        params, grammar = self._reply.params(room), self._reply.grammar
        if grammar is not None:
            params = replace(params, grammar=grammar.text)
        params = replace(params, store=self._may_store())
        try:
            params.validate(vocab_size)
        except ValueError as error:
            raise invalid(str(error), str(error).split()[0]) from None
        return params

    def _may_store(self) -> bool:
        """Whether the answer may be kept for training: with its account's consent, and unless the request says no."""
        account, wish = self._account, self._reply.request.store
        consents = EVERYBODY in self._service.options.label_consent if account is None else account.consents
        if wish and not consents:
            raise unsupported("store can only be false here: nothing that this client asks may be stored", "store")
        return consents and wish is not False

    async def _in_time(self, call: Call, work: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout_at(call.deadline):
                return await work
        except TimeoutError:
            raise late() from None

    async def _outputs(self, call: Call) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        """The call's outputs, as many as are there at a time; ApiError for one that is no answer, behind the others."""
        async for outputs in call:
            ends = (number for number, (_, output) in enumerate(outputs) if output.finish_reason in NO_ANSWER)
            if (end := next(ends, None)) is None:
                yield outputs
                continue
            yield outputs[:end]
            failed = outputs[end][1]
            if failed.finish_reason == "deadline":
                raise late()
            raise ApiError(500, failed.error or "the engine gave up this request", code="engine_error")

    def _received(self, prompt_index: int, output: RequestOutput) -> tuple[int, RequestOutput]:
        """An output as the reply has it, counted."""
        received = self._reply.received(output)
        self._reply.usage.record(prompt_index, received)
        return prompt_index, received

    async def _whole(self, call: Call, *, much: bool) -> bytes:
        async for outputs in self._outputs(call):
            for output in outputs:
                self._reply.collect(*self._received(*output))
        return await self._write(functools.partial(self._reply.response, self._usage()), much=much)

    async def _events(self, call: Call) -> AsyncIterator[bytes]:
        """One write a step, however many choices it brought."""
        async for outputs in self._outputs(call):
            parts = []
            for output in outputs:
                write = functools.partial(self._reply.events, *self._received(*output))
                parts.append(await self._write(write, much=output[1].prompt_logprobs is not None))
            if data := b"".join(parts):
                yield data

    def _usage(self) -> Usage:
        return self._reply.usage.total(self._reply.speculates)

    async def _write(self, write: Callable[[], bytes], *, much: bool) -> bytes:
        """The bytes of a response or an event; where they may be many, from a worker thread."""
        return await asyncio.to_thread(write) if much else write()

    async def _stream(self, call: Call, scope: Scope, send: Send) -> None:
        """Nothing is sent before the first event is there: errors up to then have a status code of their own."""
        events = self._events(call)
        data = await anext(events, b"")
        headers = [(b"content-type", self._reply.stream_type), (b"cache-control", b"no-cache")]
        await send_in_time(scope, send, {"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while data:
                await send_in_time(scope, send, {"type": "http.response.body", "body": data, "more_body": True})
                data = await anext(events, b"")
            data = self._reply.last_events(self._usage())
        except ApiError as error:
            last = self._reply.failure_events(error)
            await send_in_time(scope, send, {"type": "http.response.body", "body": last, "more_body": False})
            raise  # the client has been told; logs and counts have not
        await send_in_time(scope, send, {"type": "http.response.body", "body": data, "more_body": False})


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encoder.encode(data) + b"\n\n"


def check_prompts(prompts: list[list[int]], num_output: int, info: Ready) -> int:
    """How many tokens the longest prompt leaves for output. ApiError 400 for prompts that cannot be served."""
    for prompt in prompts:
        if not prompt:
            raise invalid("the prompt has no tokens", "prompt")
        if max(prompt) >= info.vocab_size:
            raise invalid(f"token {max(prompt)} is outside the vocabulary of {info.vocab_size} tokens", "prompt")
    longest = max(map(len, prompts))
    if longest + num_output > info.max_model_len:
        raise context_exceeded(info.max_model_len, str(longest), num_output)
    return info.max_model_len - longest


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, or cancel it and raise ClientDisconnect when the client leaves. The body must have been read."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_in_time(scope: Scope, send: Send, message: dict[str, Any]) -> None:
    """Send, or drop the connection of a client that does not read and raise ClientDisconnect."""
    try:
        async with asyncio.timeout(SEND_S):
            await send(message)
    except TimeoutError:
        log.warning("a client did not read for %g s; its connection is dropped", SEND_S)
        if (drop := scope["state"].get("drop_connection")) is not None:
            drop()
        raise ClientDisconnect from None


async def send_json(send: Send, body: bytes) -> None:
    """A whole JSON response."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
