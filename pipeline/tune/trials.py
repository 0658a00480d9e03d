"""Trials: what a recipe's stages could do instead, as combinations, and the stages that one of them takes.

A trial names one choice for each stage that can be tuned, or None where the stage is left out. All trials are stages of
one recipe, which grows; two trials that begin alike share the stages that they have in common.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.keys import digest
from pipeline.schema import Recipe, Serve
from pipeline.settings import out_name, to_plain
from pipeline.stages.base import kind_of

if TYPE_CHECKING:
    from model.config import ModelConfig

BRIEF = 8
"""A brief trial trains on so many times fewer tokens."""
SHORTEST_STEPS = 4
"""And takes at least so many steps, as far as the recipe has them."""

Names = dict[str, str]
"""What the grown recipe calls a model or a data set, by the names of the user's recipe."""


@dataclass(frozen=True)
class Trial:
    """One combination."""

    choices: tuple[str | None, ...]
    """For each stage that can be tuned, in their order."""
    brief: bool = False

    @property
    def name(self) -> str:
        """As people read it."""
        return " + ".join(choice for choice in self.choices if choice) + (", brief" if self.brief else "")

    def only(self, place: int) -> "Trial":
        """In full, with nothing but what one stage does."""
        return Trial(tuple(choice if at == place else None for at, choice in enumerate(self.choices)))


@dataclass(frozen=True)
class Space:
    """Everything that can be tried with a recipe."""

    recipe: Recipe
    measured: int
    """Place of the stage that measures a model against the teacher; what comes after it is no part of a trial."""
    choices: tuple[dict[str | None, Any], ...]
    """Of each stage that can be tuned, settings by name."""
    places: tuple[int, ...]
    """Of these stages in the recipe."""
    imported: "Mapping[str, ModelConfig]"

    @classmethod
    def of(cls, recipe: Recipe, cache: Path) -> "Space":
        """Raises UserError for a recipe that measures nothing against a teacher, or has nothing to tune."""
        measured = _measuring_stage(recipe)
        shapes: dict[str, ModelConfig] = {}
        imported: dict[str, ModelConfig] = {}
        places: list[int] = []
        choices: list[dict[str | None, Any]] = []
        for stage in recipe.plan():
            kind, place = kind_of(stage.kind), stage.index - len(recipe.models)
            shape = kind.shape(stage.config, shapes, cache)
            if kind.tunable and 0 <= place < measured:
                places.append(place)
                found = kind.tunable.choices(stage.config, shapes[kind.tunable.origin(stage.config)])
                choices.append(dict(found.items()))
            if stage.out is not None and shape is not None:
                shapes[stage.out] = shape
                imported |= {stage.out: shape} if place < 0 else {}
        if not places:
            raise UserError(f"No stage of the recipe {recipe.name} has anything to try, such as fewer layers or bits.")
        return cls(recipe, measured, tuple(choices), tuple(places), imported)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """At which speed is measured."""
        return self.recipe.stages[self.measured][1].speed.batch_sizes

    def combinations(self) -> list[Trial]:
        """Every one but that of leaving all stages out, which is the teacher."""
        return [Trial(one) for one in product(*((None, *names) for names in self.choices)) if any(one)]

    def stages(self, trial: Trial) -> list[tuple[str, Any]]:
        """The stages of one trial by themselves, under the recipe's own names, without gates: targets stand for them.

        Names of what is left out become those of what it would have been made from.
        """
        models: Names = {}
        found = []
        for place, (kind, config) in enumerate(self.recipe.stages[: self.measured + 1]):
            config = _renamed(config, {"model": models})
            if place in self.places:
                at = self.places.index(place)
                choice, out = trial.choices[at], out_name(config)
                tunable = kind_of(kind).tunable
                if choice is None and tunable is not None:
                    models[str(out)] = tunable.origin(config)
                    continue
                config = _renamed(self.choices[at][choice], {"model": models})
                config = _shortened(config) if trial.brief else config
            found.append((kind, _without_gate(config)))
        return found

    def weight_bytes(self, trial: Trial, cache: Path) -> int:
        """Of the model that it measures. Raises UserError for a shape that cannot be made."""
        shapes = dict(self.imported)
        *before, (kind_name, config), _ = self.stages(trial)
        for name, earlier in before:
            shape = kind_of(name).shape(earlier, shapes, cache)
            if shape is not None and (out := out_name(earlier)) is not None:
                shapes[out] = shape
        return kind_of(kind_name).weight_bytes(config, shapes, cache)

    def recipe_of(self, trial: Trial, *, name: str, verified: bool) -> Recipe:
        """What `potstill run` makes the trial's model with, and `potstill serve` serves."""
        stages = tuple(self.stages(trial))
        model, teacher = kind_of(stages[-1][0]).models(stages[-1][1])
        price = self.recipe.serve.price_per_hour if self.recipe.serve else None
        serve = Serve(model=model, verify=teacher if verified else None, price_per_hour=price)
        return replace(self.recipe, name=name[:64], stages=stages, serve=serve)


