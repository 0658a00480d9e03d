"""What a request says its output must be, as a grammar: `response_format`, `structured_outputs`, `guided_…`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from serve.grammar import WHITESPACE, choice_grammar, json_grammar, json_object_grammar, regex_grammar
from serve.http.errors import invalid
from serve.http.requests import GenerationRequest, ResponseFormat, StructuredOutputs
from serve.sampling_params import MAX_GRAMMAR_BYTES


class Grammar(NamedTuple):
    """What an output must be, and the field of the request that says so, which errors name."""

    field: str
    text: str
    """For SamplingParams.grammar."""


class Wish(NamedTuple):
    """One way in which a request says what its output must be."""

    field: str
    kind: str
    value: Any
    whitespace: str | None = WHITESPACE
    """Of JSON."""


KINDS: dict[str, Callable[[Wish], str]] = {
    "json": lambda wish: json_grammar(wish.value, whitespace=wish.whitespace),
    "json_object": lambda wish: json_object_grammar(whitespace=wish.whitespace),
    "regex": lambda wish: regex_grammar(wish.value),
    "choice": lambda wish: choice_grammar(wish.value),
    "grammar": lambda wish: wish.value,
}


def gbnf_of(request: GenerationRequest) -> Grammar | None:
    """What the request says in llama.cpp's GBNF, if it does: to become Lark before `grammar_of`. ApiError likewise."""
    wish = _wish(request)
    return Grammar(wish.field, wish.value) if wish and wish.kind == "grammar" and "::=" in wish.value else None


def grammar_of(request: GenerationRequest, *, lark: str | None = None) -> Grammar | None:
    """The grammar that the output of a request must follow, if it says so; `lark`: what its GBNF has become.

    ApiError 400 naming the field at fault.
    """
    wish = _wish(request)
    if wish is None:
        return None
    try:
        return Grammar(wish.field, KINDS[wish.kind](wish) if lark is None else lark)
    except ValueError as error:
        raise invalid(f"{wish.field}: {error}", wish.field) from None


def _wish(request: GenerationRequest) -> Wish | None:
    wishes = [*_of_format(request.response_format), *_of_outputs(request.structured_outputs), *_guided(request)]
    if len(wishes) > 1:
        raise invalid(f"{wishes[0].field} and {wishes[1].field} both say what the output must be", wishes[1].field)
    for wish in wishes:
        _check_size(wish)
    return wishes[0] if wishes else None


def _check_size(wish: Wish) -> None:
    """Before anything is made of it: what is longer is too long as a grammar, too."""
    texts = [wish.value] if isinstance(wish.value, str) else wish.value if wish.kind == "choice" else []
    if sum(len(text) + len('""|') for text in texts) > MAX_GRAMMAR_BYTES:
        raise invalid(f"{wish.field}: a grammar may have at most {MAX_GRAMMAR_BYTES} bytes", wish.field)


def _of_format(wanted: ResponseFormat | None) -> list[Wish]:
    if wanted is None:
        return []
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise invalid('response_format.json_schema goes with type "json_schema", and with no other', "response_format")
    if wanted.json_schema is not None:
        return [Wish("response_format.json_schema.schema", "json", wanted.json_schema.schema)]
    return [Wish("response_format", "json_object", True)] if wanted.type == "json_object" else []


def _of_outputs(wanted: StructuredOutputs | None) -> list[Wish]:
    if wanted is None:
        return []
    name = "structured_outputs"
    if wanted.whitespace_pattern is not None and wanted.disable_any_whitespace:
        raise invalid(f"{name} has a whitespace_pattern, but no whitespace is allowed", f"{name}.whitespace_pattern")
    whitespace = None if wanted.disable_any_whitespace else wanted.whitespace_pattern or WHITESPACE
    values = [(kind, getattr(wanted, kind)) for kind in KINDS]
    found = [Wish(f"{name}.{kind}", kind, value, whitespace) for kind, value in values if value is not None]
    if not found:
        raise invalid(f"{name} must have one of {', '.join(KINDS)}", name)
    return found


def _guided(request: GenerationRequest) -> list[Wish]:
    whitespace = request.guided_whitespace_pattern or WHITESPACE
    values = [(kind, getattr(request, f"guided_{kind}")) for kind in KINDS if kind != "json_object"]
    found = [Wish(f"guided_{kind}", kind, value, whitespace) for kind, value in values if value is not None]
    if request.guided_whitespace_pattern is not None and request.guided_json is None:
        raise invalid("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
    return found
