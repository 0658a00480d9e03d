"""From rows of logits to tokens: drawn by each request's parameters and random stream, or drafted and verified.

A random draw depends on (seed, choice, position, purpose) and on nothing else, a token on that draw, its row of logits
and what its request asks: on one device equal logits give equal tokens, whatever the batch company. Logits are equal up
to rounding. Company, chunks, preemption and draft tokens change how many rows a pass has, and products and attention
choose by it how they add up; another device rounds exp and log, here too, in its own way. So where two tokens are
within rounding of each other, a greedy or seeded request may take the other one and go on differently. On a CPU in fp32
the tests of the engine find no such difference; on a GPU none is excluded.

A draft proposes tokens, the target verifies them in one pass, and the output is the target's own. Two exact rules
accept a draft token; without draft tokens both are plain sampling:

- *Matching.* The target draws its own token at every position; draft tokens are accepted while they equal it, and what
  is emitted is always the target's draw. For greedy requests and for requests with a seed (draft and target share the
  random draws of a position, so they mostly agree, and the output is, up to that rounding, what it is without a draft)
  and for deterministic drafts, where no rule accepts more.
- *Rejection sampling* for the rest: accept x with probability min(1, p(x) / q(x)), else draw from max(p - q, 0).
  It accepts with probability 1 - TV(p, q), the most that any rule can. Source: https://arxiv.org/abs/2211.17192.

A draft may propose several paths. The first one is verified as above. What the target says of its own behind that may
be the next token of another path: then it goes on there, by matching. Nothing but the target's draws decides where it
goes, so that is exact whatever the other paths are; and where the first path's token was rejected, another that is
certain is accepted with probability max(p - q, 0), normalised, as a sibling is in a tree of drafts
(https://arxiv.org/abs/2305.09781).

p and q are the distributions after penalties, masks, temperature and truncation; q is what the draft's token was drawn
from. Roll-back is by length alone: the target's pass over [last, d_1 .. d_k] fills k + 1 slots; after m acceptances the
first m + 1 of them hold, the rest is overwritten later.

All of it happens on the device: the host reads nothing before a step's tokens. Parameters and positions are its own.

N rows, V vocabulary, k draft tokens, g sequences that are verified at once.
"""

from collections import defaultdict
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.common.rows import rows_per_block
from kernels.common.triton_support import runs_triton
from kernels.sampling.logit_adjustments import adjust_scores
from kernels.sampling.random import Purpose
from kernels.sampling.sample import adjusted_probabilities, best_tokens, race, sample_tokens
from kernels.sampling.token_logprobs import Logprobs, token_logprobs
from kernels.sampling.verification import match_drafts, verify
from serve.engine.batch_state import BatchState, Download, upload
from serve.engine.drafts.tree import NO_DRAFT, DraftTree
from serve.engine.requests import NonFiniteLogitsError, Sequence
from serve.engine.token_mask import WORD_BITS, forbid
from serve.outputs import TokenLogprobs

if TYPE_CHECKING:
    from serve.engine.labels import Labels, PendingLabels

LEAST_GUESS = -1e4
"""What a draft at least says of a token: where a mask allows only those that it never says, it must guess one."""
FIRST_PATH = -1
"""In place of the number of another one."""
GPU_ROWS_PER_BLOCK = 512
"""Enough to keep a GPU busy; more distributions at a time would take memory from the pages."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of logits and what they decide, `[N]` int64 each, on the device."""

    batch_rows: Tensor
    """Whose next token it is."""
    num_before: Tensor
    """Draft tokens between the sequence's own and the row."""
    positions: Tensor
    """Number of the output token that the row decides, from 0."""
    adjusted: Tensor
    """The batch rows of those whose scores are adjusted, -1 for the others."""
    is_adjusted: bool
    """Whether any is."""
    most_before: int
    cuts_tail: bool
    """Whether any row asks for top-k or top-p."""
    masked: list[tuple[int, Sequence, int]]
    """Rows whose sequence has a token mask: number, sequence, draft tokens before it."""
    is_greedy: bool = False
    """Whether the host knows that all of them take the likeliest token."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows [first_row, first_row + k + 1) of a step's logits, which decide what one sequence emits.

    Behind them are those of other paths of the draft, one behind each of their tokens.
    """

    sequence: Sequence
    first_row: int
    draft: DraftTree = NO_DRAFT


