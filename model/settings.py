"""How a setting is declared: a field of a frozen dataclass, with what its type cannot say in the field's metadata.

`choices` and `range` bound it (a Literal bounds itself), a list that is `required` must hold something, `pattern` is
what text must look like and `meaning` says so in words. What only recipes read: `key` is its spelling in YAML where
Python reserves the word, `count` allows 100k and 2M, `refers` names what it must be the name of, `makes` what it
gives a name to, a list with `single`
may be one number. What pipeline/keys.py reads: `weights`, `figures` and `grows` say what a change does to training that
was interrupted, `result` whether it does anything.
"""

from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

POSITIVE = (1e-12, 1e12)
COUNTS = (1, 10**12)
FRACTION = (0.0, 1.0)


def setting(default: Any = MISSING, **metadata: Any) -> Any:
    """A field; without a default it must be given, by its name."""
    return field(default=default, kw_only=default is MISSING, metadata=metadata)


def redeclared(base: type, name: str, default: Any, **metadata: Any) -> Any:
    """A field of a base class with another default, and what is said of it besides."""
    (declared,) = (declared for declared in fields(base) if declared.name == name)
    return field(default=default, metadata={**declared.metadata, **metadata})


def choices_of(declared: Field[Any], kind: Any) -> tuple[Any, ...]:
    """What a setting of this type can be; nothing where there is no such list."""
    return get_args(kind) if get_origin(kind) is Literal else declared.metadata.get("choices", ())


def fault(declared: Field[Any], kind: Any, value: Any) -> str:
    """What is wrong with a value of the right type, to follow the setting's name; empty for nothing."""
    metadata, choices = declared.metadata, choices_of(declared, kind)
    if isinstance(value, tuple | list) and not value and metadata.get("required"):
        return "is empty; it must hold at least one"
    for one in value if isinstance(value, tuple | list) else (value,):
        if one is None:
            continue
        if choices and one not in choices:
            return f"is {one!r}; it can be {', '.join(choices)}"
        if "range" in metadata and not metadata["range"][0] <= one <= metadata["range"][1]:
            return f"is {one:,}; it must lie between {metadata['range'][0]:,g} and {metadata['range'][1]:,g}"
        if "pattern" in metadata and not metadata["pattern"].fullmatch(one):
            return f"is {one!r}; it must be {metadata['meaning']}"
    return ""


def check(config: Any, error: type[ValueError] = ValueError) -> None:
    """Raises `error` for the first setting whose value its declaration forbids; nested ones check themselves."""
    kinds = get_type_hints(type(config))
    for declared in fields(config):
        value = getattr(config, declared.name)
        if not is_dataclass(value) and (found := fault(declared, kinds[declared.name], value)):
            raise error(f"{declared.name} {found}")
