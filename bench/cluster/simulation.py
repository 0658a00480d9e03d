"""A cluster as a sequence of events: requests arrive, steps end, replicas become ready or die, the autoscaler looks.

The same trace, seed and settings give the same outcome to the bit. Times are seconds of the simulation.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from bench.cluster.replica import EngineShape, Replica
from bench.cluster.routers import Router
from bench.cluster.trace import Conversation, Request
from serve.replicas import DOWNSCALE_S, LOOK_BACK_S, UPSCALE_S, ReplicaLoad, wanted_replicas


@dataclass(frozen=True)
class Autoscaler:
    """Keeps as many replicas as `serve.replicas.wanted_replicas` wants by queue and KV usage, within bounds.

    Delays mean what Ray Serve means by them, and are those of serve/cluster.py.
    """

    minimum: int
    maximum: int
    start_s: float = 40.0
    """Until a new replica takes requests: a machine, an image, weights."""
    every_s: float = 2.0
    """Between two looks."""
    upscale_s: float = UPSCALE_S
    """For which more must have been wanted before some are started."""
    downscale_s: float = DOWNSCALE_S
    """The same of fewer, before some are given back."""
    look_back_s: float = LOOK_BACK_S
    """Of how long a time the mean load counts."""


@dataclass(frozen=True)
class Failure:
    """A replica dies: of those that are ready, the one that has most requests."""

    at_s: float


@dataclass(frozen=True)
class Sample:
    """What a look at the cluster sees."""

    at_s: float
    ready: int
    starting: int
    draining: int
    running: int
    """Requests in a batch."""
    waiting: int


@dataclass
class Outcome:
    """What became of a trace."""

    requests: list[Request]
    replicas: list[Replica]
    end_s: float
    samples: list[Sample] = field(default_factory=list)
    num_unasked: int = 0
    """Turns of conversations that ended with a lost answer."""

    @property
    def replica_seconds(self) -> float:
        """Paid for, start-up included."""
        return self.replica_seconds_until(self.end_s)

    def replica_seconds_until(self, time_s: float) -> float:
        """The same up to then."""
        ends = [time_s if one.ended_s is None else min(one.ended_s, time_s) for one in self.replicas]
        return sum(max(0.0, end - one.began_s) for end, one in zip(ends, self.replicas, strict=True))


class Simulation:
    """One run of a trace."""

    def __init__(
        self,
        trace: Sequence[Conversation],
        shape: EngineShape,
        router: Router,
        *,
        replicas: int,
        autoscaler: Autoscaler | None = None,
        failures: Sequence[Failure] = (),
        retries: bool = True,
    ) -> None:
        """`replicas` are ready at the beginning. `retries`: clients ask again for answers that a death cut off."""
        self._shape, self._router, self._autoscaler, self._retries = shape, router, autoscaler, retries
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._num_events = 0
        self._now = 0.0
        self._outcome = Outcome([], [], 0.0)
        self._unrouted: list[Request] = []
        """While no replica takes requests."""
        self._num_left = sum(len(conversation.turns) for conversation in trace)
        """Turns that have not come to an end."""
        self._wish, self._wish_since = 0, 0.0
        """Whether the autoscaler wants more (1) or fewer (−1), and since when."""
        self._seen: dict[str, deque[ReplicaLoad]] = {}
        """What each replica had to do at the latest looks."""
        for _ in range(replicas):
            self._start(0.0).is_ready = True
        for conversation in trace:
            self._at(conversation.begin_s, self._ask, (conversation, 0))
        for failure in failures:
            self._at(failure.at_s, self._fail)
        if autoscaler is not None:
            self._at(0.0, self._look)

    def run(self) -> Outcome:
        """Until every turn has come to an end and the autoscaler rests."""
        while self._events and not self._is_over:
            self._now, _, happen, what = heapq.heappop(self._events)
            happen(*what)
        if self._num_left:
            raise RuntimeError(f"{self._num_left} turns never came to an end: no replica takes requests")
        self._outcome.end_s = self._now
        return self._outcome

    @property
    def _is_over(self) -> bool:
        rests = self._autoscaler is None or len(self._alive) == self._autoscaler.minimum
        return not self._num_left and rests

    @property
    def _alive(self) -> list[Replica]:
        return [replica for replica in self._outcome.replicas if replica.ended_s is None]

    def _at(self, time_s: float, happen: Callable[..., None], what: Any = ()) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, happen, what))

    # Requests

    def _ask(self, conversation: Conversation, turn: int) -> None:
        request = Request(len(self._outcome.requests), conversation, turn, self._now)
        self._outcome.requests.append(request)
        self._route(request)

    def _route(self, request: Request) -> None:
        taking = [replica for replica in self._outcome.replicas if replica.takes_requests]
        if not taking:
            self._unrouted.append(request)
            return
        replica = self._router.choose(request, taking)
        replica.add(request)
        self._compute(replica)

    def _compute(self, replica: Replica) -> None:
        if replica.requests and not replica.is_computing:
            self._at(self._now + replica.begin_step(), self._end_step, (replica,))

    def _end_step(self, replica: Replica) -> None:
        if replica.ended_s is not None:  # it died meanwhile
            return
        for request in replica.end_step(self._now):
            self._num_left -= 1
            conversation, turn = request.conversation, request.turn + 1
            if turn < len(conversation.turns):
                self._at(self._now + conversation.turns[turn].pause_s, self._ask, (conversation, turn))
        self._compute(replica)
        self._give_back_if_drained(replica)

    # Replicas

    def _start(self, delay_s: float) -> Replica:
        replica = Replica(f"replica {len(self._outcome.replicas)}", self._shape, self._now)
        self._outcome.replicas.append(replica)
        if delay_s:
            self._at(self._now + delay_s, self._be_ready, (replica,))
        return replica

    def _be_ready(self, replica: Replica) -> None:
        if replica.ended_s is not None:
            return
        replica.is_ready = True
        waiting, self._unrouted = self._unrouted, []
        for request in waiting:
            self._route(request)

    def _fail(self) -> None:
        ready = [replica for replica in self._alive if replica.is_ready]
        if not ready:
            return
        for request in max(ready, key=lambda replica: len(replica.requests)).die(self._now):
            if request.first_s is not None and not self._retries:
                request.is_lost = True
                unasked = len(request.conversation.turns) - request.turn - 1
                self._num_left -= 1 + unasked
                self._outcome.num_unasked += unasked
                continue
            request.first_s, request.num_tries = None, request.num_tries + 1
            self._route(request)

    def _give_back_if_drained(self, replica: Replica) -> None:
        if replica.is_draining and not replica.requests:
            replica.ended_s = self._now

    # The autoscaler

    def _look(self) -> None:
        scaler = self._autoscaler
        if scaler is None:
            return
        self._sample()
        kept = [replica for replica in self._alive if not replica.is_draining]
        wanted = min(max(self._wanted(scaler, kept), scaler.minimum), scaler.maximum)
        wish = (wanted > len(kept)) - (wanted < len(kept))
        if wish != self._wish:
            self._wish, self._wish_since = wish, self._now
        if len(kept) < scaler.minimum:  # one died
            self._resize(kept, scaler.minimum)
        elif wish and self._now - self._wish_since >= (scaler.upscale_s if wish > 0 else scaler.downscale_s):
            self._resize(kept, wanted)
            self._wish = 0
        self._at(self._now + scaler.every_s, self._look)

    def _wanted(self, scaler: Autoscaler, kept: Sequence[Replica]) -> int:
        """By the mean load of each replica that takes requests; where none does, as many as there are."""
        looks = max(1, round(scaler.look_back_s / scaler.every_s))
        means = []
        for replica in (one for one in kept if one.is_ready):
            seen = self._seen.setdefault(replica.name, deque(maxlen=looks))
            seen.append(replica.load)
            means.append(ReplicaLoad(*(sum(values) / len(seen) for values in zip(*map(astuple, seen), strict=True))))
        return wanted_replicas(means, self._shape.max_num_seqs) if means else max(len(kept), 1)

    def _resize(self, kept: Sequence[Replica], count: int) -> None:
        """Start some, or give back those that were started last."""
        for _ in range(count - len(kept)):
            self._start(self._autoscaler.start_s if self._autoscaler else 0.0)
        for replica in reversed(kept[count:]):
            replica.is_draining = True
            self._give_back_if_drained(replica)

    def _sample(self) -> None:
        alive = self._alive
        loads = [replica.load for replica in alive]
        self._outcome.samples.append(
            Sample(
                self._now,
                ready=sum(replica.takes_requests for replica in alive),
                starting=sum(not replica.is_ready for replica in alive),
                draining=sum(replica.is_draining for replica in alive),
                running=int(sum(load.num_running for load in loads)),
                waiting=int(sum(load.num_waiting for load in loads)) + len(self._unrouted),
            )
        )


def summary(outcome: Outcome) -> dict[str, Any]:
    """Simulated figures of a run."""
    finished = [request for request in outcome.requests if request.end_s is not None]
    ttft = [request.first_s - request.arrival_s for request in finished if request.first_s is not None]
    tpot = [
        (request.end_s - request.first_s) / (request.answer - 1)
        for request in finished
        if request.end_s is not None and request.first_s is not None and request.answer > 1
    ]
    span = max((request.end_s or 0.0 for request in finished), default=0.0)
    span -= min((request.arrival_s for request in outcome.requests), default=0.0)
    caches = [replica.cache for replica in outcome.replicas]
    queried = sum(cache.num_queried_tokens for cache in caches)
    return {
        "requests": len(outcome.requests),
        "finished": len(finished),
        "lost": sum(request.is_lost for request in outcome.requests),
        "retried": sum(request.num_tries > 1 for request in outcome.requests),
        "output_tokens_per_s": sum(request.answer for request in finished) / span if span else 0.0,
        "ttft_s": {"p50": percentile(ttft, 0.5), "p99": percentile(ttft, 0.99)},
        "tpot_s": {"p50": percentile(tpot, 0.5), "p99": percentile(tpot, 0.99)},
        "prefix_hit_rate": sum(cache.num_hit_tokens for cache in caches) / queried if queried else 0.0,
        "preemptions": sum(replica.scheduler.num_preemptions for replica in outcome.replicas),
        "most_replicas": most_at_once(outcome),
        "replica_seconds": outcome.replica_seconds,
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that so many are not above; None of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def most_at_once(outcome: Outcome) -> int:
    """Replicas that there were, starting and draining ones among them."""
    changes = [(one.began_s, 1) for one in outcome.replicas]
    changes += [(one.ended_s, -1) for one in outcome.replicas if one.ended_s is not None]
    most = count = 0
    for _, change in sorted(changes):
        count += change
        most = max(most, count)
    return most