@dataclass(slots=True)
class Sampled:
    """What one sequence emits, read by the host."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    """The accepted draft tokens and one of the target's own."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_on_path: int = 0
    """Accepted tokens of the draft's first path."""
    way: int = FIRST_PATH
    """Which other path the accepted tokens lie on."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, when asked for."""
    label: tuple[Tensor, Tensor] | None = None
    """Of the target's own token, when it is kept: as `PendingLabels.read` has it."""
    error: Exception | None = None


class PendingSamples(NamedTuple):
    """What sequences with equally many draft tokens emit, on its way to the host."""

    numbers: SequenceType[int]
    """Of the sequences, in the step."""
    sequences: SequenceType[Sequence]
    emitted: Download
    """`[g, k + 3]` int64: the tokens to emit, then -1; -1 in their place where the scores are not numbers. Then how
    many of them were drafted, and how many draft tokens were meant."""
    logprobs: Download | None
    labels: "PendingLabels | None" = None
    ways: Download | None = None
    """`[g, 2]`: `Sampled.num_on_path` and `way`, where drafts have several paths."""

    def read(self) -> dict[int, Sampled]:
        """By number; waits for the device. What failed for one sequence alone is in its error."""
        (found,) = self.emitted.wait()
        tokens, (accepted, counts) = found[:, :-2].tolist(), found[:, -2:].T.tolist()
        scores = None if self.logprobs is None else Logprobs(*self.logprobs.wait())
        labels = {} if self.labels is None else self.labels.read()
        ways = None if self.ways is None else self.ways.wait()[0].tolist()
        samples = {}
        for at, (number, sequence) in enumerate(zip(self.numbers, self.sequences, strict=True)):
            emitted, num_top = tokens[at][: accepted[at] + 1], sequence.params.logprobs
            if emitted[-1] < 0:
                samples[number] = Sampled(sequence, error=NonFiniteLogitsError("the model's scores are not numbers"))
                continue
            entries = None
            if scores is not None and num_top is not None:
                first = at * len(tokens[at])
                own = Logprobs(*(part[first : first + len(emitted)] for part in scores))
                entries = logprob_entries(emitted, own, num_top)
            on_path, way = (accepted[at], FIRST_PATH) if ways is None else ways[at]
            samples[number] = Sampled(
                sequence, emitted, counts[at], accepted[at], on_path, way, entries, labels.get(at)
            )
        return samples


def emitted(tokens: Tensor, num_accepted: Tensor, counts: Tensor) -> Tensor:
    """`PendingSamples.emitted` on the device."""
    return torch.cat([tokens, num_accepted[:, None], counts[:, None]], dim=1)


