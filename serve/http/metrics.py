"""Prometheus metrics, each under two names: `potstill:NAME` and, so that existing dashboards work, `vllm:NAME`.

Label sets are closed: the model's name, finish reasons, our own routes, status codes. Nothing a client sends becomes a
label. Names and meanings follow vLLM 0.33; counters gain `_total`. Durations in seconds, lengths in tokens.
"""

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from serve.messages import Ready
from serve.outputs import EngineStats, FinishReason, RequestOutput
from serve.sampling_params import SamplingParams

PREFIX, ALIAS = "potstill:", "vllm:"
MAX_DRAFT_POSITIONS = 16
"""Places in the draft that get a label of their own."""
# Roughly geometric, so that one set of buckets reads well from a laptop's CPU to a large GPU.
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = tuple(float(2**power) for power in range(18))
LOOK_S = 0.05
"""How often the event loop's lag is measured."""
SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})? (\S+)")
"""A line of what Prometheus scrapes: name, labels, value."""
RECENT_S = 300.0
"""How far back "recently" goes, in percentiles, throughput and cost."""
MAX_RECENT = 10_000
"""Choices of that time, at most, that percentiles are made of."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times of one choice that has finished, in seconds; `at` is when, of `time.monotonic()`."""

    at: float
    ttft_s: float
    tpot_s: float | None
    """Decode time over tokens after the first; None with one token."""
    e2e_s: float


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """What became of one request, for its log line and its trace. Times in seconds; None: it did not come to that."""

    model_name: str
    num_prompt_tokens: int
    num_output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    """Of its choice with most tokens."""
    finish_reasons: tuple[str, ...]
    """Of its choices that finished, each once."""
    params: SamplingParams | None
    """What it asked of sampling."""


@dataclass(frozen=True)
class RequestMetrics:
    """What is measured of each request, under the name of the model or adapter that it asks for."""

    model_name: str
    recent: deque[Latencies]
    """Of all models together."""
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    prompt_length: Histogram
    generation_length: Histogram
    request_success: Mapping[str, Counter]
    """By finish reason, all from zero on: what is bound once can be removed for good."""


