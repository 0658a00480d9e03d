"""From rows of logits to tokens, each request by its own parameters and its own random stream.

A distribution depends on a sequence's tokens, a random draw on (seed, choice, position, purpose) and on nothing else.
So a token does not depend on the batch company, on chunking, on preemption or on the device. Nothing here reads what
the device computes: parameters and positions are the host's own, tokens stay where they are drawn.

N rows, V vocabulary, n most draft tokens before a row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.common.rows import ROWS_PER_BLOCK
from kernels.sampling.logit_adjustments import adjust_scores
from kernels.sampling.random import Purpose, exponential
from kernels.sampling.sample import adjusted_probabilities, sample, sample_tokens
from kernels.sampling.token_logprobs import Logprobs
from serve.engine.batch_state import Places
from serve.engine.sequence import Sequence
from serve.engine.transfer import upload
from serve.outputs import TokenLogprobs

GPU_ROWS_PER_BLOCK = 512
"""Enough to keep a GPU busy; more distributions at a time would take memory from the pages."""


class NonFiniteLogitsError(RuntimeError):
    """The model's scores for a request are not numbers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of logits and what they decide, `[N]` int64 each, on the device."""

    places: Tensor
    """Whose next token it is."""
    num_before: Tensor
    """Draft tokens between the sequence's own and the row."""
    positions: Tensor
    """Number of the output token that the row decides, from 0."""
    adjusted: Tensor
    """The places of those whose scores are adjusted, -1 for the others."""
    is_adjusted: bool
    """Whether any is."""
    most_before: int


class Sampler:
    """Draws tokens from rows of logits by the state of the sequences' places."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def rows(self, sequences: list[Sequence], num_before: list[int]) -> Rows:
        """Rows that follow the tokens of `sequences` and as many of their draft tokens."""
        table = []
        for sequence, ahead in zip(sequences, num_before, strict=True):
            position = sequence.num_drawn - sequence.num_prompt_tokens + ahead
            table.append((sequence.place, ahead, position, sequence.place if _adjusts(sequence, position) else -1))
        columns = np.array(table, dtype=np.int64).T.copy()
        places, before, positions, adjusted = upload(columns, self.places.device)
        return Rows(places, before, positions, adjusted, bool((columns[3] >= 0).any()), max(num_before))

    def draw(self, logits: Tensor, rows: Rows) -> Tensor:
        """The target's token for each row, `[N]` int64, of `logits [N, V]`; -1 where the scores are not numbers."""
        scores, places = self._scores(logits, rows), self.places
        return sample_tokens(scores, places.filters(rows.places), places.stream(rows.places, rows.positions))

    def draw_with_probabilities(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """A draft's token for each row, `[N]` int64, and the distributions `[N, V]` that they are drawn from."""
        probabilities = self.probabilities(logits, rows)
        stream = self.places.stream(rows.places, rows.positions)
        return sample(probabilities, exponential(stream, logits.shape[1], Purpose.DRAFT)), probabilities

    def probabilities(self, logits: Tensor, rows: Rows) -> Tensor:
        """`[N, V]` fp32: each row's distribution after bias, penalties, temperature, top-k, top-p and min-p."""
        filters = self.places.filters(rows.places)
        return adjusted_probabilities(self._scores(logits, rows), **filters._asdict())

    def blocks(self, numbers: list[int], *, num_rows: int = 1) -> list[list[int]]:
        """`numbers`, of `num_rows` rows each, in parts whose distributions are made at once."""
        most = ROWS_PER_BLOCK if self.places.device.type == "cpu" else GPU_ROWS_PER_BLOCK
        size = max(1, most // num_rows)
        return [numbers[at : at + size] for at in range(0, len(numbers), size)]

    def _scores(self, logits: Tensor, rows: Rows) -> Tensor:
        if not rows.is_adjusted:
            return logits
        drafted = None
        if rows.most_before:
            drafted = self.places.drafts(rows.places, rows.most_before)
            columns = torch.arange(rows.most_before, device=drafted.device)
            drafted = torch.where(columns < rows.num_before[:, None], drafted, -1)
        state = self.places.adjustments
        return adjust_scores(logits, state, slots=rows.adjusted, positions=rows.positions, drafted=drafted)


def _adjusts(sequence: Sequence, position: int) -> bool:
    params = sequence.params
    return params.has_penalties or bool(params.logit_bias) or position < params.min_tokens


def logprob_entries(tokens: list[int], logprobs: Logprobs, num_top: int) -> list[TokenLogprobs]:
    """What the host makes of log-probabilities `[N]` of tokens, with the `num_top` best of each row."""
    best = zip(logprobs.top_tokens[:, :num_top].tolist(), logprobs.top[:, :num_top].tolist(), strict=True)
    tops = [tuple(zip(ids, values, strict=True)) for ids, values in best]
    columns = zip(tokens, logprobs.chosen.tolist(), logprobs.ranks.tolist(), tops, strict=True)
    return [TokenLogprobs(*column) for column in columns]
