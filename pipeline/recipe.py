"""Reads recipes: YAML plus `key=value` overrides in, a checked Recipe out, or one sentence that says where it is wrong.

A recipe is data. YAML tags, interpolations (`${...}`) and keys that the schema does not know are refused, so a recipe
from a stranger can name what to compute and nothing else. The path of a value, as in `stages.0.distill.tokens`, is
the same in error messages and in overrides.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from model.settings import choices_of, fault
from pipeline.errors import UserError
from pipeline.schema import DataSource, ModelSource, Recipe, Serve, Tracking
from pipeline.settings import out_name, spelling, to_plain
from pipeline.stages.base import kind_of, recipe_kinds

T = TypeVar("T")
Names = Mapping[str, Sequence[str]]
"""Of models and of data."""

MAX_BYTES = 256 * 1024
MAX_DEPTH = 12
MAX_NODES = 10_000
"""YAML aliases can write a billion nodes in a few lines; no honest recipe comes near this many."""

SECTIONS = ("name", "models", "data", "stages", "serve", "tracking")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([kKMGBT]?)")
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
OTHER_NAMES = {
    "lr": ("learning_rate",),
    "epochs": ("tokens",), "num_epochs": ("tokens",), "num_train_epochs": ("tokens",), "max_steps": ("tokens",),
    "steps": ("tokens",), "batch_size": ("batch_tokens",), "per_device_train_batch_size": ("micro_batch_tokens",),
    "gradient_accumulation_steps": ("batch_tokens",), "max_length": ("sequence_length", "max_tokens"),
    "max_seq_length": ("sequence_length",), "max_seq_len": ("sequence_length",), "seq_length": ("sequence_length",),
    "warmup_ratio": ("warmup_fraction",), "lr_scheduler_type": ("schedule",), "bf16": ("precision",),
    "dataset": ("source", "data"), "path": ("source", "from"), "file": ("source", "from"), "datasets": ("mix",),
    "sources": ("mix",), "name_or_path": ("from",), "model_name_or_path": ("from", "model"), "base_model": ("model",),
}  # fmt: skip
"""What other tools call some keys, by what they are here."""
SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


class RecipeError(UserError):
    """A recipe that cannot run; the sentence names the key."""


class _Loader(yaml.SafeLoader):
    """YAML's plain data only, and a key written twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in first:
                twice = f"the key {key.value!r} stands in this map already, in line {first[key.value]}"
                raise yaml.MarkedYAMLError(problem=twice, problem_mark=key.start_mark)
            first[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


# --- reading ----------------------------------------------------------------------------------------------------------


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """Reads `path`, applies the overrides, checks everything. Raises RecipeError with one sentence."""
    if not path.is_file():
        raise RecipeError(f"There is no recipe at {path}.")
    if path.stat().st_size > MAX_BYTES:
        raise RecipeError(f"{path} has more than {MAX_BYTES:,} bytes; that is no recipe.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not UTF-8 text.") from None
    return parse_recipe(text, overrides, where=str(path))


def parse_recipe(text: str, overrides: Iterable[str] = (), *, where: str = "the recipe") -> Recipe:
    """The same from a string."""
    raw = _parse_yaml(text, where)
    if not isinstance(raw, dict):
        raise RecipeError(f"{where} must be a map with the keys {', '.join(SECTIONS)}.")
    _check_plain(raw)
    for override in overrides:
        _apply_override(raw, override)
    _check_plain(raw)
    return _build_recipe(raw)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or error.context or "it cannot be read"
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RecipeError(f"{where} is not plain YAML: {place}{' '.join(problem.split())[:200]}.") from None
    except yaml.reader.ReaderError as error:
        place = f"line {text.count(chr(10), 0, error.position) + 1}"
        raise RecipeError(f"{where} is not plain YAML: {place}: no text holds U+{error.character:04X}.") from None
    except RecursionError:
        raise RecipeError(f"{where} is not plain YAML: it is nested too deeply.") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise RecipeError(f"{where} is not plain YAML: {' '.join(str(error).split())[:200]}.") from None


def _check_plain(raw: Any) -> None:
    """Maps with string keys, lists, and scalars; of bounded size and depth; without interpolations."""
    pending, seen = [(raw, "", 0)], 0
    while pending:
        node, path, depth = pending.pop()
        seen += 1
        if seen > MAX_NODES or depth > MAX_DEPTH:
            raise RecipeError(f"The recipe is too large or too deep at {path[:80] or 'its top'}.")
        if isinstance(node, dict):
            for key, value in node.items():
                if not isinstance(key, str):
                    raise RecipeError(f"{path or 'The recipe'} has the key {key!r}; keys are words.")
                pending.append((value, _join(path, key), depth + 1))
        elif isinstance(node, list):
            pending.extend((value, _join(path, index), depth + 1) for index, value in enumerate(node))
        elif isinstance(node, str) and "${" in node:
            raise RecipeError(f"{path} holds an interpolation ({node[:60]!r}); recipes are plain data.")
        elif not isinstance(node, str | int | float | bool | None):
            raise RecipeError(f"{path} holds a {type(node).__name__}; write it as text in quotes.")


# --- overrides --------------------------------------------------------------------------------------------------------


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Sets one value by its path: `data.text.held_out=0.1`, `stages.0.distill.tokens=10k`, `distill.tokens=10k`."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise RecipeError(f"The override {override!r} is not of the form key=value.")
    value = _parse_yaml(text, f"the value of {path}")
    node: Any = raw
    *parents, last = _override_path(raw, path)
    for place, key in enumerate(parents):
        here = ".".join(parents[:place])
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[_place(node, key, here)]
    node[_place(node, last, ".".join(parents))] = value


def _override_path(raw: dict[str, Any], path: str) -> list[str]:
    """Splits a path; a stage's own name in front (`distill` or `01-distill`) becomes `stages.0.distill`."""
    first, *rest = path.split(".")
    if first in SECTIONS:
        return [first, *rest]
    number_of_models = len(raw["models"]) if isinstance(raw.get("models"), dict) else 0
    places: dict[str, list[list[str]]] = {}
    for index, stage in enumerate(raw["stages"] if isinstance(raw.get("stages"), list) else []):
        for kind in stage if isinstance(stage, dict) else ():
            for name in (kind, f"{index + number_of_models:02d}-{kind}"):
                places.setdefault(name, []).append(["stages", str(index), kind])
    if len(places.get(first, ())) > 1:
        choices = " or ".join(".".join([*place, *rest]) for place in places[first])
        raise RecipeError(f"The recipe has several stages {first!r}; write {choices}.")
    if first not in places:
        raise RecipeError(
            f"The override {path} begins with no key of a recipe{_nearest_or_all(first, [*SECTIONS, *places])}"
        )
    return [*places[first][0], *rest]


def _place(node: Any, key: str, here: str) -> Any:
    """`key` as what indexes `node`: itself in a map, a number in a list."""
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise RecipeError(f"{here} is no map, so it has no {key!r} to override.")
    if not key.isdecimal() or int(key) >= len(node):
        raise RecipeError(f"{here} is a list of {len(node)}; {key!r} is none of its places (0 to {len(node) - 1}).")
    return int(key)


# --- checking ---------------------------------------------------------------------------------------------------------


def _build_recipe(raw: dict[str, Any]) -> Recipe:
    _check_keys(raw, SECTIONS, "")
    name = raw.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RecipeError(f"name must be letters, digits, '.', '_' or '-', at most 64 of them, not {name!r}.")
    recipe = Recipe(
        name=name,
        models=_build_map(ModelSource, raw.get("models"), "models"),
        data=_build_map(DataSource, raw.get("data") or {}, "data"),
        stages=tuple(_build_stage(stage, f"stages.{index}") for index, stage in enumerate(_stage_list(raw))),
        serve=_build(Serve, raw["serve"], "serve") if raw.get("serve") is not None else None,
        tracking=_build(Tracking, raw.get("tracking") or {}, "tracking"),
    )
    _check_references(recipe)
    _check_stages(recipe)
    return recipe


def _stage_list(raw: dict[str, Any]) -> list[Any]:
    stages = raw.get("stages") or []
    if not isinstance(stages, list):
        raise RecipeError("stages must be a list, each entry one stage like `- distill: {...}`.")
    return stages


def _build_map(schema: type[T], raw: Any, path: str) -> dict[str, T]:
    if not isinstance(raw, dict) or (path == "models" and not raw):
        raise RecipeError(f"{path} must map names to settings, as in `{path}: {{name: {{...}}}}`.")
    for name in raw:
        if not NAME.fullmatch(name):
            raise RecipeError(f"{path} has the name {name!r}; names are letters, digits, '.', '_' and '-'.")
    return {name: _build(schema, settings, f"{path}.{name}") for name, settings in raw.items()}


def _build_stage(raw: Any, path: str) -> tuple[str, Any]:
    if not isinstance(raw, dict) or len(raw) != 1:
        raise RecipeError(f"{path} must be a map with one key, the stage's kind, like `distill: {{...}}`.")
    kind, settings = next(iter(raw.items()))
    if kind not in recipe_kinds():
        raise RecipeError(f"{path} has the unknown stage {kind!r}{_nearest_or_all(kind, recipe_kinds())}")
    return kind, _build(kind_of(kind).config, settings, f"{path}.{kind}")


def _build(schema: type[T], raw: Any, path: str) -> T:
    """One dataclass of the schema from plain data; OmegaConf checks and converts the types."""
    plain = _prepare(schema, raw, path)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), plain)
        _check_values(schema, OmegaConf.to_container(merged, throw_on_missing=True), path)
        return cast(T, OmegaConf.to_object(merged))
    except MissingMandatoryValue as error:
        raise RecipeError(f"{_in_yaml(path, error.full_key)} is missing.") from None
    except OmegaConfBaseException as error:
        raise RecipeError(f"{_in_yaml(path, error.full_key)} {_mistyped(schema, plain, error)}.") from None
    except RecipeError:
        raise
    except ValueError as error:  # what settings of the floors below say about each other
        raise RecipeError(f"{path}.{error}.") from None


