"""Traces, if asked for: one OpenTelemetry span for each request that generates, sent as OTLP over HTTP.

The span is called as vLLM calls it, and continues the trace that the client's `traceparent` names. Attributes are those
of OpenTelemetry's conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/) and, for times,
vLLM's. Prompts and answers are in none. OpenTelemetry is imported here alone, and only then.
"""

import time
from typing import Any

from starlette.types import Scope

from serve.http.metrics import RequestSummary

SPAN_NAME = "llm_request"
COMPLETIONS = {"/v1/completions", "/api/generate"}
"""Paths that continue a text; all others answer in a chat."""
EXPORT_S = 2.0
"""How long the collector may take for a batch, and how long the server waits at its end to be rid of the last."""


class Tracer:
    """Makes spans and sends them from a thread of its own: a collector that is away holds up nobody."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the collector's URL for traces. ValueError when OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ValueError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'potstill[otel]'") from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "potstill"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_S)))
        self._tracer = self._provider.get_tracer("potstill")
        self._contexts = TraceContextTextMapPropagator()
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    def record(
        self, scope: Scope, request_id: str, outcome: tuple[int, str | None], e2e_s: float, summary: RequestSummary
    ) -> None:
        """A request that has just ended, `e2e_s` after it began, with a status and the code of what it failed by."""
        status, failure = outcome
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        end = time.time_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._contexts.extract(carrier),
            kind=self._kind,
            start_time=end - int(1e9 * e2e_s),
            attributes={name: value for name, value in attributes_of(summary).items() if value is not None},
        )
        span.set_attribute("gen_ai.operation.name", "text_completion" if scope["path"] in COMPLETIONS else "chat")
        span.set_attribute("gen_ai.request.id", request_id)
        span.set_attribute("gen_ai.latency.e2e", e2e_s)
        span.set_attribute("http.response.status_code", status)
        if failure is not None:
            span.set_attribute("error.type", failure)
            span.set_status(self._failed)
        span.end(end)

    def close(self) -> None:
        """Send what is left, for a moment."""
        self._provider.force_flush(int(1000 * EXPORT_S))
        self._provider.shutdown()


def attributes_of(summary: RequestSummary) -> dict[str, Any]:
    """What a span says of a request; None where there is nothing to say."""
    params = summary.params
    return {
        "gen_ai.request.model": summary.model_name,
        "gen_ai.response.model": summary.model_name,
        "gen_ai.request.max_tokens": params and params.max_tokens,
        "gen_ai.request.temperature": params and params.temperature,
        "gen_ai.request.top_p": params and params.top_p,
        "gen_ai.request.n": params and params.n,
        "gen_ai.usage.input_tokens": summary.num_prompt_tokens,
        "gen_ai.usage.output_tokens": summary.num_output_tokens,
        "gen_ai.usage.prompt_tokens": summary.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": summary.num_output_tokens,
        "gen_ai.response.finish_reasons": summary.finish_reasons or None,
        "gen_ai.latency.time_in_queue": summary.queue_s,
        "gen_ai.latency.time_to_first_token": summary.ttft_s,
    }
