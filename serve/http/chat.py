"""POST /v1/chat/completions: a conversation through the model's template, one object of log-probabilities a token."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from serve.http.errors import ApiError, invalid
from serve.http.generation import LOWEST, Reply, Service
from serve.http.protocol import loads_object, sampling_params, without_nulls
from serve.http.requests import TOOL_VARIABLES, ChatRequest, ChatTemplateArguments, Message, Tool
from serve.http.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from serve.http.structured_outputs import Grammar
from serve.http.tools.answer import Answer, message_of
from serve.http.tools.forced import after_thoughts
from serve.http.tools.reasoning import ReasoningParser
from serve.http.tools.use import ToolUse, tool_object, tool_use
from serve.outputs import RequestOutput, TokenLogprobs
from serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from serve.http.tools.formats import Formats

TAIL_TOKENS = 32
"""As many tokens of a prompt's end hold a tag, however it is spelled."""

LONG_TEXT = 16_384
"""Characters; shorter conversations are tokenized as fast as their text is looked at."""


class ChatReply(Reply[ChatRequest]):
    """One request to /v1/chat/completions."""

    id_prefix = "chatcmpl"
    named_call_end: ClassVar[str] = "stop"
    """How a choice ends whose call was named by the request: to OpenAI's clients that call is the whole answer."""

    def __init__(self, request: ChatRequest, service: Service) -> None:
        super().__init__(request, service)
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._use = tools_used(request, service.formats)
        self._is_plain = self._use is None and service.formats.reasoning is None
        """All text is content."""
        self._answers: dict[int, Answer] = {}
        self._is_thinking: bool | None = False
        """Whether answers begin amid thoughts; None: with them, or not."""

    def tokenize(self) -> list[list[int]]:
        request, use = self.request, self._use
        ids = conversation_ids(
            self.tokenizer,
            request.messages if use is None else use.conversation(request.messages),
            tools=None if use is None else use.shown,
            arguments=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            check_text=self.check_text,
        )
        self._is_thinking = self._thinks_after(ids)
        return [ids]

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer must be: content, calls, or either of them, behind thoughts."""
        wanted, formats = super().grammar, self.service.formats
        if self._use is not None:
            wanted = self._use.grammar(formats.control_token_ids, wanted)
        if wanted is None or formats.reasoning is None or self._is_thinking is False:
            return wanted
        text = after_thoughts(
            wanted.text, formats.reasoning, formats.control_token_ids, is_open=self._is_thinking is True
        )
        return Grammar(wanted.field, text)

    def _thinks_after(self, prompt: list[int]) -> bool | None:
        """Whether the prompt has opened the thoughts of the answer, or closed them; None: neither."""
        tags = self.service.formats.reasoning
        if tags is None:
            return False
        if self.request.continue_final_message:
            return tags.is_open_after(template_message(self.request.messages[-1])["content"])
        end = self.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        return tags.is_open_after(next((tag for tag in (tags.open, tags.close) if end.endswith(tag)), ""))

    def params(self, room: int) -> SamplingParams:
        if self.max_tokens == 0:
            raise invalid("max_completion_tokens must be at least 1", "max_completion_tokens")
        logprobs = (self.request.top_logprobs or 0) if self.request.logprobs else None
        parser = None if self._use is None else self._use.parser
        return sampling_params(
            self.request,
            max_tokens=self.max_tokens or room,
            logprobs=logprobs,
            prompt_logprobs=self.request.prompt_logprobs,
            shown_special_tokens=() if self._is_plain else self.service.formats.shown_token_ids(parser),
        )

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[ChatChunk]:
        """The role once, then text, then an empty delta with the finish reason."""
        if output.index not in self._outputs:
            first = self._chunk(output.index, Delta(role="assistant", content=""))
            yield first if self._outputs else replace(first, prompt_token_ids=self.shown_ids(self.prompt_ids[0]))
            self._outputs[output.index] = []
        logprobs, token_ids = self._logprobs([output]), self.shown_ids(output.new_token_ids)
        deltas = self._deltas(output)
        if not deltas and (token_ids or (logprobs is not None and logprobs.content)):
            deltas = [Delta(content="")]
        for delta in deltas:
            yield self._chunk(output.index, delta, logprobs=logprobs, token_ids=token_ids)
            logprobs, token_ids = None, UNSET  # what belongs to the tokens comes once
        if output.finish_reason is not None:
            yield self._chunk(output.index, Delta(), ended=output)

    def _deltas(self, output: RequestOutput) -> list[Delta]:
        """What an output adds to its choice's message."""
        if self._is_plain:
            return [Delta(content=output.new_text)] if output.new_text else []
        if output.index not in self._answers:
            self._answers[output.index] = self._new_answer()
        return self._answers[output.index].deltas(output.new_text, ended=output.finished)

    def _new_answer(self) -> Answer:
        use, tags = self._use, self.service.formats.reasoning
        thoughts = None if tags is None else ReasoningParser(tags, inside=bool(self._is_thinking))
        if use is None:
            return Answer(thoughts, None)
        return Answer(thoughts, use.parser(use.signatures), several=use.several)

    def _chat_finish_reason(self, output: RequestOutput) -> str | None:
        """Why a choice ended. A model that chose to call tools stops for their results; a named call is the answer."""
        answer = self._answers.get(output.index)
        if output.finish_reason != "stop" or answer is None or not answer.num_calls:
            return output.finish_reason
        return self.named_call_end if self._use is not None and self._use.named else "tool_calls"

    def _chunk(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: ChatLogprobs | None = None,
        token_ids: list[int] | UnsetType = UNSET,
        ended: RequestOutput | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=None if ended is None else self._chat_finish_reason(ended),
            stop_reason=UNSET if ended is None else ended.stop_reason,
            token_ids=token_ids,
        )
        return ChatChunk(self.id, self.created, self.model, [choice], self.chunk_usage())

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self.id, self.created, self.model, [], usage, metrics=self.usage.metrics())

    def collect(self, prompt_index: int, output: RequestOutput) -> None:
        self._outputs.setdefault(output.index, []).append(output)

    def whole(self, usage: Usage) -> ChatCompletion:
        choices = [self._choice(self._outputs[index]) for index in sorted(self._outputs)]
        found = [output.prompt_logprobs for output in self._outputs[0] if output.prompt_logprobs is not None]
        return ChatCompletion(
            self.id,
            self.created,
            self.model,
            choices,
            usage,
            prompt_logprobs=self.by_token(found[0]) if found else UNSET,
            prompt_token_ids=self.shown_ids(self.prompt_ids[0]),
            metrics=self.usage.metrics(),
        )

    def _choice(self, outputs: list[RequestOutput]) -> ChatChoice:
        last = outputs[-1]
        return ChatChoice(
            index=last.index,
            message=self._assistant_message(outputs),
            logprobs=self._logprobs(outputs),
            finish_reason=self._chat_finish_reason(last),
            stop_reason=last.stop_reason,
            token_ids=self.shown_ids([token for output in outputs for token in output.new_token_ids]),
        )

    def _assistant_message(self, outputs: list[RequestOutput]) -> AssistantMessage:
        if self._is_plain:
            return AssistantMessage("".join(output.new_text for output in outputs))
        return message_of(delta for output in outputs for delta in self._deltas(output))

    def _logprobs(self, outputs: Sequence[RequestOutput]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        positions = [position for output in outputs for position in output.logprobs or ()]
        drafted = [mark for output in outputs for mark in output.drafted_mask] if self.speculates else None
        return chat_logprobs(self.tokenizer, positions, drafted)


def chat_logprobs(
    tokenizer: "Tokenizer", positions: Sequence[TokenLogprobs], drafted: Sequence[bool] | None
) -> ChatLogprobs:
    """Entries for /v1/chat/completions; `drafted` is None on a server that does not speculate."""
    token_bytes = tokenizer.token_bytes()
    marks: Sequence[bool | UnsetType] = drafted if drafted is not None else [UNSET] * len(positions)

    def top(token_id: int, logprob: float) -> TopLogprob:
        spelled = token_bytes[token_id]
        return TopLogprob(spelled.decode("utf-8", "replace"), max(logprob, LOWEST), list(spelled))

    entries = []
    for position, mark in zip(positions, marks, strict=True):
        own = top(position.token_id, position.logprob)
        tops = [top(token_id, logprob) for token_id, logprob in position.top]
        entries.append(TokenLogprob(own.token, own.logprob, own.bytes, tops, mark))
    return ChatLogprobs(entries)


def conversation_ids(
    tokenizer: "Tokenizer",
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    arguments: ChatTemplateArguments | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    check_text: Callable[[str], None] | None = None,
) -> list[int]:
    """Token ids of a conversation. ApiError 400 with the template's own reason when it refuses the messages.

    `check_text` sees the text of a long one before it is tokenized, and may raise.
    """
    plain = [template_message(message) for message in messages]
    variables: dict[str, Any] = {} if arguments is None else msgspec.to_builtins(arguments)
    shown = [tool_object(tool) for tool in tools or ()]
    variables |= dict.fromkeys(TOOL_VARIABLES, shown) if shown else {"tools": None}
    try:
        if check_text is not None and sum(len(message["content"]) for message in plain) > LONG_TEXT:
            check_text(tokenizer.apply_chat_template(plain, add_generation_prompt=False, **variables))
        if continue_final_message:
            return _open_ended_ids(tokenizer, plain, variables)
        prompt = add_generation_prompt is not False
        return tokenizer.chat_token_ids(plain, add_generation_prompt=prompt, **variables)
    except ValueError as error:
        raise invalid(str(error), "messages") from None


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text parts joined, arguments of tool calls as objects, nothing that is null."""
    plain = without_nulls(msgspec.to_builtins(message))
    for name in ("type", "refusal", "annotations", "parsed"):
        plain.pop(name, None)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    plain.setdefault("content", message.refusal or "")
    if thoughts := message.reasoning or message.reasoning_content:
        plain |= {"reasoning": thoughts, "reasoning_content": thoughts}
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = sent_arguments(call["function"]["arguments"])
    return plain


def sent_arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments as templates expect them: an object; or, where a model wrote something else, just that."""
    try:
        return loads_object(text.encode()) if text.strip() else {}
    except ApiError:
        return text


def tools_used(request: ChatRequest, formats: "Formats") -> ToolUse | None:
    """What a request wants of tools, if anything. ApiError 400 as `tool_use` raises it."""
    return tool_use(request, formats) if request.tools and request.tool_choice != "none" else None


def _open_ended_ids(tokenizer: "Tokenizer", messages: list[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
    """Ids of a conversation whose last message is still open.

    What the template puts behind the last message is what stays the same when the message ends in another way.
    """
    content = messages[-1]["content"].rstrip()
    other = [*messages[:-1], messages[-1] | {"content": content + ("y" if content.endswith("x") else "x")}]
    ids = tokenizer.chat_token_ids(messages, add_generation_prompt=False, **variables)
    other_ids = tokenizer.chat_token_ids(other, add_generation_prompt=False, **variables)
    num_behind = 0
    while num_behind < min(len(ids), len(other_ids)) and ids[-1 - num_behind] == other_ids[-1 - num_behind]:
        num_behind += 1
    return ids[: len(ids) - num_behind]
