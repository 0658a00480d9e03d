"""Thoughts before the answer: <think>…</think>, or what a family has in place of these tags."""

from dataclasses import dataclass

from serve.http.tools.pieces import Parser, Reasoning, Steps


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family marks its thoughts."""

    open: str
    close: str
    opens_itself: bool = False
    """Answers begin with thoughts even where neither prompt nor answer has the opening tag."""

    def is_open_after(self, text: str) -> bool | None:
        """Whether an answer that goes on from `text` begins amid thoughts, or behind them; None: with them, or not."""
        opened, closed = text.rfind(self.open), text.rfind(self.close)
        if opened == closed:
            return True if self.opens_itself else None
        return opened > closed


class ReasoningParser(Parser):
    """Splits thoughts at the beginning of an answer from the rest of it."""

    def __init__(self, tags: ReasoningFormat, *, inside: bool) -> None:
        """`inside`: the answer begins amid thoughts."""
        super().__init__()
        self._tags = tags
        self._inside = inside

    def _read(self) -> Steps[None]:
        yield from self._skip_space()
        opened = yield from self._try(self._tags.open)
        if opened or self._inside:
            yield from self._skip_space()
            self._kept = self._at
            if (yield from self._until(self._tags.close, kind=Reasoning)):
                yield from self._skip_space()
                self._kept = self._at
        yield from self._give_rest()
