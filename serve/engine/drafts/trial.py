"""Whether another draft is accepted less often than the one before it, told as early as it can be.

Of tokens that the target verified, a share p was accepted. That a new draft's share is at least p is tested by betting
against it: shares below p, each a fixed part of it, are assumed in turn, and the mean of their likelihood ratios to p
is followed. If the new draft is as good, that mean ever reaches 1 / α with a probability of α at most (Ville's
inequality), so it may be looked at after each verification. Source: Shafer, "Testing by betting", JRSS A 184 (2021).
"""

import math
from dataclasses import dataclass

MEMORY = 0.999
"""What a verification leaves of the counts before it: about the latest thousand matter."""
PARTS = (0.0, 0.25, 0.5, 0.75, 0.9)
"""Of the old share, those that are bet on."""
ALPHA = 0.01
QUANTILE = 2.33
"""The old share may be below what was counted: it is taken as low as it is once in a hundred times."""


@dataclass
class Acceptance:
    """What became of a draft's tokens. Those behind a rejected one were never tested and count for nothing."""

    accepted: float = 0.0
    rejected: float = 0.0
    memory: float = MEMORY

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Of one verification."""
        self.accepted = self.memory * self.accepted + num_accepted
        self.rejected = self.memory * self.rejected + int(num_accepted < num_drafted)

    @property
    def tested(self) -> float:
        return self.accepted + self.rejected

    @property
    def share(self) -> float:
        """Accepted tokens of tested ones; 0 where there were none."""
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def least_share(self) -> float:
        """A share that is hardly above the true one; 0 where little is known."""
        deviation = math.sqrt(max(self.share * (1 - self.share), 1e-4) / (self.tested + 1))
        return max(self.share - QUANTILE * deviation, 0.0)


def is_worse(new: Acceptance, old: Acceptance) -> bool:
    """Whether that is certain to 1 - ALPHA. `new` has forgotten nothing."""
    share = old.least_share
    if share == 0.0:
        return False
    bets = [_log_ratio(part * share, share, new) for part in PARTS]
    most = max(bets)
    return most + math.log(sum(math.exp(bet - most) for bet in bets) / len(bets)) >= -math.log(ALPHA)


def _log_ratio(assumed: float, share: float, new: Acceptance) -> float:
    """Of the likelihoods of what was counted."""
    if assumed == 0.0 and new.accepted:
        return -1e9
    of_accepted = new.accepted * math.log(assumed / share) if new.accepted else 0.0
    return of_accepted + new.rejected * math.log((1 - assumed) / (1 - share))
