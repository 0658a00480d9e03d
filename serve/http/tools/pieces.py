"""From text that arrives in pieces to pieces of an answer: what all parsers share.

A parser is written as one walk through the whole text. Where it needs text that has not come yet it yields, and goes
on there when there is more. It decides nothing by where a piece happens to end, so any cut gives the same answer.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A walk that yields where it needs more text, and returns a result."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a tool call."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Text of the JSON object that the latest call is given."""

    text: str


Piece = Content | Reasoning | Call | Arguments


class Parser(ABC):
    """Takes one answer apart, piece by piece. A format is one subclass, whose `_read` walks through the text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """What is before this place in the text has been read."""
        self._kept = 0
        """What is before this place has been given out, or is of the format alone."""
        self._ended = False
        self._pieces: list[Piece] = []
        self._steps = self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """The walk: reads all the text, and gives out pieces."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that become certain with this text. What may be of the format is held back until that is clear."""
        self._text = self._text[self._kept :] + text
        self._at -= self._kept
        self._kept = 0
        next(self._steps)
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        self._ended = True
        for _ in self._steps:
            pass
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # The parts of a walk.

    def _more(self) -> Steps[bool]:
        """Wait for more text; False when there will be none."""
        size = len(self._text) - self._kept
        while len(self._text) - self._kept <= size and not self._ended:
            yield
        return len(self._text) - self._kept > size

    def _next(self) -> Steps[str]:
        """The next character, which stays unread; "" at the end."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _skip_space(self) -> Steps[str]:
        """Read white space; the character behind it, "" at the end."""
        while (character := (yield from self._next())).isspace():
            self._at = len(self._text) - len(self._text[self._at :].lstrip())
        return character

    def _try(self, word: str) -> Steps[bool]:
        """Read `word` if the text goes on with it."""
        while len(self._text) - self._at < len(word) and word.startswith(self._text[self._at :]):
            if not (yield from self._more()):
                return False
        found = self._text.startswith(word, self._at)
        self._at += len(word) if found else 0
        return found

    def _until(self, *words: str, kind: type[Content] | type[Reasoning] = Content) -> Steps[str]:
        """Give out text up to the first of `words` and the space before it, and read both; "" at the text's end."""
        pattern = re.compile("|".join(map(re.escape, words)))
        while (match := pattern.search(self._text, self._at)) is None:
            self._give(kind, min(_start_of_undecided(self._text, self._at, word) for word in words))
            if not (yield from self._more()):
                self._give(kind, len(self._text))
                return ""
        self._give(kind, self._at + len(self._text[self._at : match.start()].rstrip()))
        self._at = match.end()
        return match.group()

    def _give(self, kind: type[Content] | type[Reasoning] | type[Arguments], end: int) -> None:
        """Give out what was not given out before `end`."""
        if end > self._kept:
            self._pieces.append(kind(self._text[self._kept : end]))
        self._at = self._kept = end

    def _give_rest(self) -> Steps[None]:
        """All that is left is content."""
        self._give(Content, len(self._text))
        while (yield from self._more()):
            self._give(Content, len(self._text))


def _start_of_undecided(text: str, start: int, word: str) -> int:
    """Where the end of `text` begins that may be white space before `word`, or the beginning of `word`."""
    for length in range(min(len(word) - 1, len(text) - start), 0, -1):
        if text.endswith(word[:length]):
            break
    else:
        length = 0
    return start + len(text[start : len(text) - length].rstrip())
