"""The description of the protocol is the truth: requests made from it, right and wrong ones, get what it says."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from serve.http.openapi import operation_of
from serve.http.page import PAGE_PATHS
from serve.http.requests import ChatRequest, CompletionRequest
from serve.http.routes import Routes
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.trials import trials

OPERATIONS = [
    *(("post", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
    *(("post", path) for path in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings")),
    *(("post", path) for path in ("/api/chat", "/api/generate", "/api/embed", "/api/show")),
    *(("get", path) for path in ("/v1/models", "/v1/models/{name}", "/health", "/version", "/load", "/metrics")),
    ("get", "/api/tags"),
]


def routes_of(*keys: str) -> Routes:
    return Routes(SimpleNamespace(options=SimpleNamespace(has_keys=bool(keys))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(routes_of()._openapi)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("openapi")
    options = ["--dtype", "float32", "--kv-cache-bytes", "8M", "--max-model-len", "64", "--served-model-name", "tiny"]
    speculation = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
    with running_server(save_tiny_folder(root / "model"), root / "log", *options, *speculation) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def api(server: RunningServer) -> Any:
    return pytest.importorskip("schemathesis").openapi.from_url(f"{server.url}/openapi.json")


def test_every_route_is_described(document: dict[str, Any]) -> None:
    routes: list[Any] = list(routes_of().router.routes)
    missing = [route.path for route in routes if operation_of(route) is None and route.path not in PAGE_PATHS]
    assert not missing, "mark their handlers with serve.http.openapi.operation"
    assert {(method, path) for path, methods in document["paths"].items() for method in methods} > set(OPERATIONS)


def test_every_reference_leads_somewhere_and_every_request_field_is_there(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))) == schemas.keys()
    for kind in (CompletionRequest, ChatRequest):
        properties = schemas[kind.__name__]["properties"]
        assert properties.keys() == set(kind.__struct_fields__)
        assert "vLLM: only these tokens" in properties["allowed_token_ids"]["description"]
        assert properties["use_beam_search"]["anyOf"][0]["enum"] == [False]


def test_keys_are_asked_for_where_there_are_some() -> None:
    paths = json.loads(routes_of("k")._openapi)["paths"]
    closed = {path for path, methods in paths.items() for what in methods.values() if "security" in what}
    assert paths.keys() - closed == {"/health", "/ping", "/metrics", "/openapi.json", "/docs"}


def test_the_page_loads_nothing_from_elsewhere(server: RunningServer) -> None:
    answer = httpx.get(f"{server.url}/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "script-src 'sha256-" in policy
    assert not re.findall(r"https?://|src=|@import|innerHTML|eval\(", answer.text)
    assert set(re.findall(r'href="(.*?)"', answer.text)) == {"openapi.json", "./"}


def test_examples_are_answered(server: RunningServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    for path, methods in document["paths"].items():
        if "requestBody" in methods.get("post", {}):
            example = methods["post"]["requestBody"]["content"]["application/json"]["example"] | {"model": "tiny"}
            answer = httpx.post(server.url + path, json=example, timeout=20)
            if path.endswith("lora_adapter"):  # for the operator to open
                assert answer.status_code == 404 and "--allowed-lora-path" in answer.text
                continue
            assert answer.status_code in (200, 400), answer.text
            assert answer.status_code == 200 or "context length" in answer.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*one, mode) for one in OPERATIONS for mode in ("POSITIVE", "NEGATIVE") if (one[0], mode) != ("get", "NEGATIVE")],
)
def test_answers_are_those_that_are_described(api: Any, method: str, path: str, mode: str) -> None:
    """schemathesis makes requests from the schema, and breaks it; no answer may be undescribed, no breach be taken."""
    import schemathesis
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as described

    wanted = [
        described.status_code_conformance,
        described.content_type_conformance,
        described.response_headers_conformance,
        described.response_schema_conformance,
    ]
    strategy = api[path][method.upper()].as_strategy(generation_mode=schemathesis.GenerationMode[mode])

    statuses: set[int] = set()

    @settings(
        max_examples=trials(8, 300),
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(case: Any) -> None:
        if mode == "POSITIVE" and isinstance(case.body, dict):
            case.body["model"] = "tiny"
        answer = case.call()
        statuses.add(answer.status_code)
        too_large = answer.status_code == 413
        late = answer.status_code == 504 and isinstance(case.body, dict) and case.body.get("deadline_s") is not None
        case.validate_response(
            answer,
            checks=wanted
            + ([] if too_large else [described.negative_data_rejection])
            + ([] if late else [checks.not_a_server_error]),
        )

    check()
    assert (200 in statuses) == (mode == "POSITIVE") or "{name}" in path