def _mistyped(schema: Any, plain: Any, error: OmegaConfBaseException) -> str:
    """What is wrong with a value of another type than its setting's, to follow the setting's path."""
    value = plain
    for name in str(error.full_key or "").split("."):
        hint = get_type_hints(schema).get(name) if is_dataclass(schema) else None
        if hint is None or not isinstance(value, dict) or name not in value:
            return f"is wrong: {str(error.msg or error).splitlines()[0].rstrip('.')}"
        schema, value = _nested(hint) or hint, value[name]
    kinds = [WORDS[kind] for kind in (get_args(schema) or (schema,)) if kind in WORDS]
    return f"is {_shown(value)}; it must be {' or '.join(kinds) or 'of another type'}"


def _shown(value: Any) -> str:
    """As YAML calls it."""
    return "null" if value is None else repr(value)


def _prepare(schema: type, raw: Any, path: str) -> dict[str, Any]:
    """Refuses unknown keys, spells keys as Python does, reads counts."""
    known = {spelling(setting): setting for setting in fields(schema)}
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} must be a map, not {_shown(raw)}; its keys can be {', '.join(known)}.")
    _check_keys(raw, known, path)
    hints = get_type_hints(schema)
    plain = {}
    for key, value in raw.items():
        setting, here = known[key], _join(path, key)
        if nested := _nested(hints[setting.name]):
            may_be_left_out = nested is not hints[setting.name]
            value = None if value is None and may_be_left_out else _prepare(nested, value, here)
        elif setting.metadata.get("count") and value is not None:
            value = read_count(value, here)
        elif get_origin(hints[setting.name]) is tuple:
            value = [value] if setting.metadata.get("single") and not isinstance(value, list) else value
            value = _read_list(value, get_args(hints[setting.name])[0], here)
        elif get_origin(hints[setting.name]) is Literal:
            _check_value(setting, hints[setting.name], value, here)
        elif isinstance(value, bool) and hints[setting.name] is not bool:
            raise RecipeError(f"{here} must not be {str(value).lower()}.")  # OmegaConf would read the word "True"
        plain[setting.name] = value
    return plain


