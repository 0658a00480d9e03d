"""What drawing tokens takes, on the device: one row for each running sequence, from its first token to its last.

A row is written when a sequence takes it. From then on steps keep it up to date by themselves, so that a step needs
nothing that the host has not read yet: the token to compute next, the counts behind the penalties and the text that
drafts may look into are where the step before has left them. And how anything gets there and back without a wait: on
CUDA uploads leave from pinned memory and downloads end there, in the order of the stream; on the CPU nothing moves.

S batch rows, V vocabulary, K most draft tokens, N rows of logits.
"""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.logit_adjustments import ALWAYS, IN_PROMPT, RequestState, count_tokens
from kernels.sampling.random import Stream
from kernels.sampling.sample import Filters
from serve.engine.requests import Sequence

NOBODY = -1


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


_NUM_STAGING = 3
"""One for the step that is being written, two for those whose upload may still be under way."""


class Staged:
    """int32 on the device that stays where it is, for what steps bring from the host."""

    def __init__(self, values: np.ndarray, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.values = torch.tensor(values, device=device)
        self._staging = [torch.zeros_like(self.values, device="cpu", pin_memory=on_gpu) for _ in range(_NUM_STAGING)]
        self._places = [np.asarray(staging) for staging in self._staging]
        """The same memory."""
        self._left = [torch.cuda.Event() for _ in self._staging] if on_gpu else []
        self._turn = 0

    def upload(self, values: np.ndarray) -> None:
        """The first of them are these from here on.

        Waits for the device where it is as many steps behind as there are places to upload from.
        """
        self._turn, n = (self._turn + 1) % _NUM_STAGING, len(values)
        if self._left:
            self._left[self._turn].synchronize()
        self._places[self._turn][:n] = values
        self.values[:n].copy_(self._staging[self._turn][:n], non_blocking=True)
        if self._left:
            self._left[self._turn].record()


class Download:
    """Tensors on their way to the host, where they are needed later."""

    def __init__(self, tensors: list[Tensor]) -> None:
        """All of one device."""
        # To the host and without blocking means into pinned memory. The next step may overwrite what this one found.
        self._copies = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors]
        self._arrival = None
        if any(tensor.is_cuda for tensor in tensors):
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host; the one place where the host waits for the device."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copies


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that it was asked for. Raises RuntimeError when it has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class BatchState:
    """State by batch row; `Sequence.batch_row` says which one is whose."""

    def __init__(
        self, num_rows: int, vocab_size: int, *, max_drafts: int, device: torch.device, num_kept_tokens: int = 0
    ) -> None:
        """`max_drafts`: K; `num_kept_tokens`: the most tokens of a sequence whose text is kept, 0 to keep none."""
        self.device = device
        self.vocab_size = vocab_size
        self.max_drafts = max_drafts
        self.spare_row = num_rows
        """Nobody's: what a step of a fixed size computes beyond its sequences goes there."""
        num_rows += 1
        self.feed = torch.zeros(num_rows, 1 + max_drafts, dtype=torch.int64, device=device)
        """[S, 1 + K]: the latest token of each sequence, then the draft tokens of this step."""
        self.text: Tensor | None = None
        """[S, most tokens + K + 1]: what drafts may look into. Behind a sequence's tokens lies anything."""
        if num_kept_tokens:
            self.text = torch.zeros(num_rows, num_kept_tokens + max_drafts + 1, dtype=torch.int32, device=device)
        self._settings = torch.zeros(6, num_rows, device=device)
        """Rows: temperature, top-p, min-p; repetition, frequency and presence penalty."""
        self.draft_counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """[S]: how many of a sequence's draft tokens are meant, where the host does not know."""
        self._keys = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        """Rows: seed, choice, top-k."""
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._biases = _no_biases(num_rows, 1, device)
        self.facts = np.zeros((num_rows, 5), dtype=np.int64)
        """[S, 5], on the host: slot of the adapter, prompt tokens, whether all scores are adjusted, min_tokens, whether
        top-k or top-p is asked for."""
        self._holders: list[tuple[int, int] | None] = [None] * self.spare_row
        """Whose state the rows hold: ids, and how often they had given back all pages when they took the row."""
        self.num_writes = 0
        """How often rows have been written, or lost what they held: what is known of them by then, holds no more."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Write the rows of those sequences that have newly taken theirs; all their tokens are known to the host."""
        new = [sequence for sequence in sequences if self._holders[sequence.batch_row] != _holder(sequence)]
        if not new:
            return
        self.num_writes += 1
        rows = self._upload([sequence.batch_row for sequence in new], np.int64)
        params = [sequence.params for sequence in new]
        settings = [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for p in params
        ]
        keys = [(sequence.seed, sequence.index, sequence.params.top_k) for sequence in new]
        self._settings.index_copy_(1, rows, self._upload(settings, np.float32).T)
        self._keys.index_copy_(1, rows, self._upload(keys, np.int64).T)
        for sequence, p in zip(new, params, strict=True):
            always, num_prompt_tokens = p.adjusts_all_scores, sequence.num_prompt_tokens
            self.facts[sequence.batch_row] = sequence.adapter_slot, num_prompt_tokens, always, p.min_tokens, p.cuts_tail
            if p.adjusts_scores:
                self._write_biases(sequence)
            if p.has_penalties:
                self._write_counts(sequence)
            if self.text is not None:
                self.text[sequence.batch_row, : sequence.num_tokens] = self._upload(sequence.tokens, np.int32)
            self._holders[sequence.batch_row] = _holder(sequence)

    def forget_others(self, rows: set[int]) -> None:
        """Have every row but these written again before its next use."""
        self._holders = [holder if row in rows else None for row, holder in enumerate(self._holders)]
        self.num_writes += 1

    def invalidate(self) -> None:
        """Have every row written again before its next use: after a failure, steps may have left anything in them."""
        self._holders = [None] * len(self._holders)
        self.num_writes += 1

    @property
    def bias_width(self) -> int:
        """Room for the biases of a sequence; when it grows, they have moved."""
        return self._biases[0].shape[1]

    def filters(self, rows: Tensor) -> Filters:
        """How the sequences in rows `[N]` are sampled."""
        temperature, top_p, min_p = self._settings[:3].index_select(1, rows)
        return Filters(temperature, self._keys[2].index_select(0, rows), top_p, min_p)

    def stream(self, rows: Tensor, positions: Tensor) -> Stream:
        """Whose draws the tokens number `positions [N]` of the sequences in rows `[N]` are."""
        seeds, choices = self._keys[:2].index_select(1, rows)
        return Stream(seeds, choices, positions)

    @property
    def adjustments(self) -> RequestState:
        return RequestState(self._counts, *self._settings[3:], *self._biases)

    @cached_property
    def draft_p(self) -> Tensor:
        """`[S, K, V]` fp32: what draft tokens were drawn from, where they are verified by rejection."""
        shape = len(self.feed), self.max_drafts, self.vocab_size
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def write_drafts(self, rows: Tensor, tokens: Tensor) -> None:
        """Let `tokens [N, n]` be the first n draft tokens of the sequences in rows `[N]`."""
        # No token at all, as where scores are not finite, becomes a token that can be computed; nobody will accept it.
        self.feed[rows, 1 : 1 + tokens.shape[1]] = tokens.clamp_min(0)

    def write_draft(self, rows: Tensor, numbers: Tensor, tokens: Tensor, probabilities: Tensor | None) -> None:
        """Let `tokens [N]` be draft token number `numbers [N]` of each, and `probabilities [N, V]` its distribution."""
        self.feed[rows, 1 + numbers] = tokens.clamp_min(0)
        if probabilities is not None:
            self.draft_p[rows, numbers] = probabilities

    def drafts(self, rows: Tensor, count: int) -> Tensor:
        """The first `count` draft tokens of the sequences in rows `[N]`, `[N, count]`."""
        return self.feed[rows, 1 : 1 + count]

    def advance(self, rows: Tensor, tokens: Tensor, *, lengths: Tensor, counted: Tensor | None) -> None:
        """Take in what a step has drawn: `tokens [N, n]`, −1 behind the last, for sequences of `lengths [N]` tokens.

        counted `[N]`: the rows whose tokens are counted, −1 for the others; None: nobody's.
        """
        latest = tokens
        if tokens.shape[1] > 1:
            latest = tokens.gather(1, (tokens >= 0).sum(dim=1, keepdim=True).sub_(1).clamp_min_(0))
        self.feed[rows, 0] = latest[:, 0].clamp_min(0)
        if counted is not None:
            count_tokens(self._counts, counted, tokens)
        if self.text is not None:
            behind = torch.arange(tokens.shape[1], device=self.device)
            self.text[rows[:, None], lengths[:, None] + behind] = tokens.int()

    def advance_on_host(self, sequences: list[Sequence], tokens: np.ndarray) -> None:
        """`advance` on a CPU, of a token `[N]` for each and nobody whose tokens are counted."""
        rows = [sequence.batch_row for sequence in sequences]
        self.feed.numpy()[rows, 0] = np.maximum(tokens, 0)
        if self.text is not None:
            self.text.numpy()[rows, [sequence.num_drawn for sequence in sequences]] = tokens

    def _write_biases(self, sequence: Sequence) -> None:
        params = sequence.params
        ends = sequence.end_token_ids if params.min_tokens else ()
        entries = [(token, bias, ALWAYS) for token, bias in params.logit_bias.items()]
        entries += [(token, -np.inf, params.min_tokens) for token in ends]
        self._make_room(len(entries))
        width = self.bias_width
        columns = list(zip(*entries, *[(-1, 0.0, 0)] * (width - len(entries)), strict=True))
        for biases, column, dtype in zip(self._biases, columns, (np.int32, np.float32, np.int32), strict=True):
            biases[sequence.batch_row] = self._upload(column, dtype)

    def _make_room(self, num_biases: int) -> None:
        if num_biases > self.bias_width:  # to a power of two, so that kernels meet few widths
            missing = (1 << (num_biases - 1).bit_length()) - self.bias_width
            empty = _no_biases(len(self.feed), missing, self.device)
            self._biases = tuple(torch.cat(pair, dim=1) for pair in zip(self._biases, empty, strict=True))

    def _write_counts(self, sequence: Sequence) -> None:
        row = self._counts[sequence.batch_row].zero_()
        prompt, output = sequence.tokens[: sequence.num_prompt_tokens], sequence.tokens[sequence.num_prompt_tokens :]
        row.index_fill_(0, self._upload(prompt, np.int64), IN_PROMPT)
        emitted = self._upload(output, np.int64)
        row.scatter_add_(0, emitted, torch.ones_like(emitted, dtype=torch.int32))

    def _upload(self, values: object, dtype: type) -> Tensor:
        return upload(np.array(values, dtype=dtype), self.device)


def _holder(sequence: Sequence) -> tuple[int, int]:
    return sequence.id, sequence.table.num_returns


def _no_biases(num_rows: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """Tokens, values and the positions that they hold below, as in RequestState."""
    tokens = torch.full((num_rows, width), -1, dtype=torch.int32, device=device)
    return tokens, torch.zeros_like(tokens, dtype=torch.float32), torch.zeros_like(tokens)


def feed_reference(batch_row: int, column: int, width: int) -> int:
    """A stand-in for a token that only the device knows: entry (batch_row, column) of a feed `[S, width]`."""
    return -1 - batch_row * width - column


def feed_references(batch_rows: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """`feed_reference` of all of them, which are broadcast against each other."""
    return -1 - batch_rows * width - columns


def resolve(tokens: Tensor, feed: Tensor) -> Tensor:
    """`tokens [T]` with every stand-in replaced by its token."""
    known = feed.view(-1)[(-1 - tokens).clamp_min_(0)]
    return torch.where(tokens < 0, known, tokens)
