"""From the chunks of a step to work on the device, and to what the host will read of it.

A step in which every sequence decodes is launched as a whole where it can be captured (serve/engine/decode.py), any
other as a ragged batch.
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kernels.sampling.token_logprobs import Logprobs, token_logprobs
from serve.engine.batch_state import Download, feed_reference, feed_references, upload
from serve.engine.decode import Batch, UniformSteps
from serve.engine.drafts.tree import NO_DRAFT, DraftTree
from serve.engine.requests import Sequence
from serve.engine.runner import Runner, SequenceInput
from serve.engine.sampling import (
    PendingSamples,
    Sampled,
    Sampler,
    SequenceRows,
    logprob_entries,
    meant_by,
    pending_samples,
    select,
)
from serve.engine.scheduler import Chunk

PROMPT_ROWS_PER_BLOCK = 64
"""Rows of logits at a time when a prompt's log-probabilities are wanted: never the whole prompt times vocabulary."""


@dataclass(frozen=True, slots=True)
class Work:
    """A scheduled chunk and the draft tokens to verify behind it."""

    chunk: Chunk
    sequence: Sequence
    draft: DraftTree = NO_DRAFT

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that the next one can be drawn."""
        return self.chunk.start + self.chunk.num_tokens == self.sequence.num_drawn

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted from this chunk."""
        return self.sequence.prompt_logprobs is not None

    def input(self, feed_width: int) -> SequenceInput:
        sequence, start, num_tokens = self.sequence, self.chunk.start, self.chunk.num_tokens
        tokens = sequence.tokens[start : start + num_tokens]
        # What the host does not know yet, its own last token or draft tokens, is in the feed.
        first = 1 if len(tokens) == num_tokens else 0
        columns = range(first, 1 + self.draft.num_tokens)
        tokens += [feed_reference(sequence.batch_row, column, feed_width) for column in columns]
        num_rows = len(tokens) if self.scores_prompt else self.samples * (1 + self.draft.num_tokens)
        return SequenceInput(tokens, start, sequence.table, num_rows, sequence.adapter)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that has been launched, and what the host will know of it."""

    samples: list[PendingSamples] = field(default_factory=list)
    prompt_scores: list[tuple[Sequence, list[int], Download]] = field(default_factory=list)
    """Prompt tokens in order, and their log-probabilities on the way."""

    def read(self) -> list[Sampled]:
        """Wait for the device, and read what it found, in the order of the batch."""
        found: dict[int, Sampled] = {}
        for group in self.samples:
            found |= group.read()
        for sequence, tokens, download in self.prompt_scores:
            entries = logprob_entries(tokens, Logprobs(*download.wait()), sequence.params.prompt_logprobs or 0)
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += entries
        return [found[number] for number in sorted(found)]


class Launcher:
    """Launches passes of the target."""

    def __init__(self, runner: Runner, sampler: Sampler, steps: UniformSteps | None) -> None:
        """`steps`: where steps can be captured."""
        self.runner, self.sampler, self.steps = runner, sampler, steps
        self.has_prepared = False
        """Whether the latest pass also did what later ones like it need not do again."""

    def launch(self, work: list[Work]) -> PendingStep:
        """One forward pass. Raises what the model raises; batch rows are written and up to date after."""
        self.sampler.state.add(s for item in work if item.samples for s in (item.sequence, *item.sequence.siblings))
        if self.steps is None or not self._is_uniform(work):
            pending = self._launch_ragged(work)
            self.has_prepared = self.runner.has_prepared
        else:
            pending = self._launch_uniform(work, self.steps)
            self.has_prepared = self.steps.graphs.has_prepared
        return pending

    def _is_uniform(self, work: list[Work]) -> bool:
        """Whether every sequence decodes; routed layers take no padding behind a shorter draft."""
        decode = all(
            item.chunk.num_tokens == 1 and item.samples and not item.sequence.siblings and not item.scores_prompt
            for item in work
        )
        is_routed = bool(self.runner.model.config.routed_attention)
        return decode and (not is_routed or len({item.draft.num_tokens for item in work}) == 1)

    def _launch_uniform(self, work: list[Work], steps: UniformSteps) -> PendingStep:
        sequences, drafts = [item.sequence for item in work], [item.draft for item in work]
        batch = Batch(
            sequences,
            self._tokens(sequences, 1 + max(draft.num_tokens for draft in drafts)),
            starts=[item.chunk.start for item in work],
            last=[draft.num_tokens for draft in drafts],
            counts=[meant_by(draft) for draft in drafts],
        )
        if any(s.mask is not None or d.distributions for s, d in zip(sequences, drafts, strict=True)):
            (logits,) = steps.launch(batch, samples=False)
            q = batch.tokens.shape[1]
            asked = [SequenceRows(item.sequence, at * q, item.draft) for at, item in enumerate(work)]
            return PendingStep(self.sampler.sample(logits, asked))
        found, logits = steps.launch(batch, samples=True)
        return PendingStep([pending_samples(list(range(len(work))), sequences, found, logits)])

    def _tokens(self, sequences: list[Sequence], q: int) -> np.ndarray:
        """The last of each and its draft tokens, `[n, q]`; what the host does not know is in the feed."""
        rows = np.array([sequence.batch_row for sequence in sequences])
        tokens = feed_references(rows[:, None], np.arange(q), self.runner.feed.shape[1])
        tokens[:, 0] = [
            tokens[at, 0] if sequence.num_unread else sequence.tokens[-1] for at, sequence in enumerate(sequences)
        ]
        return tokens

    def _launch_ragged(self, work: list[Work]) -> PendingStep:
        inputs = [item.input(self.runner.feed.shape[1]) for item in work]
        hidden = self.runner.hidden(inputs)
        step, first = PendingStep(), 0
        asked: list[SequenceRows] = []
        rows: list[int] = []
        for item, own in zip(work, inputs, strict=True):
            if item.samples:
                asked.append(SequenceRows(item.sequence, len(rows), item.draft))
                asked += [SequenceRows(sibling, len(rows)) for sibling in item.sequence.siblings]
                rows += range(first + own.num_rows - 1 - item.draft.num_tokens, first + own.num_rows)
            if item.scores_prompt:
                self._score_prompt(step, item, hidden[first : first + own.num_rows])
            first += own.num_rows
        if asked:
            logits = self.runner.logits(hidden if len(rows) == len(hidden) else select(hidden, rows))
            step.samples.extend(self.sampler.sample(logits, asked))
        return step

    def _score_prompt(self, step: PendingStep, work: Work, hidden: Tensor) -> None:
        """`hidden [num_tokens, D]` of the chunk; each row scores the token after it."""
        sequence, start = work.sequence, work.chunk.start
        known = len(sequence.prompt_logprobs or ())
        first = max(known, start + 1)  # a chunk that is computed again after preemption has been scored
        stop = min(start + work.chunk.num_tokens + 1, sequence.num_prompt_tokens)
        for at in range(first, stop, PROMPT_ROWS_PER_BLOCK):
            tokens = sequence.tokens[at : min(at + PROMPT_ROWS_PER_BLOCK, stop)]
            logits = self.runner.logits(hidden[at - 1 - start : at - 1 - start + len(tokens)])
            wanted = upload(np.array(tokens), logits.device)
            logprobs = token_logprobs(logits, wanted, sequence.params.prompt_logprobs or 0)
            step.prompt_scores.append((sequence, tokens, Download(list(logprobs))))
