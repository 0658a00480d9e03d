"""What clients ask of a simulated cluster: conversations that begin in bursts, with system prompts that many share.

A token is a number that says whose it is: prompts begin alike as far as their pages would. Times are seconds.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

BLOCK_TOKENS = 64
"""Of a block as routers see it, four KV pages; serve/replicas.py counts bytes of text instead."""


@dataclass(frozen=True)
class Turn:
    """A client's message, and the answer to it, in tokens."""

    message: int
    answer: int
    pause_s: float
    """Between the answer before and the message."""


@dataclass(frozen=True)
class Conversation:
    """Turns, each of which is asked with all that was said before."""

    number: int
    begin_s: float
    system: int
    """Which system prompt."""
    system_tokens: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Traffic:
    """From which traces are drawn; lengths are exponential with these means, at least one token."""

    conversations: int
    seconds: float
    """In which they begin."""
    bursts: tuple[tuple[float, float, float], ...] = ()
    """(begin, end, factor): there they begin so many times as often."""
    systems: int = 16
    """System prompts; the k-th is chosen 1/k as often as the first."""
    system_tokens: int = 1_024
    turns: int = 3
    """Of the longest conversations; all numbers up to it are as likely."""
    message_tokens: int = 96
    answer_tokens: int = 128
    most_tokens: int = 512
    """Of a message, and of an answer."""
    pause_s: float = 4.0

    def trace(self, seed: int) -> list[Conversation]:
        """Conversations in the order in which they begin."""
        draw = random.Random(seed)
        begins = sorted(self._begin(draw) for _ in range(self.conversations))
        return [self._conversation(number, begin_s, draw) for number, begin_s in enumerate(begins)]

    @cached_property
    def _pieces(self) -> list[tuple[float, float, float]]:
        """(begin, end, how many begin there), of time between two changes of the rate."""
        edges = sorted({0.0, self.seconds, *(edge for begin, end, _ in self.bursts for edge in (begin, end))})
        pieces = []
        for begin, end in pairwise(edges):
            factors = [factor for first, last, factor in self.bursts if first <= begin < last]
            pieces.append((begin, end, (end - begin) * max(factors, default=1.0)))
        return pieces

    def _begin(self, draw: random.Random) -> float:
        [(begin, end, _)] = draw.choices(self._pieces, [share for _, _, share in self._pieces])
        return draw.uniform(begin, end)

    def _conversation(self, number: int, begin_s: float, draw: random.Random) -> Conversation:
        [system] = draw.choices(range(self.systems), [1 / (rank + 1) for rank in range(self.systems)])
        turns = [
            Turn(
                self._length(draw, self.message_tokens),
                self._length(draw, self.answer_tokens),
                draw.expovariate(1 / self.pause_s) if turn else 0.0,
            )
            for turn in range(draw.randint(1, self.turns))
        ]
        return Conversation(number, begin_s, system, self.system_tokens, tuple(turns))

    def _length(self, draw: random.Random, mean: int) -> int:
        return min(self.most_tokens, 1 + int(draw.expovariate(1 / mean)))


@dataclass(eq=False)
class Request:
    """One turn on its way, and when what came of it."""

    number: int
    conversation: Conversation
    turn: int
    arrival_s: float
    first_s: float | None = None
    """When its first token came."""
    end_s: float | None = None
    is_lost: bool = False
    num_tries: int = 1

    @property
    def answer(self) -> int:
        return self.conversation.turns[self.turn].answer

    @cached_property
    def prompt(self) -> list[int]:
        """All tokens of the conversation so far: those of a system prompt are alike, all others its own."""
        talk = self.conversation
        said = sum(turn.message + turn.answer for turn in talk.turns[: self.turn]) + talk.turns[self.turn].message
        return [talk.system] * talk.system_tokens + [1_000_000 + talk.number] * said

    @cached_property
    def blocks(self) -> list[int]:
        """As `serve.replicas.PrefixRouter` takes them."""
        return blocks_of(self.prompt)


def blocks_of(tokens: Sequence[int]) -> list[int]:
    """Of each full block a number that stands for it and all before it."""
    blocks, last = [], 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        last = hash((last, *tokens[end - BLOCK_TOKENS : end]))
        blocks.append(last)
    return blocks