class Metrics:
    """All metrics of one server. Not global: two servers in one process do not mix."""

    def __init__(self, model_name: str, *adapters: str, price_per_hour: float | None = None) -> None:
        """`price_per_hour` of the machine, in any currency: then there is a gauge of what tokens cost."""
        self._source = CollectorRegistry(auto_describe=False)
        self._public = CollectorRegistry(auto_describe=False)
        self._public.register(_TwoNames(self._source))
        self._model_name = model_name
        self.stats = EngineStats()
        self.recent: deque[Latencies] = deque(maxlen=MAX_RECENT)
        self.throughput = Throughput()
        self.price_per_hour = price_per_hour
        self._gauges()
        self._counters()
        self.iteration_tokens = self._one(
            Histogram, "iteration_tokens_total", "Prompt and output tokens between two reports.", buckets=TOKENS
        )
        self.event_loop_lag = self._one(
            Histogram, "event_loop_lag_seconds", "How late the HTTP process ran what was due.", buckets=TOKEN_SECONDS
        )
        self._families = self._request_families()
        self._requests: dict[str, RequestMetrics] = {}
        for name in (model_name, *adapters):
            self.add_model(name)

    def add_model(self, name: str) -> None:
        """Requests may name this one."""
        if name not in self._requests:
            self._requests[name] = _bind(self._families, name, self.recent)

    def remove_model(self, name: str) -> None:
        """None does any more: what was measured under its name is not shown any longer."""
        del self._requests[name]
        for family in self._families.values():
            family.remove_by_labels({"model_name": name})

    def watch_adapters(self, max_loras: int, requests: Callable[[], Iterator[tuple[str, bool]]]) -> None:
        """Show which adapters run and wait; `requests` names that of each request, and says whether it runs."""
        self._source.register(_AdapterInfo(max_loras, requests))

    def of(self, adapter: str | None) -> RequestMetrics:
        """Those of requests for an adapter; None: for the model itself."""
        return self._requests[adapter or self._model_name]

    def _gauges(self) -> None:
        self.num_requests_running = self._one(Gauge, "num_requests_running", "Choices in the running batch.")
        self.num_requests_waiting = self._one(Gauge, "num_requests_waiting", "Choices waiting for a place.")
        self.kv_cache_usage = self._one(Gauge, "kv_cache_usage_perc", "Fraction of KV pages in use; 1 is all.")
        self.speculative_tokens = self._one(Gauge, "spec_decode_draft_length", "Mean draft length asked for lately.")
        self.num_graphs = self._one(Gauge, "cuda_graphs", "Kinds of steps that are replayed from a CUDA graph.")
        self.num_graph_failures = self._one(
            Gauge, "cuda_graph_failures", "Captures that failed; such steps are launched kernel by kernel."
        )
        self.draft_on_trial = self._one(Gauge, "draft_on_trial", "1 while a newer draft has not proved itself.")
        self.label_bytes = self._one(Gauge, "label_bytes", "Bytes that stored labels take.")
        self.response_cache_bytes = self._one(Gauge, "response_cache_bytes", "Bytes that kept answers take.")
        self.engine_ready = self._one(Gauge, "engine_ready", "1 while a warm engine is connected, else 0.")
        if self.price_per_hour is not None:
            cost = self._one(Gauge, "cost_per_million_generation_tokens", "Price of 1,000,000 tokens generated lately.")
            cost.set_function(self.cost_per_million_tokens)
        self.cache_config = Gauge(
            f"{PREFIX}cache_config_info",
            "Pages of the KV cache and tokens in a page.",
            ["model_name", "num_gpu_blocks", "block_size"],
            registry=self._source,
        )

    def _counters(self) -> None:
        self._totals = {
            name: self._one(Counter, metric, explanation)
            for name, metric, explanation in (
                ("num_prompt_tokens", "prompt_tokens", "Prompt tokens computed or found in the cache."),
                ("num_generation_tokens", "generation_tokens", "Tokens generated."),
                ("num_preemptions", "num_preemptions", "Sequences that lost their pages and were recomputed."),
                ("prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
                ("prefix_cache_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
                ("num_drafts", "spec_decode_num_drafts", "Verifications with at least one draft token."),
                ("num_draft_tokens", "spec_decode_num_draft_tokens", "Draft tokens proposed."),
                ("num_accepted_tokens", "spec_decode_num_accepted_tokens", "Draft tokens accepted."),
                ("num_draft_swaps", "draft_swaps", "Newer drafts that were swapped in."),
                ("num_draft_rollbacks", "draft_rollbacks", "Newer drafts that were taken back."),
                ("num_labels", "labels_stored", "Distributions stored for training."),
                ("num_dropped_labels", "labels_dropped", "Answers whose labels could not be stored."),
            )
        }
        self.accepted_per_position = self._many(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by place.", "position"
        )
        self.admission_rejections = self._many(
            Counter, "admission_rejections", "Requests refused for overload.", "reason"
        )
        for reason in ("queue_full", "queue_wait"):  # from zero on, so that a rate sees the first
            self.admission_rejections.labels(reason=reason)
        self.response_cache_queries = self._one(
            Counter, "response_cache_queries", "Requests whose answer could have been kept."
        )
        self.response_cache_hits = self._one(Counter, "response_cache_hits", "Requests answered as before.")
        self.engine_restarts = self._one(Counter, "engine_restarts", "Engines started after one died or hung.")
        self.engine_stalls = self._one(Counter, "engine_stalls", "Engines killed because no step ended in time.")
        self.http_requests = self._many(Counter, "http_requests", "HTTP requests answered.", "route", "status")

    def _request_families(self) -> dict[str, Counter | Histogram]:
        """The fields of RequestMetrics, with the model's name open."""

        def family(name: str, explanation: str, buckets: tuple[float, ...] = REQUEST_SECONDS) -> Histogram:
            return Histogram(f"{PREFIX}{name}", explanation, ["model_name"], registry=self._source, buckets=buckets)

        return {
            "time_to_first_token": family("time_to_first_token_seconds", "Arrival to first token."),
            "inter_token_latency": family("inter_token_latency_seconds", "Gap between outputs.", TOKEN_SECONDS),
            "time_per_output_token": family(
                "request_time_per_output_token_seconds", "Decode time over tokens after the first.", TOKEN_SECONDS
            ),
            "e2e_latency": family("e2e_request_latency_seconds", "Arrival to last token."),
            "queue_time": family("request_queue_time_seconds", "Arrival to a place in the batch."),
            "prefill_time": family("request_prefill_time_seconds", "A place in the batch to the first token."),
            "decode_time": family("request_decode_time_seconds", "First token to last token."),
            "prompt_length": family("request_prompt_tokens", "Prompt tokens.", TOKENS),
            "generation_length": family("request_generation_tokens", "Output tokens.", TOKENS),
            "request_success": Counter(
                f"{PREFIX}request_success",
                "Choices that finished, by finish reason.",
                ["model_name", "finished_reason"],
                registry=self._source,
            ),
        }

    def _one(self, kind, name: str, explanation: str, **settings):  # type: ignore[no-untyped-def]
        """A metric whose only label is the model's name, with that label filled in."""
        metric = kind(f"{PREFIX}{name}", explanation, ["model_name"], registry=self._source, **settings)
        return metric.labels(self._model_name)

    def _many(self, kind, name: str, explanation: str, *labels: str) -> "_Labelled":  # type: ignore[no-untyped-def]
        metric = kind(f"{PREFIX}{name}", explanation, ["model_name", *labels], registry=self._source)
        return _Labelled(metric, self._model_name)

    def engine_started(self, info: Ready) -> None:
        """A fresh engine: its counters begin anew, ours go on."""
        self.stats = info.stats
        self.engine_ready.set(1)
        self.cache_config.labels(self._model_name, info.num_pages, info.page_size).set(1)

    def engine_ended(self) -> None:
        """No engine, so nothing runs, waits or holds pages."""
        self.engine_ready.set(0)
        self.stats = EngineStats()
        self._set_gauges(self.stats)

    def cost_per_million_tokens(self) -> float:
        """What a million generated tokens cost at the latest throughput; NaN without a price, or without tokens."""
        rate = self.throughput.tokens_per_s()
        return 1e6 * self.price_per_hour / 3600 / rate if self.price_per_hour is not None and rate else math.nan

    def record_stats(self, stats: EngineStats) -> None:
        """Take over what the engine says of itself after a step."""
        before, self.stats = self.stats, stats
        self._set_gauges(stats)
        for name, counter in self._totals.items():
            counter.inc(getattr(stats, name) - getattr(before, name))
        for position, accepted in enumerate(stats.accepted_per_position[:MAX_DRAFT_POSITIONS]):
            earlier = before.accepted_per_position[position] if position < len(before.accepted_per_position) else 0
            self.accepted_per_position.labels(position=str(position)).inc(accepted - earlier)
        new_output = stats.num_generation_tokens - before.num_generation_tokens
        self.throughput.record(new_output)
        if new_tokens := stats.num_prompt_tokens - before.num_prompt_tokens + new_output:
            self.iteration_tokens.observe(new_tokens)

    async def measure_lag(self) -> None:
        """How late a task of the event loop runs that is due: by so much is every stream delayed. Until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.event_loop_lag.observe(max(0.0, clock() - due))

    def _set_gauges(self, stats: EngineStats) -> None:
        self.num_requests_running.set(stats.num_running)
        self.num_requests_waiting.set(stats.num_waiting)
        self.kv_cache_usage.set(stats.num_pages_used / stats.num_pages if stats.num_pages else 0.0)
        self.speculative_tokens.set(stats.speculative_tokens)
        self.draft_on_trial.set(stats.draft_on_trial)
        self.label_bytes.set(stats.label_bytes)
        self.num_graphs.set(stats.num_graphs)
        self.num_graph_failures.set(stats.num_graph_failures)

    def expose(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._public)


def joined(texts: Mapping[str, str], label: str) -> str:
    """What Prometheus scrapes of several servers, given by name: each sample with its server's name as this label."""
    families: dict[str, dict[str, None]] = {}
    family: dict[str, None] = {}
    for server, text in texts.items():
        for line in text.splitlines():
            if line.startswith("# "):
                family = families.setdefault(line.split(" ", 3)[2], {})
                family[line] = None
            elif found := SAMPLE.fullmatch(line):
                name, labels, value = found.groups(default="")
                family[f'{name}{{{label}="{server}"{labels and f",{labels}"}}} {value}'] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


class Throughput:
    """Tokens generated per second in the latest RECENT_S."""

    INTERVAL_S = 5.0

    def __init__(self) -> None:
        self._num_tokens = 0
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        """Times, at least INTERVAL_S apart, and all tokens until then."""

    def record(self, num_tokens: int) -> None:
        """So many more tokens."""
        self._num_tokens += num_tokens
        now = time.monotonic()
        if now - self._samples[-1][0] >= self.INTERVAL_S:
            self._samples.append((now, self._num_tokens))
        while now - self._samples[0][0] > RECENT_S and len(self._samples) > 1:
            self._samples.popleft()

    def tokens_per_s(self) -> float:
        began, num_tokens = self._samples[0]
        return (self._num_tokens - num_tokens) / max(time.monotonic() - began, 1e-9)


def _bind(families: dict[str, Counter | Histogram], model_name: str, recent: deque[Latencies]) -> RequestMetrics:
    """The families with the model's name filled in."""
    by_reason = families["request_success"]
    bound: dict[str, Any] = {
        name: family.labels(model_name) for name, family in families.items() if family != by_reason
    }
    success: dict[str, Any] = {reason: by_reason.labels(model_name, reason) for reason in get_args(FinishReason)}
    return RequestMetrics(model_name, recent, request_success=success, **bound)


class _Labelled:
    """A metric with the model's name filled in and further labels open."""

    def __init__(self, metric: Counter, model_name: str) -> None:
        self._metric = metric
        self._model_name = model_name

    def labels(self, **labels: str) -> Counter:
        return self._metric.labels(model_name=self._model_name, **labels)


class _AdapterInfo:
    """vLLM's lora_requests_info: one series, of now; its value is the time, in seconds."""

    def __init__(self, max_loras: int, requests: Callable[[], Iterator[tuple[str, bool]]]) -> None:
        self._max_loras, self._requests = max_loras, requests

    def collect(self) -> Iterator[Metric]:
        found = set(self._requests())
        running, waiting = (",".join(sorted(name for name, runs in found if runs is state)) for state in (True, False))
        family = GaugeMetricFamily(
            f"{PREFIX}lora_requests_info",
            "Adapters of requests that run and wait.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        family.add_metric([str(self._max_loras), running, waiting], time.time())
        yield family


class _TwoNames:
    """Collects every family of a registry twice: under our prefix and under vLLM's."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            yield family
            alias = Metric(family.name.replace(PREFIX, ALIAS, 1), family.documentation, family.type, family.unit)
            alias.samples = [
                sample._replace(name=sample.name.replace(PREFIX, ALIAS, 1))
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield alias


class ChoiceTimer:
    """Times of one choice, recorded as its outputs arrive."""

    def __init__(
        self, metrics: RequestMetrics, arrival: float, started: float | None, *, is_computed: bool = True
    ) -> None:
        """`is_computed`: not an answer that is given again, whose times say nothing of the engine."""
        self._metrics = metrics
        self._is_computed = is_computed
        self._arrival = arrival
        self._started = started
        """When it got its place in the batch; None if that was not reported."""
        self._first: float | None = None
        self._last = arrival
        self.latest = RequestOutput("", 0)
        """Its counts and how it finished, so far."""

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self._first is None else self._first - self._arrival

    @property
    def tpot_s(self) -> float | None:
        """Decode time over tokens after the first."""
        if self._first is None or self.latest.num_output_tokens < 2:
            return None
        return (self._last - self._first) / (self.latest.num_output_tokens - 1)

    def record(self, output: RequestOutput) -> None:
        now = time.monotonic()
        self.latest = output
        if output.new_token_ids:
            if self._is_computed:
                self._observe_tokens(now)
            self._first = now if self._first is None else self._first
            self._last = now
        if output.finish_reason is not None:
            self._count(output, output.finish_reason)
            if self._is_computed:
                self._observe_whole(now)

    def _observe_tokens(self, now: float) -> None:
        if self._first is not None:
            self._metrics.inter_token_latency.observe(now - self._last)
            return
        self._metrics.time_to_first_token.observe(now - self._arrival)
        if self._started is not None:
            self._metrics.prefill_time.observe(now - self._started)

    def _count(self, output: RequestOutput, reason: str) -> None:
        self._metrics.request_success[reason].inc()
        self._metrics.generation_length.observe(output.num_output_tokens)
        if output.index == 0:
            self._metrics.prompt_length.observe(output.num_prompt_tokens)

    def _observe_whole(self, now: float) -> None:
        self._metrics.e2e_latency.observe(now - self._arrival)
        if self._first is None:
            return
        self._metrics.decode_time.observe(self._last - self._first)
        if self.tpot_s is not None:
            self._metrics.time_per_output_token.observe(self.tpot_s)
        self._metrics.recent.append(Latencies(now, self._first - self._arrival, self.tpot_s, now - self._arrival))


def summarize(
    metrics: RequestMetrics,
    params: SamplingParams | None,
    queue_s: float | None,
    timers: dict[tuple[int, int], ChoiceTimer],
) -> RequestSummary:
    """A request's choices, by prompt and number, together."""
    by_length = sorted(timers.values(), key=lambda timer: timer.latest.num_output_tokens)
    prompts = {prompt: timer.latest.num_prompt_tokens for (prompt, _), timer in timers.items()}
    return RequestSummary(
        metrics.model_name,
        num_prompt_tokens=sum(prompts.values()),
        num_output_tokens=sum(timer.latest.num_output_tokens for timer in by_length),
        queue_s=queue_s,
        ttft_s=min((timer.ttft_s for timer in by_length if timer.ttft_s is not None), default=None),
        tpot_s=by_length[-1].tpot_s if by_length else None,
        finish_reasons=tuple(sorted({str(timer.latest.finish_reason) for timer in by_length if timer.latest.finished})),
        params=params,
    )
