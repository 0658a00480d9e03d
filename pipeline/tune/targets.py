"""What is asked of a served model, as `64MB`, `12ms` and `0.1`; how far a model is from it."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pipeline.errors import UserError

BYTES = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Targets:
    """Bounds on what is served; None bounds nothing."""

    memory: float | None = None
    """Bytes of weights."""
    tpot: float | None = None
    """Seconds a token of one request."""
    max_kl: float | None = None
    """KL(teacher ‖ model), nats a token."""

    @classmethod
    def parse(cls, *, memory: str | None, tpot: str | None, max_kl: str | None) -> "Targets":
        """From the command line. Raises UserError for what cannot be read, and where nothing is asked."""
        if memory is tpot is max_kl is None:
            raise UserError("Say what the result has to meet: --memory 64MB, --tpot 12ms, --max-kl 0.1, or several.")
        return cls(
            None if memory is None else _quantity("--memory", memory, BYTES, "64MB or 1.5GiB"),
            None if tpot is None else seconds_of("--tpot", tpot),
            None if max_kl is None else _quantity("--max-kl", max_kl, {"": 1.0}, "0.1"),
        )

    def excess(self, one: "Measured") -> dict[str, float]:
        """How far above each bound it is, as a fraction; below it, negative."""
        found = {"memory": one.memory, "tpot": one.tpot, "max_kl": one.kl}
        bounds = {name: bound for name, bound in asdict(self).items() if bound is not None}
        return {name: found[name] / bound - 1 for name, bound in bounds.items()}

    def rank(self, one: "Measured") -> tuple[float, float]:
        """The smaller the better: what is missed most, then what is wanted most.

        That is little memory and time together where the quality is bounded, else quality.
        """
        missed = max([0.0, *self.excess(one).values()])
        return missed, one.kl if self.max_kl is None else one.memory * (one.tpot if math.isfinite(one.tpot) else 1.0)


@dataclass(frozen=True)
class Measured:
    """What is known of a model, or predicted."""

    name: str
    memory: float
    tpot: float
    """Infinite where nobody measured it."""
    kl: float
    verified: bool = False
    """Whether it is the teacher that is served, with the trial's model as its draft."""


def seconds_of(option: str, text: str) -> float:
    """Of a time like `12ms` or `45m`. Raises UserError."""
    return _quantity(option, text, SECONDS, "12ms, 90s, 45m or 2h")


def _quantity(option: str, text: str, units: Mapping[str, float], example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) ?([A-Za-z]*)", text.strip())
    value = float(match[1]) * units.get(match[2], math.nan) if match else math.nan
    if not value > 0 or math.isinf(value):
        raise UserError(f"{option} is {text!r}; write it like {example}.")
    return value
