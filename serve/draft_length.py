"""How many tokens to draft: the k that maximises expected tokens per second, from what was measured.

With acceptance rate a, drafting k tokens yields (1 - a^(k+1)) / (1 - a) tokens a step, and costs k passes of the draft
and one pass of the target over k + 1 rows a sequence instead of one. Source: https://arxiv.org/abs/2211.17192.
"""

import bisect

from serve.sequence import Sequence

MAX_DRAFT_TOKENS = 8
"""The longest draft that is tried; beyond it the gain is small at any acceptance rate worth drafting for."""
MIN_GAIN = 1.03
"""Drafting must promise this much over not drafting: the estimates are noisy, and a wrong yes costs more."""
INITIAL_ACCEPTANCE = 0.7
PRIOR_WEIGHT = 2.0
"""Draft tokens' worth of trust in the engine-wide acceptance rate, for a sequence with a rate of its own."""
SEQUENCE_MEMORY = 0.95
"""What one verification leaves of a sequence's earlier counts: a memory of 20 verifications."""
ENGINE_MEMORY = 0.99


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens that a step emits for a sequence with `num_drafts` draft tokens, each accepted with this probability."""
    return sum(acceptance**i for i in range(num_drafts + 1))


class PassCosts:
    """Seconds of a forward pass by its number of rows: decaying means, linear in between."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}

    def record(self, num_rows: int, seconds: float) -> None:
        rows = _bucket(num_rows)
        known = self._seconds.get(rows)
        if known is None:
            bisect.insort(self._rows, rows)
            self._seconds[rows] = seconds
        else:  # one hiccup of the machine must not look like a trend
            self._seconds[rows] = known + 0.2 * (min(seconds, 3 * known) - known)

    def estimate(self, num_rows: int) -> float | None:
        """Seconds of a pass of `num_rows` rows; None before anything was measured.

        Outside of what was measured it is the nearest measurement: hopeful for more rows, so they get tried once.
        """
        if not self._rows:
            return None
        at = bisect.bisect_left(self._rows, num_rows)
        if at == len(self._rows):
            return self._seconds[self._rows[-1]]
        high = self._rows[at]
        if high == num_rows or at == 0:
            return self._seconds[high]
        low = self._rows[at - 1]
        weight = (num_rows - low) / (high - low)
        return (1 - weight) * self._seconds[low] + weight * self._seconds[high]


def _bucket(num_rows: int) -> int:
    """Row counts above 16 share a bucket with those that agree in their four highest bits."""
    shift = max(0, num_rows.bit_length() - 5)
    return num_rows >> shift << shift


class AdaptiveLength:
    """Follows acceptance, per sequence and engine-wide, and the costs of both models."""

    def __init__(self) -> None:
        self.target_costs, self.draft_costs = PassCosts(), PassCosts()
        self._accepted, self._rejected = 10 * INITIAL_ACCEPTANCE, 10 * (1 - INITIAL_ACCEPTANCE)
        self._step_costs: list[float] = []

    def begin_step(self, num_decoding: int) -> None:
        """Estimate the seconds of a step in which all of `num_decoding` sequences draft 0, 1, 2, ... tokens."""
        self._step_costs = []
        draft = self.draft_costs.estimate(num_decoding)
        for length in range(MAX_DRAFT_TOKENS + 1):
            target = self.target_costs.estimate(num_decoding * (length + 1))
            if target is None:
                return
            self._step_costs.append(target + length * (draft or 0.0))

    def __call__(self, sequence: Sequence) -> int:
        """Draft tokens that this sequence should get now."""
        if not self._step_costs:
            return 1
        acceptance = self.acceptance(sequence)
        plain = 1 / self._step_costs[0]
        best, best_rate, expected, power = 0, plain * MIN_GAIN, 1.0, 1.0
        for length in range(1, MAX_DRAFT_TOKENS + 1):
            power *= acceptance
            expected += power
            rate = expected / self._step_costs[length]
            if rate > best_rate:
                best, best_rate = length, rate
        return best or int(_is_probe(sequence))

    def acceptance(self, sequence: Sequence) -> float:
        """Estimated probability that this sequence's next draft token is accepted.

        Accepted / (accepted + rejections): tokens after a rejection were never tested and count for nothing.
        """
        engine_wide = self._accepted / (self._accepted + self._rejected)
        tested = sequence.recent_accepted + sequence.recent_rejected
        return (sequence.recent_accepted + PRIOR_WEIGHT * engine_wide) / (tested + PRIOR_WEIGHT)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from one verification."""
        rejected = int(num_accepted < num_drafted)
        sequence.recent_accepted = SEQUENCE_MEMORY * sequence.recent_accepted + num_accepted
        sequence.recent_rejected = SEQUENCE_MEMORY * sequence.recent_rejected + rejected
        self._accepted = ENGINE_MEMORY * self._accepted + num_accepted
        self._rejected = ENGINE_MEMORY * self._rejected + rejected


class FixedLength(AdaptiveLength):
    """Always the same number of draft tokens; measures all the same."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __call__(self, sequence: Sequence) -> int:
        return self.length


def _is_probe(sequence: Sequence) -> bool:
    """Whether to draft one token although it should lose, so that better times are noticed.

    At output lengths 16, 32, 64, ...: catching up the draft's cache then costs each token at most one draft pass in
    bulk. And in every 16th request at its first decode, for loads of short answers.
    """
    length = sequence.num_output
    return (length >= 16 and length & (length - 1) == 0) or (length == 1 and sequence.id % 16 == 0)
