"""Fair shares between tenants: a virtual token counter for each, and the tenant with the lowest goes first.

    counter += (PROMPT_WEIGHT · prompt tokens) / weight         when a request is admitted
    counter += (OUTPUT_WEIGHT · output tokens) / weight         with every step

A tenant that comes with nothing waiting is lifted to the lowest counter of those that wait, or, when nobody does, to
that of the tenant who waited last: time in which it asked for nothing is no credit. Of two tenants that both have
requests waiting all the time the service differs by at most 2·max(PROMPT_WEIGHT · longest prompt, OUTPUT_WEIGHT · most
tokens in the batch), however much either asks for.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024, https://arxiv.org/abs/2401.00588), algorithm
2 and theorem 4.4, with their weights; divided by weights in section 4.4.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from serve.tenant import Tenant

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


@dataclass(eq=False, slots=True)
class Share:
    """What a tenant has had, and how many of its requests wait."""

    weight: float
    counter: float = 0.0
    num_waiting: int = 0

    def charge(self, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """It has been served."""
        self.counter += (PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens) / self.weight


class Waiting(Protocol):
    """What the order asks of a waiting request."""

    share: Share | None
    priority: int


Request = TypeVar("Request", bound=Waiting)


class FairShares:
    """The counters of all tenants; there are as many as the server has keys."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self.has_tenants = False
        """Whether there is anything to share; else requests go in the order of their arrival."""
        self._last_waiting: Share | None = None
        """The tenant of the last request that stopped waiting."""

    def of(self, tenant: Tenant | None) -> Share | None:
        """The share of a tenant, or of all requests of nobody in particular; None as long as there are no others."""
        tenant = tenant or Tenant()
        self.has_tenants |= bool(tenant.name)
        if not self.has_tenants:
            return None
        share = self._shares.setdefault(tenant.name, Share(tenant.weight))
        share.weight = tenant.weight
        return share

    def waits(self, share: Share, *, is_new: bool) -> None:
        """A request waits, anew or because it was preempted."""
        if is_new and not share.num_waiting:
            others = [other.counter for other in self._shares.values() if other.num_waiting]
            floor = min(others) if others else self._last_waiting.counter if self._last_waiting is not None else 0.0
            share.counter = max(share.counter, floor)
        share.num_waiting += 1

    def waits_no_more(self, share: Share) -> None:
        """A request was admitted, or given up."""
        share.num_waiting -= 1
        self._last_waiting = share

    def first(self, waiting: Iterable[Request]) -> Request | None:
        """Whose turn it is among `waiting`, in order of priority and arrival: of the first priority, who has had least.

        What came before there were tenants goes before all that they ask for.
        """
        num_tenants = sum(share.num_waiting > 0 for share in self._shares.values())
        best: Request | None = None
        seen: set[Share | None] = set()
        for request in waiting:
            if best is not None and request.priority != best.priority:
                break
            if request.share in seen:
                continue
            seen.add(request.share)
            if best is None or _had(request) < _had(best):
                best = request
            if len(seen) >= num_tenants or request.share is None:
                break
        return best


def _had(request: Waiting) -> float:
    return 0.0 if request.share is None else request.share.counter