def follow(tokens: Tensor, num_accepted: Tensor, path: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Go on along another path where the target's own token lies on it.

    `tokens [g, any]`: accepted ones and the target's own, then −1. `path [g, n]`; `drawn [g, n]`: what the target drew
    behind each of its tokens. Returns tokens, how many of them are accepted, and whose lie on that path, `[g]` bool.
    """
    n = path.shape[1]
    width = max(tokens.shape[1], n + 1)
    tokens = F.pad(tokens, (0, width - tokens.shape[1]), value=-1)
    num_equal = (tokens[:, :n] == path).int().cumprod(dim=1).sum(dim=1)
    goes_on = num_equal == num_accepted + 1
    # Up to there they are equal; behind it a token of the path is accepted if the target has drawn it.
    columns = torch.arange(width, device=path.device)
    target = F.pad(drawn, (1, width - n - 1), value=-1)
    on_path = F.pad(path, (0, width - n), value=-1)
    right = (columns < num_equal[:, None]) | ((target == on_path) & (columns < n))
    further = right.int().cumprod(dim=1).sum(dim=1, keepdim=True).to(num_accepted.dtype)
    going = torch.where(columns < further, on_path, torch.where(columns == further, target, -1))
    tokens = torch.where(goes_on[:, None], going, tokens)
    return tokens, torch.where(goes_on, further[:, 0], num_accepted), goes_on


def most_logprobs(sequences: SequenceType[Sequence]) -> int | None:
    """The most log-probabilities beside that of a token that any of these asks for; None: nobody asks."""
    return max((s.params.logprobs for s in sequences if s.params.logprobs is not None), default=None)


def meant_by(draft: DraftTree) -> int:
    """How many draft tokens are meant, as `Sampler.meant` reads it: below 0, at most -1 - that many."""
    return -1 - draft.num_tokens if draft.is_counted else draft.num_tokens


class Sampler:
    """Draws and verifies tokens from rows of logits by the state of the sequences' batch rows."""

    def __init__(self, state: BatchState, labels: "Labels | None" = None) -> None:
        self.state, self.labels = state, labels

    def sample(self, logits: Tensor, asked: list[SequenceRows]) -> list[PendingSamples]:
        """Launch what each sequence emits, from the target's `logits [R, V]`; exact for every sampling setting.

        Leaves in the batch state what the next step starts from.
        """
        if not runs_triton(logits) and all(map(_asks_for_likeliest, asked)):
            return [self._sample_likeliest(logits, asked)]
        groups: defaultdict[tuple[int, bool, tuple[int, ...]], list[int]] = defaultdict(list)
        for number, one in enumerate(asked):
            lengths = tuple([len(way.tokens) for way in one.draft.others])
            groups[one.draft.num_tokens, one.draft.by_rejection, lengths].append(number)
        pending = []
        for (k, by_rejection, _), numbers in groups.items():
            for some in self.blocks(numbers, num_rows=k + 1) if by_rejection else [numbers]:
                pending.append(self._sample_group(logits, some, [asked[number] for number in some]))
        return pending

    def _sample_likeliest(self, logits: Tensor, asked: list[SequenceRows]) -> PendingSamples:
        """As `_sample_group` would, of sequences that take the likeliest token: arrays cost a CPU less than tensors."""
        sequences, logits = [one.sequence for one in asked], select(logits, [one.first_row for one in asked])
        found = np.zeros((len(asked), 3), dtype=np.int64)
        found[:, 0] = best_tokens(logits).numpy()
        self.state.advance_on_host(sequences, found[:, 0])
        emitted = torch.from_numpy(found)
        return self.pending(range(len(asked)), sequences, emitted, logits, most_logprobs(sequences))

    def _sample_group(self, logits: Tensor, numbers: list[int], asked: list[SequenceRows]) -> PendingSamples:
        k, sequences = asked[0].draft.num_tokens, [one.sequence for one in asked]
        row_numbers = [one.first_row + before for one in asked for before in range(k + 1)]
        of_others, logits = logits, select(logits, row_numbers)
        rows = self.rows([sequence for sequence in sequences for _ in range(k + 1)], list(range(k + 1)) * len(asked))
        batch_rows, counts, lengths, counted = self._table(asked)
        counts = self.meant(counts, batch_rows, k)
        decide = self.verify if asked[0].draft.by_rejection else self.match
        tokens, num_accepted = decide(logits, rows, counts, k)
        ways = None
        if asked[0].draft.others:
            tokens, num_accepted, ways = self._go_on(of_others, asked, tokens, num_accepted)
        self.state.advance(batch_rows, tokens, lengths=lengths, counted=counted)
        found = emitted(tokens, num_accepted, counts)
        return self.pending(numbers, sequences, found, logits, most_logprobs(sequences))._replace(ways=ways)

    def _go_on(
        self, logits: Tensor, asked: list[SequenceRows], tokens: Tensor, num_accepted: Tensor
    ) -> tuple[Tensor, Tensor, Download]:
        """What is emitted, `[g, any]` and how many of that were drafted, where other paths may go on from the first."""
        on_path, taken = num_accepted, torch.full_like(num_accepted, FIRST_PATH)
        behind = 1 + asked[0].draft.num_tokens
        for number in range(len(asked[0].draft.others)):
            paths = np.array([one.draft.others[number].tokens for one in asked], dtype=np.int64)
            g, n = paths.shape
            row_numbers = [one.first_row + behind + at for one in asked for at in range(n)]
            behind += n
            rows = self.rows([one.sequence for one in asked for _ in range(n)], list(range(1, n + 1)) * g)
            path = upload(paths, self.state.device)
            self.state.write_drafts(rows.batch_rows[::n], path)  # the rows' penalties and masks depend on them
            drawn = self.draw(select(logits, row_numbers), rows).view(g, n)
            tokens, num_accepted, goes_on = follow(tokens, num_accepted, path, drawn)
            taken = torch.where(goes_on, number, taken)
        return tokens, num_accepted, Download([torch.stack([on_path, taken], dim=1)])

    def pending(
        self,
        numbers: SequenceType[int],
        sequences: SequenceType[Sequence],
        found: Tensor,
        logits: Tensor,
        num_top: int | None,
    ) -> PendingSamples:
        """What sequences `numbers` of a step emit, `found [g, k + 3]`, from `logits [g · (k + 1), V]`.

        `num_top`: as `most_logprobs` has it.
        """
        scores = None
        if num_top is not None:
            scores = Download(list(token_logprobs(logits, found[:, :-2].flatten(), num_top)))
        labels = None if self.labels is None else self.labels.draw(sequences, found, logits)
        return PendingSamples(numbers, sequences, Download([found]), scores, labels)

    def _table(self, asked: list[SequenceRows]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Of each: batch row, draft tokens meant (see `meant`), length, and the batch row if its tokens are counted."""
        table = [
            (s.batch_row, meant_by(one.draft), s.num_drawn, s.batch_row if s.params.has_penalties else -1)
            for one, s in ((one, one.sequence) for one in asked)
        ]
        columns = np.array(table).T.copy()
        batch_rows, counts, lengths, counted = upload(columns, self.state.device)
        return batch_rows, counts, lengths, counted if (columns[3] >= 0).any() else None

    def meant(self, counts: Tensor, batch_rows: Tensor, k: int) -> Tensor:
        """How many of k draft tokens are meant, int32 `[g]`, from what `meant_by` says."""
        if not k:
            return torch.zeros_like(counts, dtype=torch.int32)
        known = self.state.draft_counts[batch_rows]
        return torch.where(counts < 0, torch.minimum(known, -1 - counts), counts).clamp(max=k).int()

    def match(self, logits: Tensor, rows: Rows, counts: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The target's own draws, as far as draft tokens are equal to them: `[g, k + 1]` int64, then −1, and `[g]`."""
        tokens = self.draw(logits, rows).view(-1, k + 1)
        if not k:
            return tokens, counts
        drafted = self.state.drafts(rows.batch_rows[:: k + 1], k)
        output = match_drafts(tokens, drafted, counts=counts, lengths=counts)
        return output.tokens, output.num_accepted

    def verify(self, logits: Tensor, rows: Rows, counts: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As `match`, by rejection sampling from what the draft tokens were drawn from."""
        batch_rows, positions = rows.batch_rows[:: k + 1], rows.positions[:: k + 1]
        target_p = self.probabilities(logits, rows).view(len(batch_rows), k + 1, -1)
        draft_p = self.state.draft_p[batch_rows, :k]
        stream, drafted = self.state.stream(batch_rows, positions), self.state.drafts(batch_rows, k)
        output = verify(target_p, draft_p, drafted, counts=counts, lengths=counts, stream=stream)
        return output.tokens, output.num_accepted

    def rows(self, sequences: list[Sequence], num_before: list[int]) -> Rows:
        """Rows that follow the tokens of `sequences` and as many of their draft tokens."""
        table, masked = [], []
        for number, (sequence, ahead) in enumerate(zip(sequences, num_before, strict=True)):
            position = sequence.num_drawn - sequence.num_prompt_tokens + ahead
            adjusted = sequence.batch_row if _adjusts(sequence, position) else -1
            table.append((sequence.batch_row, ahead, position, adjusted))
            if sequence.mask is not None:
                masked.append((number, sequence, ahead))
        columns = np.array(table, dtype=np.int64).T.copy()
        is_adjusted = bool((columns[3] >= 0).any())
        rows, before, positions, adjusted_rows = upload(columns, self.state.device)
        cuts_tail = any(sequence.params.cuts_tail for sequence in sequences)
        is_greedy = all(sequence.params.is_greedy for sequence in sequences)
        return Rows(rows, before, positions, adjusted_rows, is_adjusted, max(num_before), cuts_tail, masked, is_greedy)

    def draw(self, logits: Tensor, rows: Rows) -> Tensor:
        """The target's token for each row, `[N]` int64, of `logits [N, V]`; -1 where the scores are not numbers."""
        if rows.is_greedy and not runs_triton(logits):  # whose race finds them in one launch
            return best_tokens(self._scores(logits, rows))
        filters, stream = self.state.filters(rows.batch_rows), self.state.stream(rows.batch_rows, rows.positions)
        return sample_tokens(self._scores(logits, rows), filters, stream, cuts=rows.cuts_tail)

    def guess(self, logits: Tensor, rows: Rows, *, by_rejection: bool) -> None:
        """Draw a draft's token for each row, of the draft's logits `[N, any]`, and leave it to the target's pass.

        by_rejection: it will be verified by rejection, which asks for what it was drawn from.
        """
        logits, probabilities = self._on_own_vocabulary(logits), None
        if rows.masked:
            logits = logits.clamp_min(LEAST_GUESS)
        if by_rejection:
            probabilities = self.probabilities(logits, rows)
            tokens = race(probabilities, self.state.stream(rows.batch_rows, rows.positions), Purpose.DRAFT)
        else:
            tokens = self.draw(logits, rows)
        self.state.write_draft(rows.batch_rows, rows.num_before, tokens, probabilities)

    def likeliest(self, logits: Tensor) -> np.ndarray:
        """What `guess` draws for rows of those that take the likeliest token, `[N]` int64, on a CPU."""
        return best_tokens(self._on_own_vocabulary(logits)).clamp_min_(0).numpy()

    def _on_own_vocabulary(self, logits: Tensor) -> Tensor:
        """`[N, V]`, of a model whose vocabulary, or the target's, may be padded at its end."""
        missing = self.state.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self.state.vocab_size]

    def probabilities(self, logits: Tensor, rows: Rows) -> Tensor:
        """`[N, V]` fp32: each row's distribution after bias, penalties, mask, temperature, top-k, top-p and min-p."""
        filters = self.state.filters(rows.batch_rows)
        return adjusted_probabilities(self._scores(logits, rows), **filters._asdict(), cuts=rows.cuts_tail)

    def blocks(self, numbers: list[int], *, num_rows: int = 1) -> list[list[int]]:
        """`numbers`, of `num_rows` rows each, in parts whose distributions are made at once."""
        on_cpu = self.state.device.type == "cpu"
        most = rows_per_block(self.state.vocab_size) if on_cpu else GPU_ROWS_PER_BLOCK
        size = max(1, most // num_rows)
        return [numbers[at : at + size] for at in range(0, len(numbers), size)]

    def _scores(self, logits: Tensor, rows: Rows) -> Tensor:
        if rows.is_adjusted:
            drafted = None
            if rows.most_before:
                drafted = self.state.drafts(rows.batch_rows, rows.most_before)
                columns = torch.arange(rows.most_before, device=drafted.device)
                drafted = torch.where(columns < rows.num_before[:, None], drafted, -1)
            state = self.state.adjustments
            logits = adjust_scores(logits, state, slots=rows.adjusted, positions=rows.positions, drafted=drafted)
        return self._mask(logits, rows) if rows.masked else logits

    def _mask(self, scores: Tensor, rows: Rows) -> Tensor:
        """The scores with minus infinity for what masks forbid; the host reads the draft tokens that decide it."""
        numbers = [number for number, _, _ in rows.masked]
        drafted: list[list[int]] = [[] for _ in numbers]
        if rows.most_before:
            drafted = self.state.drafts(rows.batch_rows[numbers], rows.most_before).tolist()
        words = np.zeros((len(numbers), -(-scores.shape[1] // WORD_BITS)), dtype=np.int32)
        for row, (_, sequence, ahead), tokens in zip(words, rows.masked, drafted, strict=True):
            if sequence.mask is not None:
                sequence.mask.fill(row, sequence.tokens[sequence.num_prompt_tokens :], tokens[:ahead])
        return forbid(scores, numbers, words)


def takes_likeliest(sequence: Sequence, position: int) -> bool:
    """Whether output token number `position`, and each behind it, is the likeliest by the model's own scores."""
    return sequence.params.is_greedy and sequence.mask is None and not _adjusts(sequence, position)


def _asks_for_likeliest(rows: SequenceRows) -> bool:
    sequence, drafts = rows.sequence, rows.draft.num_tokens or rows.draft.others
    return not drafts and takes_likeliest(sequence, sequence.num_drawn - sequence.num_prompt_tokens)


def _adjusts(sequence: Sequence, position: int) -> bool:
    return sequence.params.adjusts_all_scores or position < sequence.params.min_tokens


def select(x: Tensor, rows: list[int]) -> Tensor:
    """`x[rows]`, without a copy where they lie side by side."""
    if rows[-1] - rows[0] == len(rows) - 1 and rows == list(range(rows[0], rows[-1] + 1)):
        return x[rows[0] : rows[-1] + 1]
    return x[upload(np.array(rows, dtype=np.int64), x.device)]


def logprob_entries(tokens: list[int], logprobs: Logprobs, num_top: int) -> list[TokenLogprobs]:
    """What the host makes of log-probabilities `[N]` of tokens, with the `num_top` best of each row."""
    best = zip(logprobs.top_tokens[:, :num_top].tolist(), logprobs.top[:, :num_top].tolist(), strict=True)
    tops = [tuple(zip(ids, values, strict=True)) for ids, values in best]
    columns = zip(tokens, logprobs.chosen.tolist(), logprobs.ranks.tolist(), tops, strict=True)
    return [TokenLogprobs(*column) for column in columns]
