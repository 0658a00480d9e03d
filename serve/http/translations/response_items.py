"""What a response of /v1/responses is made of: messages, thoughts and calls, and the events by which they grow."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve.http.responses import Delta, TokenLogprob, ToolCallDelta
from serve.http.translations.base import said

Event = tuple[str, dict[str, Any]]
"""The part of an event's type behind "response.", and its fields."""


class OutputText(msgspec.Struct, frozen=True):
    text: str
    logprobs: list[TokenLogprob]
    annotations: tuple[()] = ()
    type: str = "output_text"


class ReasoningText(msgspec.Struct, frozen=True):
    text: str
    type: str = "reasoning_text"


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thought."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: tuple[()] = ()


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A function that the model calls."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


Item = OutputMessage | ReasoningItem | FunctionCallItem


@dataclass
class GrowingText:
    """A message, or thoughts, while it is written."""

    id: str
    is_thoughts: bool
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def stem(self) -> str:
        """What its events are called by."""
        return "reasoning_text" if self.is_thoughts else "output_text"

    def part(self) -> OutputText | ReasoningText:
        return ReasoningText(self.text) if self.is_thoughts else OutputText(self.text, list(self.logprobs))

    def item(self, status: str, *, is_new: bool = False) -> Item:
        """`is_new`: without any content yet."""
        if self.is_thoughts:
            return ReasoningItem(self.id, status, [] if is_new else [ReasoningText(self.text)])
        return OutputMessage(self.id, status, [] if is_new else [OutputText(self.text, list(self.logprobs))])


@dataclass
class GrowingCall:
    """A call while it is written."""

    id: str
    call_id: str
    name: str
    arguments: str = ""

    def item(self, status: str) -> FunctionCallItem:
        return FunctionCallItem(self.id, status, self.call_id, self.name, self.arguments)


class ItemStream:
    """The items of one response as the chat's deltas let them grow."""

    def __init__(self, unique: str) -> None:
        """`unique` makes the items' ids."""
        self.items: list[Item] = []
        """Those that are complete."""
        self._unique = unique
        self._open: GrowingText | GrowingCall | None = None

    def add(self, delta: Delta, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        """What a delta brings; log-probabilities are shown with text alone."""
        if thoughts := said(delta.reasoning):
            yield from self._add_text(thoughts, [], is_thoughts=True)
        text = said(delta.content)
        if text or (logprobs and not delta.tool_calls and not delta.reasoning):
            yield from self._add_text(text, logprobs, is_thoughts=False)
        for call in delta.tool_calls or ():
            yield from self._add_call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """The end of the response; one that says nothing has a message without words."""
        if not self.items and self._open is None:
            yield from self._begin_text(is_thoughts=False)
        yield from self._close(status)

    def _place(self) -> dict[str, Any]:
        """Where the open item is."""
        return {"item_id": None if self._open is None else self._open.id, "output_index": len(self.items)}

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}-{self._unique}-{len(self.items)}"

    def _add_text(self, text: str, logprobs: list[TokenLogprob], *, is_thoughts: bool) -> Iterator[Event]:
        if not isinstance(self._open, GrowingText) or self._open.is_thoughts != is_thoughts:
            yield from self._close("completed")
            yield from self._begin_text(is_thoughts=is_thoughts)
        growing = self._open
        if isinstance(growing, GrowingText):
            growing.text += text
            growing.logprobs += logprobs
            more = {} if is_thoughts else {"logprobs": logprobs}
            yield f"{growing.stem}.delta", self._place() | {"content_index": 0, "delta": text} | more

    def _begin_text(self, *, is_thoughts: bool) -> Iterator[Event]:
        growing = self._open = GrowingText(self._next_id("rs" if is_thoughts else "msg"), is_thoughts)
        item = growing.item("in_progress", is_new=True)
        yield "output_item.added", {"output_index": len(self.items), "item": item}
        yield "content_part.added", self._place() | {"content_index": 0, "part": growing.part()}

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id:
            yield from self._close("completed")
            self._open = GrowingCall(self._next_id("fc"), said(call.id), said(call.function.name))
            item = self._open.item("in_progress")
            yield "output_item.added", {"output_index": len(self.items), "item": item}
        arguments = said(call.function.arguments)
        if arguments and isinstance(self._open, GrowingCall):
            self._open.arguments += arguments
            yield "function_call_arguments.delta", self._place() | {"delta": arguments}

    def _close(self, status: str) -> Iterator[Event]:
        growing = self._open
        if growing is None:
            return
        if isinstance(growing, GrowingCall):
            whole = {"name": growing.name, "arguments": growing.arguments}
            yield "function_call_arguments.done", self._place() | whole
        else:
            place = self._place() | {"content_index": 0}
            more = {} if growing.is_thoughts else {"logprobs": growing.logprobs}
            yield f"{growing.stem}.done", place | {"text": growing.text} | more
            yield "content_part.done", place | {"part": growing.part()}
        item = growing.item(status)
        yield "output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)
        self._open = None
