"""Random JSON schemas whose answers are short, and random answers to them, in the order and spelling of a grammar."""

import json
import random
from collections.abc import Callable
from typing import Any

NAMES = ("id", "name", "kind", "tags", "né", 'a "q"', "when", "x y")
PATTERNS = {"^[a-c]{1,4}$": "abca", "^x-[0-9]{2}$": "x-42", "b[ab]?$": "ab"}
FORMATS = {"date": "2026-11-24", "uuid": "123e4567-e89b-12d3-a456-426614174000", "ipv4": "10.0.0.7"}
REAL = [
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "minLength": 1, "maxLength": 8},
            "status": {"enum": ["open", "closed", None]},
            "labels": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
            "due": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
            "assignee": {"$ref": "#/$defs/person"},
        },
        "required": ["title", "status", "labels", "due", "assignee"],
        "additionalProperties": False,
        "$defs": {
            "person": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]},
                {"type": "object", "properties": {"error": {"enum": ["a", "b"]}}, "required": ["error"]},
            ]
        },
        "minItems": 1,
        "maxItems": 2,
    },
    {
        "$ref": "#/definitions/tree",
        "definitions": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "children": {"type": "array", "items": {"$ref": "#/definitions/tree"}, "maxItems": 1},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 20}, "b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "additionalProperties": True,
    },
    {"type": "object", "properties": {"n": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}}, "required": ["n"]},
    {"type": "array", "prefixItems": [{"const": "v"}, {"type": "integer", "multipleOf": 5}], "items": False},
]  # fmt: skip
"""As people write them: references, alternatives, formats, recursion, tuples."""

Pair = tuple[dict[str, Any], Callable[[], Any]]
"""A schema, and what makes an answer to it."""


def random_schema(random_: random.Random, depth: int = 3) -> Pair:
    """A schema of bounded answers, and answers."""
    kinds = [_string, _pattern, _format, _integer, _number, _enum, _constant, _boolean]
    if depth:
        kinds += [_object, _object, _object, _array, _array, _any_of, _nullable]
    return random_.choice(kinds)(random_, depth)


def written(random_: random.Random, value: Any) -> str:
    """JSON of a value, as tight or as loose as people write it."""
    ascii_only = random_.random() < 0.5 and not _has_strange_names(value)
    how = random_.choice([{"separators": (",", ":")}, {}, {"indent": 2}])
    return json.dumps(value, ensure_ascii=ascii_only, **how)


def _has_strange_names(value: Any) -> bool:
    """Names and constants are spelled as they are; only free text may be escaped."""
    return not json.dumps(value, ensure_ascii=False).isascii()


def _string(random_: random.Random, depth: int) -> Pair:
    low, high = random_.randint(0, 2), random_.randint(2, 6)
    text = lambda: "".join(random_.choice('ab é\n"\\{') for _ in range(random_.randint(low, high)))  # noqa: E731
    return {"type": "string", "minLength": low, "maxLength": high}, text


def _pattern(random_: random.Random, depth: int) -> Pair:
    pattern, example = random_.choice(list(PATTERNS.items()))
    bound = {} if pattern.startswith("^") else {"maxLength": 6}
    return {"type": "string", "pattern": pattern, **bound}, lambda: example


def _format(random_: random.Random, depth: int) -> Pair:
    name, example = random_.choice(list(FORMATS.items()))
    return {"type": "string", "format": name}, lambda: example


def _integer(random_: random.Random, depth: int) -> Pair:
    low = random_.randint(-1000, 1000)
    high = low + random_.randint(0, 2000)
    return {"type": "integer", "minimum": low, "maximum": high}, lambda: random_.randint(low, high)


def _number(random_: random.Random, depth: int) -> Pair:
    step = random_.choice([0.5, 2])  # llguidance spells multiples of a quarter with two decimals
    schema = {"type": "number", "minimum": -8, "maximum": 8, "multipleOf": step}
    return schema, lambda: step * random_.randint(int(-8 / step), int(8 / step))


def _enum(random_: random.Random, depth: int) -> Pair:
    values = random_.sample(["red", "é", 1, 2.5, None, True, [1, "a"], {"k": 0}, "", "a\nb"], random_.randint(1, 4))
    return {"enum": values}, lambda: random_.choice(values)


def _constant(random_: random.Random, depth: int) -> Pair:
    value = random_.choice(["fixed", 7, False, {"a": [None]}])
    return {"const": value}, lambda: value


def _boolean(random_: random.Random, depth: int) -> Pair:
    return {"type": "boolean"}, lambda: random_.random() < 0.5


def _object(random_: random.Random, depth: int) -> Pair:
    parts = {name: random_schema(random_, depth - 1) for name in random_.sample(NAMES, random_.randint(0, 4))}
    required = [name for name in parts if random_.random() < 0.7]
    schema = {
        "type": "object",
        "properties": {name: own for name, (own, _) in parts.items()},
        "required": required,
        "additionalProperties": False,
    }

    def answer() -> dict[str, Any]:
        said = {name for name in parts if name in required or random_.random() < 0.5}
        return {name: make() for name, (_, make) in parts.items() if name in said}

    return schema, answer


def _array(random_: random.Random, depth: int) -> Pair:
    own, make = random_schema(random_, depth - 1)
    low = random_.randint(0, 2)
    high = low + random_.randint(0, 2)
    schema = {"type": "array", "items": own, "minItems": low, "maxItems": high}
    return schema, lambda: [make() for _ in range(random_.randint(low, high))]


def _any_of(random_: random.Random, depth: int) -> Pair:
    parts = [random_schema(random_, depth - 1) for _ in range(random_.randint(1, 3))]
    return {"anyOf": [own for own, _ in parts]}, lambda: random_.choice(parts)[1]()


def _nullable(random_: random.Random, depth: int) -> Pair:
    own, make = random_schema(random_, depth - 1)
    return {"anyOf": [own, {"type": "null"}]}, lambda: None if random_.random() < 0.3 else make()
