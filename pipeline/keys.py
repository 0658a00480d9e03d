"""What a stage's result and its training depend on, as digests: whether it may be skipped, or go on where it stopped.

Fields of the settings say in their metadata what they do to training. `weights` is False where they change no weight
that is trained, or a function where only part of the value does; `figures` where they change what was measured before
training, and is kept; `grows` where training goes on when the value is larger; `later` where the setting came after its
stage, so that runs from before it stay valid at its default. One with `result=False` decides nothing and is in no key.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pipeline.results import FORMAT_VERSION
from pipeline.settings import spelling, to_plain


@dataclass(frozen=True)
class StageKeys:
    """Digests of what goes into a stage, hexadecimal."""

    result: str
    """Of all that decides the result: a finished stage with this key is skipped."""
    full: str
    """The same without the gate."""
    work: str
    """Of what decides the weights: training that was interrupted goes on if this is the same."""
    figures: str
    """Of what decides the figures that are kept from before training."""
    grows: dict[str, int]
    """Settings that may be larger than when training began."""

    def record(self) -> dict[str, Any]:
        """What an unfinished stage keeps, for `may_continue`."""
        return {"key": self.work, "full": self.full, "figures": self.figures, "grows": self.grows}

    def may_continue(self, recorded: Mapping[str, Any]) -> bool:
        """Whether training goes on from the state of one that recorded this. Runs of old record `full` as their key."""
        if recorded.get("key") == self.full:
            return True
        before = recorded.get("grows", {})
        return recorded.get("key") == self.work and all(before.get(k, 0) <= value for k, value in self.grows.items())

    def keeps_figures(self, recorded: Mapping[str, Any]) -> bool:
        """Whether what was measured before training still holds."""
        return recorded.get("figures") == self.figures or recorded.get("key") == self.full


def stage_keys(kind: str, config: Any, *, models: Mapping[str, str], data: str | None, source: Any) -> StageKeys:
    """`models` are digests by the recipe's names, `data` that of the tokens, `source` a stamp of imported files."""
    settings = _settings(config)
    gate = settings.pop("gate", None)
    work = dict(settings)
    figures: dict[str, Any] = {}
    grows: dict[str, int] = {}
    for declared in fields(config):
        name = spelling(declared)
        if name not in settings:
            continue
        weights = declared.metadata.get("weights", True)
        if declared.metadata.get("grows"):
            grows[name] = work.pop(name)
        elif weights is False:
            changed = work.pop(name)
            figures |= {name: changed} if declared.metadata.get("figures") else {}
        elif weights is not True:
            work[name] = weights(settings[name])
    inputs = {"format": FORMAT_VERSION, "kind": kind, "models": dict(models), "data": data, "source": source}
    full = digest({**inputs, "settings": settings})
    return StageKeys(
        result=digest({"work": full, "gate": gate}),
        full=full,
        work=digest({**inputs, "settings": work}),
        figures=digest(figures),
        grows=grows,
    )


def _settings(config: Any) -> dict[str, Any]:
    """Settings as plain data, without those that came after their stage and are at their default."""
    plain = to_plain(config)
    for declared in fields(config):
        value, name = getattr(config, declared.name), spelling(declared)
        if not declared.metadata.get("result", True) or (declared.metadata.get("later") and value == declared.default):
            del plain[name]
        elif is_dataclass(value):
            plain[name] = _settings(value)
    return plain


def digest(value: Any) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