def _nested(hint: Any) -> Any:
    """The class of settings below a key; `Settings | None` is that of some that may be left out."""
    choices = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return next((choice for choice in choices if is_dataclass(choice)), None)


def _read_list(value: Any, kind: type, path: str) -> list[Any]:
    """The same list; of settings, each of them built."""
    if not isinstance(value, list):
        raise RecipeError(f"{path} must be a list, not {value!r}.")
    if is_dataclass(kind):
        return [_build(kind, item, f"{path}.{index}") for index, item in enumerate(value)]
    for index, item in enumerate(value):
        if not isinstance(item, kind) or isinstance(item, bool):
            wanted = "text in quotes" if kind is str else "a whole number"
            raise RecipeError(f"{path}.{index} is {item!r}; it must be {wanted}.")
    return value


def _check_values(schema: type, values: Any, path: str) -> None:
    """Bounds and choices, after the types are right."""
    hints = get_type_hints(schema)
    for setting in fields(schema):
        value, here = values[setting.name], _join(path, spelling(setting))
        if nested := _nested(hints[setting.name]):
            if value is not None:
                _check_values(nested, value, here)
        else:
            _check_value(setting, hints[setting.name], value, here)


def _check_value(setting: Field[Any], kind: Any, value: Any, path: str) -> None:
    if found := fault(setting, kind, value):
        choices = choices_of(setting, kind)
        strange = [one for one in (value if isinstance(value, list) else [value]) if one not in choices]
        raise RecipeError(f"{path} {found}{_nearest(strange[0], choices) if choices and strange else '.'}")


