"""What `/load` says: how much there is to do, and how long requests have taken lately."""

import math
import time
from collections.abc import Iterable

import msgspec

from serve.http.metrics import RECENT_S, Metrics


class Percentiles(msgspec.Struct, frozen=True):
    """Of times in seconds."""

    p50: float
    p90: float
    p99: float


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/load`. What nothing is known of is null."""

    server_load: int
    """HTTP requests that generate, as vLLM counts them."""
    num_requests_running: int
    """Choices in the batch."""
    num_requests_waiting: int
    """Choices waiting for a place in it."""
    kv_cache_usage: float
    """Fraction of KV pages in use."""
    window_s: float
    """What follows is about the latest so many seconds."""
    num_finished: int
    """Choices, of which the percentiles are."""
    ttft_s: Percentiles | None
    """Arrival to first token."""
    tpot_s: Percentiles | None
    """Decode time over tokens after the first."""
    e2e_s: Percentiles | None
    """Arrival to last token."""
    generated_tokens_per_s: float
    cost_per_million_tokens: float | None
    """At `--price-per-hour`, of generated tokens."""


def load_of(num_calls: int, metrics: Metrics) -> Load:
    """The load of a server with so many open calls."""
    since = time.monotonic() - RECENT_S
    recent = [choice for choice in metrics.recent if choice.at >= since]
    cost, stats = metrics.cost_per_million_tokens(), metrics.stats
    return Load(
        server_load=num_calls,
        num_requests_running=stats.num_running,
        num_requests_waiting=stats.num_waiting,
        kv_cache_usage=stats.num_pages_used / stats.num_pages if stats.num_pages else 0.0,
        window_s=RECENT_S,
        num_finished=len(recent),
        ttft_s=percentiles(choice.ttft_s for choice in recent),
        tpot_s=percentiles(choice.tpot_s for choice in recent if choice.tpot_s is not None),
        e2e_s=percentiles(choice.e2e_s for choice in recent),
        generated_tokens_per_s=metrics.throughput.tokens_per_s(),
        cost_per_million_tokens=None if math.isnan(cost) else cost,
    )


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """By nearest rank: each is a value that occurred, and at least that share of them are no larger."""
    ranked = sorted(values)
    if not ranked:
        return None
    return Percentiles(*(ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.9, 0.99)))
