"""What steps are captured for: of how many sequences or tokens, and what ends those of equally many tokens each.

B sequences of a captured size, q tokens of each.
"""

from enum import Enum, auto
from typing import NamedTuple

from serve.engine.drafts.tree import DraftTree
from serve.engine.requests import Sequence

MOST_DISTRIBUTIONS = 128
"""Distributions that a captured step may make; more take their turns in the same memory, behind it."""
_STEP = 8
"""Above this, every multiple of it is a size."""
MOST_TOKENS = 1024
"""Of a pass that is captured where sequences have different numbers of tokens: with more, a GPU computes for longer
than the host launches (an H200 1,024 tokens of 8B in 24 ms, 32 layers 20 to 30 ms)."""
_FEWEST_TOKENS = 16
BYTES_PER_GRAPH = 32 * 2**20
"""Set aside for each that is captured before the first request; other engines report 24 to 28 MiB for theirs."""


def captured_size(num_sequences: int) -> int:
    """The size that so many sequences are filled up to: a power of two, from 8 on a multiple of 8."""
    if num_sequences >= _STEP:
        return -(-num_sequences // _STEP) * _STEP
    return 1 << (num_sequences - 1).bit_length()


def captured_sizes(most: int) -> list[int]:
    """All of them that `most` sequences may need, the largest first: the others find room in its memory."""
    return sorted({captured_size(number) for number in range(1, most + 1)}, reverse=True)


def captured_tokens(num_tokens: int) -> int:
    """The size that a pass over so many tokens is filled up to: by an eighth more on average where tokens cost time.

    Multiples of 32 up to 256, whose weights take longer to read than their products; then four sizes an octave.
    """
    if num_tokens <= _FEWEST_TOKENS:
        return _FEWEST_TOKENS
    step = max(32, 1 << ((num_tokens - 1).bit_length() - 3))
    return -(-num_tokens // step) * step


def captured_token_counts(most: int) -> list[int]:
    """All of them, up to `most` tokens and MOST_TOKENS, the largest first."""
    most = min(most, MOST_TOKENS)
    return sorted({size for n in range(1, most + 1) if (size := captured_tokens(n)) <= most}, reverse=True)


class End(Enum):
    """What a step does behind its pass."""

    LOGITS = auto()
    """Nothing: masks or rules that differ are for whoever launched it."""
    MATCHING = auto()
    """Draw the target's tokens, and match draft tokens with them."""
    REJECTION = auto()
    """Verify draft tokens by rejection."""
    DRAFT = auto()
    """Draw a draft's tokens, to be matched."""
    DRAFT_FOR_REJECTION = auto()
    """The same, to be verified by rejection."""

    @property
    def is_draft(self) -> bool:
        return self in (End.DRAFT, End.DRAFT_FOR_REJECTION)


def draft_end(sequences: tuple[Sequence, ...], by_rejection: set[bool]) -> End:
    """Of a pass of the draft for these sequences, whose tokens will be verified by one rule or by either."""
    if len(by_rejection) > 1 or any(sequence.mask is not None for sequence in sequences):
        return End.LOGITS
    if by_rejection == {False}:
        return End.DRAFT
    return End.DRAFT_FOR_REJECTION if captured_size(len(sequences)) <= MOST_DISTRIBUTIONS else End.LOGITS


def target_end(sequences: tuple[Sequence, ...], drafts: list[DraftTree], q: int) -> End:
    """Of a pass of the target over these sequences and their draft tokens, q − 1 at most."""
    if q == 1 or not any(draft.by_rejection for draft in drafts):
        return End.MATCHING
    for sequence, draft in zip(sequences, drafts, strict=True):
        # Without draft tokens either rule is plain sampling, by different draws.
        may_follow = sequence.verifies_by_rejection or sequence.params.is_greedy
        if not draft.by_rejection and (draft.num_tokens or not may_follow):
            return End.LOGITS
    return End.REJECTION if captured_size(len(sequences)) * q <= MOST_DISTRIBUTIONS else End.LOGITS


class Shape(NamedTuple):
    """What a step is captured for."""

    size: int
    """B"""
    num_tokens: int
    """q"""
    end: End
    has_adapters: bool
    bias_width: int
    """Room for biases where scores are adjusted; −1 where nobody's are."""
    cuts_tail: bool
    """Whether anybody asks for top-k or top-p."""
