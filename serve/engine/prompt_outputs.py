"""What requests ask of their prompts: log-probabilities of the tokens, and one embedding of them all.

A prompt is computed in chunks, again after preemption perhaps; each of its tokens is reported once.

T tokens of a chunk, R ≤ T the last of them, whose hidden states are wanted, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.sampling.token_logprobs import Logprobs, token_logprobs
from serve.engine.batch_state import Download, upload
from serve.engine.requests import Sequence
from serve.engine.sampling import logprob_entries

PROMPT_ROWS_PER_BLOCK = 64
"""Rows of logits at a time when a prompt's log-probabilities are wanted: never the whole prompt times vocabulary."""


class PromptScores(NamedTuple):
    """Log-probabilities of some prompt tokens, in order, on their way to the host."""

    sequence: Sequence
    tokens: list[int]
    logprobs: Download

    def read(self) -> None:
        """Wait for the device, and add them to the sequence."""
        sequence = self.sequence
        entries = logprob_entries(self.tokens, Logprobs(*self.logprobs.wait()), sequence.params.prompt_logprobs or 0)
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += entries


class PromptSum(NamedTuple):
    """The sum of a prompt's hidden states up to a position, from where the one before ended."""

    sequence: Sequence
    stop: int
    hidden: Download
    """`[D]` fp32"""

    def read(self) -> None:
        """Wait for the device, and add it to the sequence."""
        (rows,) = self.hidden.wait()
        self.sequence.pooled = rows.numpy() + (0 if self.sequence.pooled is None else self.sequence.pooled)
        self.sequence.num_pooled = self.stop


def score_prompt(
    sequence: Sequence, start: int, rows: range, logits_of: Callable[[int, int], Tensor]
) -> Iterator[PromptScores]:
    """Of a chunk from `start` on, whose tokens are `rows` of a pass; each row scores the token after it.

    `logits_of`: those of the pass's rows [first, stop), `[stop - first, V]`.
    """
    first = max(len(sequence.prompt_logprobs or ()), start + 1)  # a chunk that is computed again has been scored
    stop = min(start + len(rows) + 1, sequence.num_prompt_tokens)
    for at in range(first, stop, PROMPT_ROWS_PER_BLOCK):
        tokens = sequence.tokens[at : min(at + PROMPT_ROWS_PER_BLOCK, stop)]
        row = rows.start + at - 1 - start
        logits = logits_of(row, row + len(tokens))
        wanted = upload(np.array(tokens), logits.device)
        logprobs = token_logprobs(logits, wanted, sequence.params.prompt_logprobs or 0)
        yield PromptScores(sequence, tokens, Download(list(logprobs)))


def pool_prompt(sequence: Sequence, start: int, num_tokens: int, hidden: Tensor) -> Iterator[PromptSum]:
    """`hidden [R, D]` of the last of a chunk's tokens, from `start` on: what it adds to the prompt's embedding."""
    end = start + num_tokens
    first_row = end - len(hidden)
    first = max(start, sequence.num_pooled)  # a chunk that is computed again is in already
    if sequence.params.pooling == "last":
        first = max(first, sequence.num_prompt_tokens - 1)
    stop = min(end, sequence.num_prompt_tokens)
    if first < stop:
        rows = hidden[first - first_row : stop - first_row]
        yield PromptSum(sequence, stop, Download([rows.float().sum(dim=0)]))
