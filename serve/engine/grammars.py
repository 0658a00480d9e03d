"""What grammars of requests allow: compiled once, then followed token by token, for each choice on its own.

A choice's matcher stands behind the latest tokens that it was asked about, draft tokens included. The next question
takes back what was not accepted and goes on from there, so that an accepted draft is read once.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import cached_property

import numpy as np
from llguidance import LLMatcher

from model.text.tokenizer import Tokenizer
from serve.engine.token_mask import TokenMask
from serve.grammar import GrammarCompiler, GrammarError, Vocabulary, fill, first_sentence

MAX_KEPT = 64
"""Compiled grammars that are kept, the latest used ones."""


class GrammarMask(TokenMask):
    """What a grammar allows after one choice's output."""

    def __init__(self, matcher: LLMatcher) -> None:
        """`matcher`: at the beginning of the output, and nobody else's."""
        self._matcher = matcher
        self._num_output = 0
        """Output tokens that it has read."""
        self._ahead: list[int] = []
        """What it has read behind them: draft tokens."""

    def fill(self, row: np.ndarray, output: SequenceOf[int], drafted: SequenceOf[int]) -> None:
        if not self._read(output, drafted):
            row.fill(-1)
            return
        fill(self._matcher, row)
        if self._matcher.is_error() or not row.any():
            raise GrammarError(f"the grammar cannot go on: {first_sentence(self._matcher.get_error())}")

    def _read(self, output: SequenceOf[int], drafted: SequenceOf[int]) -> bool:
        """Stand behind these tokens. False, and anywhere, if the grammar forbids a draft token."""
        wanted = [*output[self._num_output :], *drafted]
        num_same = 0
        while num_same < min(len(self._ahead), len(wanted)) and self._ahead[num_same] == wanted[num_same]:
            num_same += 1
        if num_same < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - num_same)
        num_read = num_same + self._matcher.try_consume_tokens(wanted[num_same:])
        num_new = len(output) - self._num_output
        if num_read < num_new:
            raise GrammarError("the output has left its grammar")
        self._num_output, self._ahead = len(output), wanted[num_new:num_read]
        return num_read == len(wanted)


class Grammars:
    """The compiled grammars of an engine; one thread may compile while another asks for masks."""

    def __init__(self, tokenizer: Tokenizer, *, num_scores: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._num_scores, self._eos_token_ids = tokenizer, num_scores, tuple(eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(
            Vocabulary.of(self._tokenizer, num_scores=self._num_scores, eos_token_ids=self._eos_token_ids)
        )

    def prepare(self) -> None:
        """Read the vocabulary now, which takes some tenths of a second, and not when the first grammar comes."""
        if self._eos_token_ids:
            self.compile("start: /.*/")

    def has(self, grammar: str) -> bool:
        """Whether its mask is there without compiling."""
        return grammar in self._compiled

    def compile(self, grammar: str) -> LLMatcher:
        """At the beginning of an output; to be copied. ValueError with one sentence for what cannot be compiled."""
        found = self._compiled.pop(grammar, None)
        if found is None:
            found = self._compiler.compile(grammar)
        self._compiled[grammar] = found
        while len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return found

    def mask(self, grammar: str) -> GrammarMask:
        """Of a new choice. ValueError as in `compile`."""
        return GrammarMask(self.compile(grammar).deep_copy())
