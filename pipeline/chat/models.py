"""Who answers in a conversation: an engine in this process, or a server that speaks OpenAI's protocol.

Ctrl-C ends an answer, not the program: what was written until then is the answer.
"""

import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.errors import UserError
from pipeline.stages.shared.served import reason_of
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve.llm import LLM

Messages = Sequence[Mapping[str, str]]
Write = Callable[[str, bool], None]
"""Shows a part of an answer, or (with True) of the thoughts before it."""
ANSWER_S = 600.0


@dataclass
class Answer:
    """One answer as it comes, and how fast."""

    write: Write
    text: str = ""
    thinks: bool = False
    """Whether its latest part was a thought."""
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    end: str = "stop"
    """Why it ended: "stop", "length", or "interrupted"."""
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    """When its first text came."""

    def add(self, text: str, *, is_thought: bool = False) -> None:
        """Takes in a part; thoughts are shown, but are no part of what was said."""
        if text:
            self.first = self.first or time.perf_counter()
            if self.thinks and not is_thought:
                self.write("\n\n", True)
            self.thinks = is_thought
            self.text += "" if is_thought else text
            self.write(text, is_thought)

    def speeds(self) -> str:
        """Such as "64 tokens, 53.1 tokens/s, first after 0.21 s; 40 of 44 drafted tokens accepted"."""
        now = time.perf_counter()
        first = "" if self.first is None else f", first after {self.first - self.began:.2f} s"
        drafted = f"; {self.num_accepted} of {self.num_drafted} drafted tokens accepted" if self.num_drafted else ""
        end = {"length": "; stopped at --max-tokens", "interrupted": "; interrupted"}.get(self.end, "")
        return f"{self.num_tokens} tokens, {self.num_tokens / (now - self.began):.1f} tokens/s{first}{drafted}{end}"


class ChatModel(Protocol):
    """Answers conversations. ValueError, one sentence, for one that cannot be answered."""

    name: str

    def answer(self, messages: Messages, write: Write) -> Answer:
        """The answer, whose text goes to `write` as it comes."""


class _Interrupted(Exception):
    """Ctrl-C, noticed between two steps of the engine."""


class LocalModel:
    """A model in this process."""

    def __init__(self, name: str, engine: "LLM", params: SamplingParams) -> None:
        """Raises UserError for a model without a chat template."""
        self.name, self._engine, self._params = name, engine, params
        if not engine.tokenizer.templates:
            raise UserError(f"{name} has no chat template; `potstill generate --raw` continues text with it.")

    def answer(self, messages: Messages, write: Write) -> Answer:
        answer = Answer(write)
        prompt = self._engine.tokenizer.chat_token_ids(messages, add_generation_prompt=True)
        with _noticed_interrupts() as interrupts:

            def heard(output: RequestOutput) -> None:
                answer.num_tokens = output.num_output_tokens
                answer.num_drafted, answer.num_accepted = output.num_drafted, output.num_accepted
                answer.end = output.finish_reason or answer.end
                answer.add(output.new_text)
                if interrupts and not output.finished:
                    raise _Interrupted

            try:
                for _, generation in self._engine.as_completed([prompt], self._params, heard=heard):
                    if generation.choices[0].error:
                        raise UserError(generation.choices[0].error)
            except _Interrupted:
                answer.end = "interrupted"
        return answer


class RemoteModel:
    """A model behind a server: `potstill serve`, vLLM or another."""

    def __init__(self, url: str, model: str | None, key: str | None, settings: Mapping[str, Any]) -> None:
        """`settings`: further fields of each request. Raises UserError when the server does not list its models."""
        self._base = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._settings = settings
        with self._opened("models") as response:
            served = [entry["id"] for entry in json.load(response).get("data", ())]
        if model is not None and model not in served:
            raise UserError(f"{self._base} serves {', '.join(served)}, not {model}.")
        if not served:
            raise UserError(f"{self._base} serves no model.")
        self.name = model or served[0]

    def answer(self, messages: Messages, write: Write) -> Answer:
        answer = Answer(write)
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._opened("chat/completions", body | dict(self._settings)) as response:
                for chunk in _events(response):
                    take(chunk, answer)
        except KeyboardInterrupt:  # closing the connection ends the request at the server, too
            answer.end = "interrupted"
        return answer

    @contextmanager
    def _opened(self, route: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        content = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self._base}/{route}", content, self._headers)
            with closing(urllib.request.urlopen(request, timeout=ANSWER_S)) as response:
                yield response
        except (OSError, HTTPException, KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self._base} does not answer as OpenAI's servers do: {reason_of(error)}.") from None


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def take(chunk: dict[str, Any], answer: Answer) -> None:
    """Adds what one event of a stream brings. UserError where that is an error."""
    if error := chunk.get("error"):
        raise UserError(f"The server broke off: {error.get('message', error)}.")
    for choice in chunk.get("choices", ()):
        delta = choice["delta"]
        thought, text = (delta.get(name) or "" for name in ("reasoning", "content"))
        answer.num_tokens += bool(text or thought)  # until the server says how many there were
        answer.end = choice.get("finish_reason") or answer.end
        answer.add(thought, is_thought=True)
        answer.add(text)
    if usage := chunk.get("usage"):
        answer.num_tokens = usage["completion_tokens"]
        details = usage.get("completion_tokens_details") or {}
        answer.num_accepted = details.get("accepted_prediction_tokens") or 0
        answer.num_drafted = answer.num_accepted + (details.get("rejected_prediction_tokens") or 0)


@contextmanager
def _noticed_interrupts() -> Iterator[list[int]]:
    """Ctrl-C only adds to the list: a step of the engine is never broken off in the middle."""
    noticed: list[int] = []

    def notice(number: int, frame: FrameType | None) -> None:
        noticed.append(number)

    before = signal.signal(signal.SIGINT, notice)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, before)