def _measuring_stage(recipe: Recipe) -> int:
    """The last stage that makes nothing and measures a model beside a reference on data."""
    for place in reversed(range(len(recipe.stages))):
        kind, config = kind_of(recipe.stages[place][0]), recipe.stages[place][1]
        makes = out_name(config) or out_name(config, "data")
        if not makes and kind.data(config) is not None and len(kind.models(config)) == 2:
            return place
    raise UserError(
        f"The recipe {recipe.name} measures no model against its teacher; "
        "add `evaluate: {model: …, against: TEACHER, data: …}` behind its other stages."
    )


def _renamed(config: Any, names: Mapping[str, Names]) -> Any:
    """The same settings with other names of models and data; names that are not in the map stay."""
    changed = {}
    for declared in fields(config):
        value = getattr(config, declared.name)
        if is_dataclass(value):
            changed[declared.name] = _renamed(value, names)
        elif (known := names.get(declared.metadata.get("refers", ""))) and value in known:
            changed[declared.name] = known[value]
    return replace(config, **changed)


def _without_gate(config: Any) -> Any:
    return replace(config, gate=type(config.gate)()) if hasattr(config, "gate") else config


def _shortened(config: Any) -> Any:
    """Fewer tokens, as far as it trains."""
    tokens = getattr(config, "tokens", 0)
    least = min(tokens, SHORTEST_STEPS * getattr(config, "batch_tokens", 0))
    return replace(config, tokens=max(tokens // BRIEF, least)) if tokens else config


class Growing:
    """A recipe that trials are added to, and what each of them is called there."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.recipe = replace(space.recipe, name=f"{space.recipe.name[:59]}-tune", stages=(), serve=None)
        if price := space.recipe.serve and space.recipe.serve.price_per_hour:
            self.recipe = replace(self.recipe, serve=Serve(model=next(iter(self.recipe.models)), price_per_hour=price))
        self._known: dict[str, str | None] = {}
        """By digests of settings, what they make."""

    def add(self, trial: Trial) -> tuple["Growing", int]:
        """A longer one that holds the trial, and the place of the stage there that measures it."""
        longer = Growing(self.space)
        longer.recipe, longer._known = self.recipe, dict(self._known)
        names: dict[str, Names] = {"model": {}, "data": {}}
        place = -1
        for kind, config in self.space.stages(trial):
            config = _renamed(config, names)
            place = longer._place(kind, config, names, re.sub(r"[^A-Za-z0-9.]+", "-", trial.name)[:56])
        return longer, place

    def _place(self, kind: str, config: Any, names: Mapping[str, Names], label: str) -> int:
        """Where a stage with these settings stands, added if there was none; `names` learn what it makes."""
        out = getattr(config, "out", None)
        unnamed = to_plain(config) | ({"out": None} if out else {})
        key = digest([kind, unnamed])
        if key not in self._known:
            made = None
            if out:
                taken = {*self.recipe.models, *self.recipe.data, *self._known.values()}
                made = next(one for one in _numbered(label) if one not in taken)
                config = replace(config, out=made)
            self._known[key] = made
            self.recipe = replace(self.recipe, stages=(*self.recipe.stages, (kind, config)))
        if out:
            names["model" if out_name(config) else "data"][out] = str(self._known[key])
        return list(self._known).index(key)


def _numbered(label: str) -> list[str]:
    return [label, *(f"{label}.{number}" for number in range(2, 100))]
