"""Traces, as a collector receives them: read with OpenTelemetry's own protocol."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.http.tracing import EXPORT_S, Tracer
from tests.serve.http_server import ROOT, SCRIPTED, running_server, save_tiny_folder

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("tracing") / "model")


class Collector:
    """Keeps all spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = trace_service.ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in request.resource_spans:
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_of_the_clients_trace(folder: Path, tmp_path: Path, collector: Collector) -> None:
    options = ["--served-model-name", "tiny", "--otlp-traces-endpoint", collector.url]
    with running_server(folder, tmp_path / "log", *options, program=SCRIPTED) as server:
        body = {"prompt": [20], "max_tokens": 5, "temperature": 0.5, "n": 2}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        began, asked = time.time_ns(), time.monotonic()
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
        ended, waited = time.time_ns(), time.monotonic() - asked
        late = body | {"max_tokens": 50_000, "deadline_s": 0.1, "prompt": "secret words"}
        assert httpx.post(f"{server.url}/v1/completions", json=late).status_code == 504
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.terminate() == 0
    first, second = collector.spans
    assert first.name == "llm_request" and first.kind == first.SPAN_KIND_SERVER
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert began - 10**7 <= first.start_time_unix_nano <= first.end_time_unix_nano <= ended + 10**7
    said = attributes(first)
    times = [said.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert 0 <= times[0] < times[1] < 0.1 <= times[2] <= waited
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 2,
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.prompt_tokens": 1,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
    }
    failed = attributes(second)
    assert second.status.code == second.status.STATUS_CODE_ERROR
    assert (failed["error.type"], failed["http.response.status_code"]) == ("deadline_exceeded", 504)
    assert b"secret" not in second.SerializeToString() and second.trace_id != first.trace_id


def test_a_collector_that_is_away_holds_up_nobody(folder: Path, tmp_path: Path) -> None:
    away = "http://127.0.0.1:9/v1/traces"
    with running_server(folder, tmp_path / "log", "--otlp-traces-endpoint", away, program=SCRIPTED) as server:
        for _ in range(5):
            began = time.monotonic()
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1], "max_tokens": 2})
            assert answer.status_code == 200 and time.monotonic() - began < 0.5
        began = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - began < 2 * EXPORT_S + 3


def test_without_the_extra_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ValueError, match=r"pip install 'potstill\[otel\]'"):
        Tracer("http://127.0.0.1:9/v1/traces")


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    code = "import sys, serve.http.server; print(*[name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()
