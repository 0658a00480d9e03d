"""How a key of a recipe is declared: a field of a frozen dataclass, with what OmegaConf's types cannot say.

A field's metadata: `key` is its spelling in YAML where Python reserves the word, `count` allows 100k and 2M, `choices`
and `range` bound it, `refers` names what it must be the name of, `pattern` is what text must look like and `meaning`
says so in words, a list with `single` may be one number. `weights`, `figures` and `grows` say what a change does to
training that was interrupted; pipeline/keys.py reads them.
"""

from collections.abc import Iterator
from dataclasses import Field, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING

POSITIVE = (1e-12, 1e12)
COUNTS = (1, 10**12)
FRACTION = (0.0, 1.0)


def setting(default: Any = MISSING, **metadata: Any) -> Any:
    """A field of a recipe; without a default it must be given."""
    return field(default=default, metadata=metadata)


def spelling(declared: Field[Any]) -> str:
    """A field's key in a recipe."""
    return declared.metadata.get("key", declared.name)


def to_plain(config: Any) -> dict[str, Any]:
    """Settings as plain data in the recipe's spelling, defaults included."""
    plain = {}
    for declared in fields(config):
        value = getattr(config, declared.name)
        nested = to_plain(value) if is_dataclass(value) else value
        plain[spelling(declared)] = list(nested) if isinstance(nested, tuple) else nested
    return plain


def references(config: Any, to: str) -> Iterator[str]:
    """The names that settings refer to, of `model`s or of `data`, in the order of the fields; a name may come twice."""
    for declared in fields(config):
        value = getattr(config, declared.name)
        if is_dataclass(value):
            yield from references(value, to)
        elif declared.metadata.get("refers") == to and value is not None:
            yield value


def out_name(config: Any) -> str | None:
    """The name under which later stages find the model of a stage: its key `out`; without one it publishes none."""
    return getattr(config, "out", None)
