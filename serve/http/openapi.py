"""OpenAPI 3.1 of the routes, from the types that requests are read into and answers are written from.

A handler is marked by `operation`; what a field means is the docstring below it. Nothing is described a second time.
What JSON schema cannot say, such as that two fields exclude each other, is a 400 with a sentence.
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route

from kernels import __version__
from serve.http.errors import ErrorBody
from serve.http.middleware import OPEN_PATHS

REFERENCE = "#/components/schemas/{name}"
JSON, EVENTS = "application/json", "text/event-stream"
ERRORS = {
    400: "Something in the request is wrong; the message says what, `param` where.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body came, or the answer was read, too slowly.",
    413: "The body is larger than the server takes.",
    415: "The body's Content-Encoding is not gzip.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    500: "The server has failed on this request.",
    503: "The engine is starting or the server is leaving; try again after `Retry-After` seconds.",
    504: "The request was not finished in time.",
}
Handler = TypeVar("Handler", bound=Callable[..., Any])


@dataclass(frozen=True)
class Operation:
    """What a route does."""

    summary: str
    request: type[msgspec.Struct] | None = None
    """What its body is read into; None: it has none."""
    answer: Any = None
    """What its answer is written from; None: text."""
    text: str = "text/plain"
    """Of what kind the text is."""
    events: Any = None
    """What each event or line of a stream is written from, where the route streams."""
    stream: str = EVENTS
    errors: Any = ErrorBody
    example: dict[str, Any] = field(default_factory=dict)
    """A body to try."""

    @property
    def types(self) -> list[Any]:
        return [kind for kind in (self.request, self.answer, self.events, self.errors) if kind is not None]


def operation(summary: str, **what: Any) -> Callable[[Handler], Handler]:
    """Marks the handler of a route with its Operation."""

    def mark(handler: Handler) -> Handler:
        handler.operation = Operation(summary, **what)  # type: ignore[attr-defined]
        return handler

    return mark


def openapi_document(routes: Iterable[Any], *, has_keys: bool) -> dict[str, Any]:
    """The document for those of the routes whose handlers are marked. `has_keys`: requests need one."""
    documented = [(route, what) for route in routes if (what := operation_of(route)) is not None]
    kinds = list(dict.fromkeys(kind for _, what in documented for kind in what.types))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    _describe(components, {what.request for _, what in documented if what.request is not None})
    by_kind = dict(zip(kinds, schemas, strict=True))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "potstill", "version": __version__, "summary": "OpenAI's protocol with vLLM's extra fields"},
        "paths": {_path(route): _methods(route, what, by_kind, has_keys) for route, what in documented},
        "components": {"schemas": components},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def operation_of(route: Any) -> Operation | None:
    """What a route does, as its handler is marked."""
    return getattr(route.endpoint, "operation", None) if isinstance(route, Route) else None


def _path(route: Route) -> str:
    return route.path.replace(":path}", "}")


def _methods(route: Route, what: Operation, schemas: dict[Any, Any], has_keys: bool) -> dict[str, Any]:
    needs_key = has_keys and route.path not in OPEN_PATHS
    described: dict[str, Any] = {
        "summary": what.summary,
        "responses": _responses(what, schemas, needs_key=needs_key, has_name=bool(route.param_convertors)),
    }
    if route.param_convertors:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in route.param_convertors
        ]
    if what.request is not None:
        content = {"schema": schemas[what.request], "example": what.example}
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    if needs_key:
        described["security"] = [{"key": []}]
    return {method.lower(): described for method in sorted((route.methods or set()) - {"HEAD"})}


def _responses(what: Operation, schemas: dict[Any, Any], *, needs_key: bool, has_name: bool) -> dict[str, Any]:
    answered: dict[str, Any] = {what.text: {"schema": {"type": "string"}}}
    if what.answer is not None:
        answered = {JSON: {"schema": schemas[what.answer]}}
    if what.events is not None:
        answered[what.stream] = {"schema": _event(what, schemas)}
    wrong = {"content": {JSON: {"schema": schemas[what.errors]}}}
    statuses = set(ERRORS) if what.request is not None else {404, 500, 503} if has_name else {500, 503}
    statuses = statuses | {401} if needs_key else statuses - {401}
    return {"200": {"description": "The answer.", "content": answered}} | {
        str(status): {"description": ERRORS[status]} | wrong for status in sorted(statuses)
    }


def _event(what: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    """An event of a stream, or a line of one; the error that may end it is one, too."""
    content = {"anyOf": [schemas[what.events], schemas[what.errors]]}
    if what.stream != EVENTS:
        return content
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
    return {"type": "object", "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}}, "required": ["data"]}


def _describe(components: dict[str, Any], requests: set[type[msgspec.Struct]]) -> None:
    """Add what docstrings say of fields; and that a request may hold any name with null, as if it were not there."""
    _, read = msgspec.json.schema_components(requests, ref_template=REFERENCE)
    for kind in _structs():
        name = kind.__name__ if kind.__name__ in components else f"{kind.__module__}.{kind.__name__}"
        fields = components.get(name, {}).get("properties", {})
        for name, text in _field_docs(kind).items() if fields else ():
            fields[name]["description"] = text
    for name in read:
        if components[name].get("additionalProperties") is False:
            components[name]["additionalProperties"] = {"type": "null"}


def _structs(kind: type = msgspec.Struct) -> Iterator[type]:
    """The types of the protocol."""
    children: list[type] = kind.__subclasses__()
    for child in children:
        if child.__module__.startswith("serve.http."):
            yield child
        yield from _structs(child)


def _field_docs(kind: type) -> dict[str, str]:
    """The docstring below each field that has one, of a type and of those that it extends."""
    found = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("serve.http."):
            continue
        [body] = ast.parse(inspect.getsource(base)).body
        for entry, text in pairwise(body.body):  # type: ignore[attr-defined]
            if isinstance(entry, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(entry.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found
