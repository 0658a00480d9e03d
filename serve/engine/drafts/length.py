"""How many tokens to draft: the k that maximises expected tokens per second, from what was measured.

With acceptance rate a, drafting k tokens yields (1 - a^(k+1)) / (1 - a) tokens a step, and costs k passes of the draft
and one pass of the target over k + 1 rows a sequence instead of one. Source: https://arxiv.org/abs/2211.17192.
Before its first tokens for a sequence the draft must read all of it, which a short answer does not earn back.
What a draft has at hand for a sequence costs rows of the target alone; it is taken where it promises more tokens a
second than passes of the draft do.
"""

import bisect
import heapq
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from serve.engine.drafts.tree import Drafter, OtherWay
from serve.engine.requests import Sequence

MAX_DRAFT_TOKENS = 8
"""The longest draft that is tried; beyond it the gain is small at any acceptance rate worth drafting for."""
MIN_GAIN = 1.06
"""Drafting must promise this much over not drafting: the estimates are noisy, and a wrong yes costs more."""
READING_GAIN = 1.04
"""So much with what the draft must read first, which is lost where less is accepted than was hoped for."""
UNTRIED_GAIN = 1.15
"""So much of lengths that take more rows than any pass so far: what they cost is guessed, and to find out takes passes
that prepare for others."""
INITIAL_ACCEPTANCE = 0.7
INITIAL_WEIGHT = 5.0
"""Tested draft tokens' worth of trust in the initial acceptance."""
PRIOR_WEIGHT = 2.0
"""The same, for a sequence that has no record yet, in the engine-wide acceptance."""
SEQUENCE_MEMORY = 0.95
"""What one verification leaves of a sequence's earlier counts: a memory of 20 verifications."""
ENGINE_MEMORY = 0.97
PROBE_TOKENS = 2
"""Length of a draft that is made to learn: its first pass may have to catch up, the second shows the usual cost."""
PROBE_SEQUENCES = 2
"""Sequences that probe in one step; those of which the draft has the least to read."""
FIRST_PROBES = 6
"""Drafts that are verified before lengths are chosen: one may be bad luck, and later ones cost more, since the draft
must read what it has missed."""
PROBE_SHARE = 0.01
"""The most of all time that probes may take, were all their tokens in vain."""
HOPELESS_SHARE = 0.002
"""The same, where drafting would lose if every token were accepted: only changed costs can be learnt of."""
PROBE_INTERVAL, LONGEST_PROBE_INTERVAL = 64, 512
"""Steps between probes while drafting does not pay: the interval doubles with each probe that failed."""
PLAIN_INTERVAL, LONGEST_PLAIN_INTERVAL = 32, 512
"""Steps with drafts until one without, which shows what it costs by now: the interval doubles each time."""
KEPT_STEPS = 8
"""One step of so many weighs again whether sequences get drafts that got none: to weigh it takes the host's time."""
NEW_ROWS = 2.0
"""The first passes over a number of rows take so many times longer, together: the second one is captured."""
SAMPLES = 27
"""Passes over so many rows that are remembered: in one step a draft has up to eight."""


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens that a step emits for a sequence with `num_drafts` draft tokens, each accepted with this probability."""
    return sum(acceptance**i for i in range(num_drafts + 1))


def best_length(acceptances: list[float], seconds: list[float], num_tried: int = MAX_DRAFT_TOKENS + 1) -> int:
    """The draft length of most expected tokens per second; `seconds[k]` is the time of a step with length k.

    Of lengths from `num_tried` on that is guessed, and the further away the worse.
    """
    plain = len(acceptances) / seconds[0]
    best, best_rate = 0, 0.0
    tokens, powers = float(len(acceptances)), [1.0] * len(acceptances)
    for length in range(1, min(len(seconds), 1 + _longest_guessed(num_tried))):
        powers = [power * acceptance for power, acceptance in zip(powers, acceptances, strict=True)]
        tokens += sum(powers)
        least = (MIN_GAIN if length < num_tried else UNTRIED_GAIN) * plain
        if (rate := tokens / seconds[length]) > max(best_rate, least):
            best, best_rate = length, rate
    return best


def _longest_guessed(num_tried: int) -> int:
    """Twice the longest length that has been tried, or 1: so far a guess of what a length costs is trusted."""
    return max(1, 2 * (num_tried - 1))


class PassCosts:
    """Seconds of a forward pass by its number of rows, linear in between; robust against a busy machine.

    Disturbances only ever add time. So a low quantile of the latest passes counts, and no pass is taken to cost more
    than one of more rows.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._has_news = False
        """Whether anything was recorded since the curve below was drawn."""
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._slope = 0.0
        """Seconds of a row, from the fewest rows measured to the most."""
        self._rehearsed: set[int] = set()
        """Of what so far only passes that served nobody are known."""

    def forget(self) -> None:
        """Begin anew: what was recorded is not what passes cost."""
        self._samples, self._rehearsed = {}, set()
        self._rows, self._seconds, self._slope = [], [], 0.0

    def doubt(self) -> None:
        """What was recorded is old: keep the least of each, beside which one that is recorded now counts as much."""
        for samples in self._samples.values():
            least = min(samples)
            samples.clear()
            samples.append(least)
        self._has_news = True

    def only_rehearsed(self) -> None:
        """What was recorded served nobody: of each number of rows it counts until a pass of as many has."""
        self._rehearsed = set(self._samples)

    def record(self, num_rows: int, seconds: float) -> None:
        bucket, self._has_news = _bucket(num_rows), True
        if bucket in self._rehearsed:
            self._rehearsed.remove(bucket)
            del self._samples[bucket]
        self._samples.setdefault(bucket, deque(maxlen=SAMPLES)).append(seconds)

    def _draw_curve(self) -> None:
        """Once for all that was recorded: most steps ask for nothing."""
        if not self._has_news:
            return
        self._has_news = False
        self._rows = sorted(self._samples)
        self._seconds = [sorted(samples)[(len(samples) - 1) // 3] for _, samples in sorted(self._samples.items())]
        for at in range(len(self._seconds) - 2, -1, -1):
            self._seconds[at] = min(self._seconds[at], self._seconds[at + 1])
        if len(self._rows) > 1:
            self._slope = (self._seconds[-1] - self._seconds[0]) / (self._rows[-1] - self._rows[0])

    def has_measured(self, num_rows: int) -> bool:
        """Whether passes of so many rows have been recorded."""
        return _bucket(num_rows) in self._samples

    def has_served(self, num_rows: int) -> bool:
        """Whether any of them was no rehearsal."""
        return _bucket(num_rows) in self._samples.keys() - self._rehearsed

    @property
    def most_rows(self) -> int:
        """Of a pass that was recorded."""
        return max(self._samples, default=0)

    def estimate(self, num_rows: int) -> float | None:
        """Seconds of a pass of `num_rows` rows; None before anything was measured.

        More rows than were measured go on as those did from the fewest to the most; of one number only, more rows cost
        no more, so that they are tried and measured. Fewer cost in proportion less.
        """
        self._draw_curve()
        if not self._rows:
            return None
        at = bisect.bisect_left(self._rows, num_rows)
        if at == len(self._rows):
            return self._seconds[-1] + self._slope * (num_rows - self._rows[-1])
        if at == 0:
            return self._seconds[0] * num_rows / self._rows[0]
        weight = (num_rows - self._rows[at - 1]) / (self._rows[at] - self._rows[at - 1])
        return (1 - weight) * self._seconds[at - 1] + weight * self._seconds[at]


class Prepares(Protocol):
    """Whoever launches passes."""

    @property
    def has_prepared(self) -> bool:
        """Whether the latest pass also did what later ones like it need not do again."""
        ...


class PassTimer:
    """Measures passes in the device's time and records what they cost as soon as that is known."""

    def __init__(self, costs: PassCosts, device: torch.device) -> None:
        self._costs = costs
        self._is_cuda = device.type == "cuda"
        self._measuring: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        """Passes that the device may not have finished: rows, beginning, end."""

    @contextmanager
    def measure(self, num_rows: int, runner: Prepares | None = None) -> Iterator[None]:
        """Measure what is launched within this context; a pass that raises is not recorded.

        Nor is one in which the runner has prepared for later ones, which cost less.
        """
        if not self._is_cuda:
            began = time.perf_counter()
            yield
            if runner is None or not runner.has_prepared:
                self._costs.record(num_rows, time.perf_counter() - began)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        if runner is None or not runner.has_prepared:
            self._measuring.append((num_rows, begin, end))
        while self._measuring and self._measuring[0][2].query():
            rows, began_at, ended_at = self._measuring.pop(0)
            self._costs.record(rows, began_at.elapsed_time(ended_at) / 1000)


def _bucket(num_rows: int) -> int:
    """Row counts above 16 share a bucket with those that agree in their five highest bits."""
    shift = max(0, num_rows.bit_length() - 5)
    return num_rows >> shift << shift


class AdaptiveLength:
    """Follows acceptance, per sequence and engine-wide, and the costs of both models.

    One step's draft passes serve all sequences, so a length is chosen for the batch; a sequence whose drafts are not
    worth their rows in the target's pass gets less.
    """

    def __init__(self, target_costs: PassCosts, draft_costs: PassCosts, draft: Drafter) -> None:
        self.target_costs, self.draft_costs, self.draft = target_costs, draft_costs, draft
        self.forget_acceptance()
        self._length = 0
        """The batch's draft length in this step."""
        self._late: set[Sequence] = set()
        """Sequences that drafting would pay for, were it not so late: they get none."""
        self._row_price = 0.0
        """Tokens that could be had elsewhere for the time that one more row of the target's pass takes."""
        self._can_pay = False
        """Whether drafting pays, or would have paid at the last probe, had every draft token been accepted."""
        self._num_steps = 0
        """Steps since the last probe."""
        self._interval = PROBE_INTERVAL
        self._probing: set[Sequence] = set()
        """Those that probe in this step."""
        self._decoding: list[Sequence] = []
        """In this step."""
        self._num_drafting, self._plain_interval = 0, PLAIN_INTERVAL
        """Steps in a row that the draft's passes were worth, and after how many one does without."""
        self._at_hand: dict[Sequence, int] = {}
        """How many tokens are taken of what the draft has at hand, by sequence, in this step."""
        self._num_kept = 0
        """Steps since it was weighed whether these sequences get drafts, and found that they do not."""

    def forget_acceptance(self) -> None:
        """Begin again: the draft is another one."""
        self._accepted = INITIAL_WEIGHT * INITIAL_ACCEPTANCE
        self._rejected = INITIAL_WEIGHT * (1 - INITIAL_ACCEPTANCE)
        self._num_observed = 0
        """Verifications so far of what passes of the draft have given."""

    def begin_step(self, decoding: list[Sequence]) -> None:
        """Choose the length for a step in which these sequences decode."""
        is_same = decoding == self._decoding
        self._at_hand, self._probing, self._decoding = {}, set(), decoding
        if not self.target_costs.has_served(len(decoding)):  # what drafts are to be compared with
            self._length = 0
            return
        if self.draft.runs_passes and self._num_observed < FIRST_PROBES:
            self._probing = set(decoding[:PROBE_SEQUENCES])
        elif self.draft.runs_passes and not self._keeps_plain(is_same):
            self._plan_passes(decoding)
        for sequence in decoding:
            if sequence not in self._probing and (taken := self._choose_at_hand(sequence, len(decoding))):
                self._at_hand[sequence] = taken

    def _keeps_plain(self, is_same: bool) -> bool:
        """Whether it stands from the last steps that these sequences get no drafts."""
        is_due = self._num_steps + 1 == self._interval or self._num_kept >= KEPT_STEPS - 1
        if self._length or is_due or not is_same:
            self._num_kept = 0
            return False
        self._num_kept += 1
        self._num_steps += 1
        return True

    def _plan_passes(self, decoding: list[Sequence]) -> None:
        """Choose the length of what the draft's passes give, and who probes."""
        num_decoding = len(decoding)
        self._length, self._late = self._choose(decoding, [self.acceptance(sequence) for sequence in decoding])
        if self._length:
            num_drafting = num_decoding - len(self._late)
            without, with_drafts = (self._target_seconds(num_decoding + num_drafting * k) for k in (0, self._length))
            self._row_price = (with_drafts / without - 1) * num_decoding / (num_drafting * self._length)
            self._interval, self._can_pay = PROBE_INTERVAL, True
        self._skip_one_of_many()
        self._num_steps += 1
        if self._num_steps < self._interval:
            return
        self.draft_costs.doubt()
        self._can_pay = self._choose(decoding, [1.0] * num_decoding)[0] > 0
        if probing := self._choose_probes(decoding):
            self._probing, self._num_steps = probing, 0
            self._interval = min(2 * self._interval, LONGEST_PROBE_INTERVAL)

    def _skip_one_of_many(self) -> None:
        """Does without the draft's passes at times, or what a plain step costs would be known from long ago only."""
        if not self._length:
            self._num_drafting, self._plain_interval = 0, PLAIN_INTERVAL
            return
        self._num_drafting += 1
        if self._num_drafting > self._plain_interval:
            self._length, self._num_drafting = 0, 0
            self._num_kept = KEPT_STEPS
            self._plain_interval = min(2 * self._plain_interval, LONGEST_PLAIN_INTERVAL)

    def _choose_probes(self, decoding: list[Sequence]) -> set[Sequence]:
        """Sequences that get no draft tokens by what is known, if to learn more is affordable now."""
        idle = [s for s in decoding if s not in self._late and not self._worthwhile(s)]
        probing = heapq.nsmallest(PROBE_SEQUENCES, idle, key=self._catch_up_seconds)
        if not probing:
            return set()
        extra = self._probe_seconds(len(decoding), len(probing)) + sum(map(self._catch_up_seconds, probing))
        affordable = (PROBE_SHARE if self._can_pay else HOPELESS_SHARE) * self._num_steps
        return set(probing) if extra <= affordable * self._target_seconds(len(decoding)) else set()

    def _probe_seconds(self, num_decoding: int, num_probing: int) -> float:
        """What a probe of so many adds to a step, but for what the draft has missed."""
        num_rows = num_decoding + num_probing * PROBE_TOKENS
        target, draft = self._target_seconds(num_rows), self._passes_seconds(num_probing, PROBE_TOKENS)
        extra = target - self._target_seconds(num_decoding) + draft
        if not self.target_costs.has_measured(num_rows):
            extra += NEW_ROWS * target
        if not self.draft_costs.has_measured(num_probing):
            extra += NEW_ROWS * self._draft_seconds(num_probing)
        return extra

    def _choose_at_hand(self, sequence: Sequence, num_decoding: int) -> int:
        """Tokens to take of what is at hand for a sequence; 0 if passes of the draft, or no draft, promise more.

        All others count as if they only decoded.
        """
        found = self.draft.at_hand(sequence)
        if found is None:
            return 0
        taken, best_rate = 0, MIN_GAIN * num_decoding / self._target_seconds(num_decoding)
        if length := self._worthwhile(sequence):
            tokens = expected_tokens(self.acceptance(sequence), length)
            passes = self._passes_seconds(num_decoding, length)
            seconds = self._target_seconds(num_decoding + length) + passes / num_decoding
            best_rate = max(best_rate, (num_decoding - 1 + tokens) / seconds)
        tokens, power = float(num_decoding), 1.0
        for length in range(1, found.num_tokens + 1):
            power *= found.acceptance
            tokens += power
            rate = tokens / self._target_seconds(num_decoding + length)
            if rate > best_rate:
                taken, best_rate = length, rate
        return taken

    def _choose(self, decoding: list[Sequence], acceptances: list[float]) -> tuple[int, set[Sequence]]:
        """The length for the batch, and the sequences too late to draft for: they end before it pays."""
        num_decoding = len(decoding)
        seconds = self._step_seconds(num_decoding, num_decoding)
        length = best_length(acceptances, seconds, self._num_tried(num_decoding, num_decoding))
        if not length:
            return 0, set()
        later = best_length(acceptances, seconds)  # when it has been tried
        num_tokens = sum(expected_tokens(acceptance, later) for acceptance in acceptances)
        saved_per_token = seconds[0] / num_decoding / READING_GAIN - seconds[later] / num_tokens
        late = {s for s in decoding if self._catch_up_seconds(s) > saved_per_token * s.num_tokens_left}
        if not late:
            return length, late
        acceptances = [0.0 if s in late else a for s, a in zip(decoding, acceptances, strict=True)]
        num_drafting = num_decoding - len(late)
        seconds, num_tried = self._step_seconds(num_decoding, num_drafting), self._num_tried(num_decoding, num_drafting)
        return best_length(acceptances, seconds, num_tried), late

    def _num_tried(self, num_decoding: int, num_drafting: int) -> int:
        """Lengths from this one on take more rows than any pass so far."""
        if not num_drafting or (self.draft.first_tokens and self.draft_costs.most_rows < num_drafting):
            return 1
        return 1 + (self.target_costs.most_rows - num_decoding) // num_drafting

    def _step_seconds(self, num_decoding: int, num_drafting: int) -> list[float]:
        """Of a step, by the length of its drafts."""
        return [
            self._passes_seconds(num_drafting, k) + self._target_seconds(num_decoding + num_drafting * k)
            for k in range(MAX_DRAFT_TOKENS + 1)
        ]

    def _passes_seconds(self, num_drafting: int, length: int) -> float:
        """Of the passes that draft so many tokens for each."""
        if not length:
            return 0.0
        first = self._draft_seconds(self.draft.first_tokens * num_drafting)
        return first + (length - 1) * self._draft_seconds(num_drafting)

    def _catch_up_seconds(self, sequence: Sequence) -> float:
        """What it takes the draft to read what it has not read of a sequence, beyond what every step takes."""
        num_missing = self.draft.num_missing(sequence)
        return self._draft_seconds(num_missing) - self._draft_seconds(2) if num_missing > 2 else 0.0

    def _target_seconds(self, num_rows: int) -> float:
        return self.target_costs.estimate(num_rows) or 0.0

    def _draft_seconds(self, num_rows: int) -> float:
        return self.draft_costs.estimate(num_rows) or 0.0

    @property
    def is_drafting(self) -> bool:
        """Whether any sequence may get draft tokens in this step."""
        return self._length > 0 or bool(self._probing) or bool(self._at_hand)

    def __call__(self, sequence: Sequence) -> int:
        """Draft tokens that this sequence should get now."""
        if sequence in self._probing:
            return PROBE_TOKENS
        return self._at_hand.get(sequence) or self._worthwhile(sequence)

    def takes_at_hand(self, sequence: Sequence) -> bool:
        """Whether its draft tokens are to be those that the draft has at hand."""
        return sequence in self._at_hand

    def _worthwhile(self, sequence: Sequence) -> int:
        """Draft tokens that pay, of the batch's length as many as are worth their rows."""
        if sequence in self._late:
            return 0
        acceptance = self.acceptance(sequence)
        length, gain = 0, acceptance
        while length < self._length and gain >= self._row_price:
            length, gain = length + 1, gain * acceptance
        return length

    def tokens_of(self, way: OtherWay, num_rows: int) -> int:
        """How many tokens of another path pay, beside a step of `num_rows` rows; 0 where none do.

        The first of them gives one more token where the target goes that way, each later one where it is accepted too;
        all of them take rows of the target, and one more for the sequence's last token. What a page costs to copy is a
        hundredth of a pass.
        """
        tokens = sum(expected_tokens(self.acceptance(sequence), self(sequence)) for sequence in self._decoding)
        drafting = [
            length for sequence in self._decoding if (length := self(sequence)) and sequence not in self._at_hand
        ]
        seconds = self._target_seconds(num_rows) + self._passes_seconds(len(drafting), max(drafting, default=0))
        best, most, gain, power = 0, 0.0, 0.0, way.taken
        for length in range(1, len(way.tokens) + 1):
            gain, power = gain + power, power * way.acceptance
            extra = self._target_seconds(num_rows + 1 + length) - self._target_seconds(num_rows)
            if (profit := gain - MIN_GAIN * extra * tokens / seconds) > most:
                best, most = length, profit
        return best

    def acceptance(self, sequence: Sequence) -> float:
        """Estimated probability that this sequence's next draft token is accepted.

        Accepted / (accepted + rejections): tokens after a rejection were never tested and count for nothing.
        """
        engine_wide = self._accepted / (self._accepted + self._rejected)
        tested = sequence.recent_accepted + sequence.recent_rejected
        return (sequence.recent_accepted + PRIOR_WEIGHT * engine_wide) / (tested + PRIOR_WEIGHT)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from one verification of what passes of the draft have given."""
        self._num_observed += 1
        if num_accepted:
            self._num_kept = KEPT_STEPS
        rejected = int(num_accepted < num_drafted)
        sequence.recent_accepted = SEQUENCE_MEMORY * sequence.recent_accepted + num_accepted
        sequence.recent_rejected = SEQUENCE_MEMORY * sequence.recent_rejected + rejected
        self._accepted = ENGINE_MEMORY * self._accepted + num_accepted
        self._rejected = ENGINE_MEMORY * self._rejected + rejected
        if not rejected and self._can_pay:  # a probe that went well is followed by another soon
            self._interval = min(self._interval, PROBE_INTERVAL // 8)


class FixedLength(AdaptiveLength):
    """Always the same number of draft tokens; measures all the same."""

    def __init__(self, length: int, target_costs: PassCosts, draft_costs: PassCosts, draft: Drafter) -> None:
        super().__init__(target_costs, draft_costs, draft)
        self._length = length

    def begin_step(self, decoding: list[Sequence]) -> None:
        """Take what is at hand where it promises at least as many tokens as passes of the draft."""
        self._at_hand = {}
        for sequence in decoding:
            if (found := self.draft.at_hand(sequence)) is None:
                continue
            promised = expected_tokens(self.acceptance(sequence), self._length) if self.draft.runs_passes else 0.0
            if expected_tokens(found.acceptance, min(found.num_tokens, self._length)) >= promised:
                self._at_hand[sequence] = min(found.num_tokens, self._length)

    def __call__(self, sequence: Sequence) -> int:
        return self._length

    def tokens_of(self, way: OtherWay, num_rows: int) -> int:
        return self._length