def _check_references(recipe: Recipe) -> None:
    """Every model and data set that a stage names exists by the time the stage runs."""
    kinds = {"model": "a model", "data": "data"}
    known: dict[str, list[str]] = {"model": list(recipe.models), "data": list(recipe.data)}
    outs = {made: [out for _, config in recipe.stages if (out := out_name(config, made))] for made in known}
    for index, (kind, config) in enumerate(recipe.stages):
        path = f"stages.{index}.{kind}"
        _check_names(config, path, known, later=outs)
        for made, names in known.items():
            out = out_name(config, made)
            if out is None:
                continue
            if not NAME.fullmatch(out):
                raise RecipeError(f"{path}.out is {out!r}; names are letters, digits, '.', '_' and '-'.")
            if out in names:
                raise RecipeError(f"{path}.out is {out!r}, but {kinds[made]} of that name exists already.")
            names.append(out)
    if recipe.serve is not None:
        _check_names(recipe.serve, "serve", known, later={})


def _check_stages(recipe: Recipe) -> None:
    """What would otherwise fail only after minutes of preparation, or bound what is not measured."""
    for index, (kind, config) in enumerate(recipe.stages):
        for key, mistake in (*_misread_data(kind, config, recipe), *kind_of(kind).mistakes(config, recipe)):
            raise RecipeError(f"stages.{index}.{kind}.{key} {mistake}.")


