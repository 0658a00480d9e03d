"""Settings as the keys of a recipe; model/settings.py says how one is declared."""

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from model.settings import COUNTS, FRACTION, POSITIVE, redeclared, setting

__all__ = [
    "COUNTS",
    "FRACTION",
    "POSITIVE",
    "redeclared",
    "references",
    "setting",
    "spelling",
    "to_plain",
]


def spelling(declared: Field[Any]) -> str:
    """A field's key in a recipe."""
    return declared.metadata.get("key", declared.name)


def to_plain(config: Any) -> dict[str, Any]:
    """Settings as plain data in the recipe's spelling, defaults included."""
    return {spelling(declared): plain_value(getattr(config, declared.name)) for declared in fields(config)}


def plain_value(value: Any) -> Any:
    """A setting's value as YAML has it."""
    if isinstance(value, tuple):
        return [plain_value(item) for item in value]
    return to_plain(value) if is_dataclass(value) else value


def references(config: Any, to: str) -> Iterator[str]:
    """The names that settings refer to, of `model`s or of `data`, in the order of the fields; a name may come twice."""
    for declared in fields(config):
        value = getattr(config, declared.name)
        if is_dataclass(value):
            yield from references(value, to)
        elif declared.metadata.get("refers") == to and value is not None:
            yield value


def out_name(config: Any, of: str = "model") -> str | None:
    """The name under which later stages find what a stage makes, a `model` or `data`: its key `out`.

    None where it makes no such thing. A setting `out` says by `makes="data"` that it names no model.
    """
    declared = {one.name: one.metadata.get("makes", "model") for one in fields(config)}
    return config.out if declared.get("out") == of else None
