"""A draft that looks up how a text went on before, and asks a model, if it has one, where that promises less.

The longest end of a sequence that occurs earlier in it is found as deflate finds what to copy: the last two tokens lead
to the latest place where they stood, each place to the one before, and at each the match is followed backwards (RFC
1951, §4). What stood behind the longest match is the guess. Unlike a few n-grams this tells how much a guess is worth:
long matches mostly go on. How likely is learnt for each length from what the target says, drafted or not, so a text
that repeats nothing costs no row of a pass. The rule of suffix decoding: https://arxiv.org/abs/2411.04975.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np

from serve.engine.batch_state import upload
from serve.engine.drafts.base import DraftContext
from serve.engine.drafts.length import ENGINE_MEMORY, INITIAL_WEIGHT, PRIOR_WEIGHT, SEQUENCE_MEMORY
from serve.engine.drafts.model import ModelDraft
from serve.engine.drafts.tree import AtHand, DraftTree, OtherWay, Wanted
from serve.engine.kv_cache import BlockTable
from serve.engine.requests import Sequence

MOST_PLACES = 64
"""Earlier places that are compared, the latest first."""
MOST_MATCHED = 32
"""Tokens of a match that are compared; longer ones are equally good."""
INITIAL_ACCEPTANCES = (0.25, 0.5, 0.7, 0.8, 0.9)
"""Of what follows a match of 2, of at least 4, 8, 16 and 32 tokens, before anything was learnt."""


@dataclass(slots=True)
class Record:
    """Decaying counts of guessed tokens that came, and of first ones that did not."""

    came: float = 0.0
    failed: float = 0.0

    def add(self, num_came: int, num_failed: int, memory: float) -> None:
        self.came = memory * self.came + num_came
        self.failed = memory * self.failed + num_failed

    def acceptance(self, prior: float, weight: float) -> float:
        return (self.came + weight * prior) / (self.came + self.failed + weight)


class Text:
    """A growing text, in which earlier places like its end are found."""

    def __init__(self) -> None:
        self.guess: list[int] = []
        """What may follow the tokens that were indexed, after a match of this `level` of length."""
        self.level = 0
        self.records: defaultdict[int, Record] = defaultdict(Record)
        """What became of its guesses, by the level of their matches."""
        self.num_indexed = 0
        self._latest: dict[tuple[int, int], int] = {}
        """Where the second of two tokens stood last."""
        self._before: list[int] = []
        """For each place, the one before it with the same two tokens; −1: none."""

    def index(self, tokens: list[int]) -> None:
        """Take in what has been added to the tokens."""
        for place in range(self.num_indexed, len(tokens)):
            pair = (tokens[place - 1] if place else -1, tokens[place])
            self._before.append(self._latest.get(pair, -1))
            self._latest[pair] = place
        self.num_indexed = len(tokens)

    def look_up(self, tokens: list[int], most: int) -> None:
        """Guess up to `most` tokens behind these, all of which are indexed."""
        place, longest, found = self._before[-1], 1, -1
        for _ in range(MOST_PLACES):
            if place < 0 or longest == MOST_MATCHED:
                break
            matched = _num_matched(tokens, place)
            if matched > longest:
                longest, found = matched, place
            place = self._before[place]
        self.guess, self.level = [], longest.bit_length() - 2
        if found >= 0:
            period = len(tokens) - 1 - found  # a text that has begun to repeat itself may go on doing so
            self.guess = [tokens[found + 1 + number % period] for number in range(most)]


def _num_matched(tokens: list[int], place: int) -> int:
    """How many tokens up to a place are those up to the end; at least two are."""
    matched, most = 2, min(MOST_MATCHED, place + 1)
    while matched < most and tokens[place - matched] == tokens[-1 - matched]:
        matched += 1
    return matched


class SuffixDraft:
    """Quotes what it finds in the text; guesses by the model that it was given, if any, where it finds too little."""

    model_use: ClassVar[Literal["optional"]] = "optional"
    needs_text: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = True

    def __init__(self, context: DraftContext) -> None:
        self.state = context.sampler.state
        self.model = None if context.model is None else ModelDraft(context)
        self.replaceable = None if self.model is None else self.model.replaceable
        self.runs_passes = self.model is not None
        self.first_tokens = 1 if self.model is None else self.model.first_tokens
        self._texts: WeakKeyDictionary[BlockTable, Text] = WeakKeyDictionary()
        self._records = [Record(INITIAL_WEIGHT * a, INITIAL_WEIGHT * (1 - a)) for a in INITIAL_ACCEPTANCES]
        self._instead = [Record() for _ in INITIAL_ACCEPTANCES]
        """Of the text's guesses, by level, that differ from the model's: what became of their first tokens."""
        self._offers: WeakKeyDictionary[BlockTable, int] = WeakKeyDictionary()
        """Where the latest guess differs, how many tokens the sequence had."""
        self.reads_drafts = self.state.device.type == "cpu"

    def at_hand(self, sequence: Sequence) -> AtHand | None:
        text = self._texts.setdefault(sequence.table, Text())
        if text.num_indexed < sequence.num_tokens:
            came = sequence.tokens[text.num_indexed :]
            if text.guess and self._offers.pop(sequence.table, None) == text.num_indexed:
                self._instead[text.level].add(
                    int(came[0] == text.guess[0]), int(came[0] != text.guess[0]), ENGINE_MEMORY
                )
            self._learn(text, came)
            text.index(sequence.tokens)
            text.look_up(sequence.tokens, self.state.max_drafts)
        return AtHand(len(text.guess), self._acceptance(text)) if text.guess else None

    def _acceptance(self, text: Text) -> float:
        """Of the tokens of its guess."""
        anywhere = self._records[text.level].acceptance(0.0, 0.0)
        return text.records[text.level].acceptance(anywhere, PRIOR_WEIGHT)

    def _learn(self, text: Text, came: list[int]) -> None:
        """Compare the latest guess, whoever was asked then, with what came."""
        pairs = list(zip(text.guess, came, strict=False))
        num_equal = next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs))
        if pairs:
            failed = int(num_equal < len(pairs))
            text.records[text.level].add(num_equal, failed, SEQUENCE_MEMORY)
            self._records[text.level].add(num_equal, failed, ENGINE_MEMORY)

    def propose(self, wanted: list[Wanted]) -> dict[int, DraftTree]:
        asked = [one for one in wanted if not one.at_hand]
        drafts = self.model.propose(asked) if self.model is not None and asked else {}
        if self.reads_drafts:
            drafts = {
                one.sequence.id: self._beside(drafts[one.sequence.id], one)
                for one in asked
                if one.sequence.id in drafts
            }
        if quoting := [one for one in wanted if one.at_hand]:
            guesses = [self._texts[one.sequence.table].guess for one in quoting]
            rows = upload(np.array([one.sequence.batch_row for one in quoting]), self.state.device)
            self.state.write_drafts(rows, upload(np.array(guesses), self.state.device))
        return drafts | {one.sequence.id: DraftTree(one.num_tokens) for one in quoting}

    def _beside(self, draft: DraftTree, wanted: Wanted) -> DraftTree:
        """The model's guess, with the text's as another path where that begins otherwise."""
        sequence = wanted.sequence
        text = self._texts.get(sequence.table)
        if text is None or not text.guess or text.guess[0] == int(self.state.feed[sequence.batch_row, 1]):
            return draft
        self._offers[sequence.table] = sequence.num_tokens
        taken = self._instead[text.level].acceptance(self._acceptance(text) / 2, PRIOR_WEIGHT)
        return replace(draft, others=(OtherWay(tuple(text.guess), taken, self._acceptance(text)),))

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        if self.model is not None:
            self.model.observe(sequence, num_drafted, num_accepted)

    def moved(self, sequence: Sequence) -> None:
        if self.model is not None:
            self.model.moved(sequence)

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        if self.model is not None:
            self.model.copy_pages(copies)

    def rehearse(self) -> None:
        if self.model is not None:
            self.model.rehearse()

    def forget_captures(self) -> None:
        if self.model is not None:
            self.model.forget_captures()

    def num_missing(self, sequence: Sequence) -> int:
        return 0 if self.model is None else self.model.num_missing(sequence)
