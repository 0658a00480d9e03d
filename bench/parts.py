"""Parts of a benchmark by the names that a command line gives. No torch here: who asks may not hold a GPU."""

from collections.abc import Callable, Iterable


class UnknownPart(ValueError):
    """There is no such part; the message says which there are."""


def parts_of_family(wanted: str, parts: Iterable[str], joint: str) -> list[str]:
    """The part of this name, else all whose names begin with it and the joint."""
    known = list(parts)
    return [wanted] if wanted in known else [name for name in known if name.startswith(wanted + joint)]


def asked_for(option: str | None, parts: Iterable[str], parts_named: Callable[[str], list[str]]) -> list[str]:
    """The parts that `--parts A,B` means, each once; None: all. UnknownPart where a name means none."""
    known = list(parts)
    names: list[str] = []
    for wanted in known if option is None else option.split(","):
        if not (found := parts_named(wanted)):
            raise UnknownPart(f"There is no part {wanted!r}; there are {', '.join(known)}.")
        names += found
    return list(dict.fromkeys(names))