def _misread_data(kind: str, config: Any, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Data that are read as pairs of answers where documents are wanted, or the other way round."""
    name, wants_pairs = kind_of(kind).data(config), kind_of(kind).reads_pairs
    if name is None or recipe.data_set(name).preference == wants_pairs:
        return
    key = next(spelling(setting) for setting in fields(config) if setting.metadata.get("refers") == "data")
    if wants_pairs:
        what = f"which is read as documents; {kind} learns from pairs of a chosen and a rejected answer"
        switch = f"set data.{name}.preference to true" if name in recipe.data else "name data with `preference: true`"
    else:
        what = f"which is read as pairs of answers; {kind} reads documents"
        switch = "name data without `preference`"
    yield key, f"is {name!r}, {what}: {switch}"


def _check_names(config: Any, path: str, known: Names, later: Names) -> None:
    for setting in fields(config):
        value, here = getattr(config, setting.name), _join(path, spelling(setting))
        if is_dataclass(value):
            _check_names(value, here, known, later)
            continue
        kind = setting.metadata.get("refers")
        if kind is None or value is None or value in known[kind]:
            continue
        if value in later.get(kind, ()):
            raise RecipeError(f"{here} is {value!r}, which only a later stage makes.")
        have = f"it has {', '.join(known[kind])}" if known[kind] else "it has none"
        nearest = _nearest(value, known[kind])
        raise RecipeError(f"{here} is {value!r}, but the recipe has no such {kind}; {have}{nearest}")


def _check_keys(raw: Mapping[str, Any], known: Iterable[str], path: str) -> None:
    for key in raw:
        if key not in known:
            raise RecipeError(f"{path or 'The recipe'} has the unknown key {key!r}{_nearest_or_all(key, known)}")


def read_count(value: Any, path: str = "count") -> int:
    """A number of tokens or the like: 2000, "2k", "1.5M". Raises RecipeError for anything else."""
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    match = COUNT.fullmatch(text.strip())
    exact = float(match[1].replace("_", "")) * SUFFIXES[match[2]] if match and len(text) < 32 else math.nan
    if not math.isfinite(exact) or exact != int(exact):
        raise RecipeError(f"{path} is {value!r}; it must be a whole number like 2000, 100k or 1.5M.")
    return int(exact)


def _nearest(word: Any, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word; nothing where two known ones are as near."""
    close = difflib.get_close_matches(str(word), list(known), n=2, cutoff=0.5)
    likeness = [difflib.SequenceMatcher(None, name, str(word)).ratio() for name in close]
    if not close or close[0] == word or len(set(likeness)) < len(close):
        return "."
    return f". Did you mean {close[0]!r}?"


def _nearest_or_all(word: Any, known: Iterable[str]) -> str:
    """The same; where no known word is near, all of them."""
    there = list(known)
    meant = next((name for name in OTHER_NAMES.get(str(word), ()) if name in there), None)
    if meant is not None:
        return f". Did you mean {meant!r}?"
    nearest = _nearest(word, there)
    return nearest if nearest != "." else f"; it can be {', '.join(there)}."


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _in_yaml(path: str, full_key: str | None) -> str:
    """OmegaConf's path of a value, in the recipe's spelling."""
    parts = [path, *(full_key or "").split(".")]
    return ".".join("from" if part == "origin" else part for part in parts if part)


# --- writing ----------------------------------------------------------------------------------------------------------


def recipe_to_plain(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe: what runs/NAME/recipe.yaml holds. Reading it again gives an equal Recipe."""
    return {
        "name": recipe.name,
        "models": {name: to_plain(source) for name, source in recipe.models.items()},
        "data": {name: to_plain(source) for name, source in recipe.data.items()},
        "stages": [{kind: to_plain(config)} for kind, config in recipe.stages],
        "serve": None if recipe.serve is None else to_plain(recipe.serve),
        "tracking": asdict(recipe.tracking),
    }


def recipe_to_yaml(recipe: Recipe) -> str:
    """recipe_to_plain as YAML text."""
    return yaml.safe_dump(recipe_to_plain(recipe), sort_keys=False, allow_unicode=True, width=120)
