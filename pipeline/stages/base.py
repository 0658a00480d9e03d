"""What a kind of stage is, and the list of all kinds. Recipes, keys, plans, runs, reports and the command ask it.

A kind is a folder of pipeline/stages/ (or one module) that defines KIND, and one entry of KINDS. Its configuration and
its report import no torch; what runs does, and is imported when it runs.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from pipeline.report.section import Curves, Section
from pipeline.results import FILE_NAME, FORMAT_VERSION, Result
from pipeline.settings import references

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.text.tokenizer import Tokenizer
    from pipeline.schema import Recipe
    from pipeline.stages.shared.context import StageContext
    from train.memory import Setup

KINDS = ("import_model", "pretrain", "gqa", "mod", "distill", "qlora", "evaluate", "conversation")
"""Modules of pipeline/stages/; a kind that is not listed does not exist."""

C = TypeVar("C")
D = TypeVar("D")


class StageKind(Generic[C, D]):
    """One kind of stage, with its settings and its details. The defaults are those of one that trains nothing."""

    name: str
    """Of its module, of its key in a recipe, and in result files."""
    config: type[C]
    """Its settings, a frozen dataclass of fields made by `setting`."""
    details: type[D]
    """What only this kind has to say in its result.json, a frozen dataclass."""
    in_recipes: bool = True
    """Whether an entry of `stages:` may name it."""
    kept_figures: tuple[str, ...] = ("start.json",)
    """What it measures before training and keeps in its folder, so that a resumed stage need not measure it again."""

    @property
    def identity(self) -> str:
        """What digests and manifests call it: it must never change, else finished stages would run again."""
        return self.name

    # --- what it reads ---

    def models(self, config: C) -> list[str]:
        """Names of the models that it reads, each once."""
        return list(dict.fromkeys(references(config, "model")))

    def data(self, config: C) -> str | None:
        """Name of the data set that it reads."""
        return next(references(config, "data"), None)

    def tokenizer(self, config: C, folders: Mapping[str, Path]) -> "Tokenizer":
        """What it reads its data with, from the folders of its models: by default that of the first."""
        from model.text.tokenizer import Tokenizer

        return Tokenizer.load(folders[self.models(config)[0]])

    def mistakes(self, config: C, recipe: "Recipe") -> Iterator[tuple[str, str]]:
        """(key, the rest of a sentence about it) of what would otherwise fail only after minutes of preparation."""
        yield from ()

    def stamp(self, config: C) -> Any:
        """Plain data that changes when what it reads outside the run does."""
        return None

    # --- what it holds in memory, and running it ---

    def setup(self, config: C, shapes: "Mapping[str, ModelConfig]") -> "Setup | None":
        """What its training holds in memory, given the shapes of all models before it; None if it does not train.

        Raises UserError for what a model of that shape does not have.
        """
        return None

    def shape(self, config: C, shapes: "Mapping[str, ModelConfig]", cache: Path) -> "ModelConfig | None":
        """What it publishes."""
        setup = self.setup(config, shapes)
        return None if setup is None else setup.model

    def run(self, context: "StageContext") -> Result[D] | None:
        """Does the work. Every process calls it; the main one returns the result.

        It publishes through `context.publish` or not at all, and goes on from what an interruption left in its folder.
        By default it is the function `run` of the kind's run.py, which imports torch and the rooms below.
        """
        return importlib.import_module(f"pipeline.stages.{self.name}.run").run(context)

    # --- what is shown ---

    def sections(self, results: Sequence[Result[D]], curves: Curves) -> list[Section]:
        """Of all stages of this kind that finished, for the page and the terminal; `curves` are by stage."""
        return []


def kind_of(name: str) -> StageKind[Any, Any]:
    """The kind of this name. Raises ValueError for one that is not listed."""
    if name not in KINDS:
        raise ValueError(f"There is no kind of stage called {name!r}; there are {', '.join(KINDS)}.")
    return importlib.import_module(f"pipeline.stages.{name}").KIND


def recipe_kinds() -> list[str]:
    """What an entry of `stages:` may name."""
    return [name for name in KINDS if kind_of(name).in_recipes]


def sections_of(results: Sequence[Result[Any]], curves: Curves) -> list[Section]:
    """What each kind has to say of its stages, in the order in which the run came to the kinds."""
    names = dict.fromkeys(result.kind for result in results)
    own = {name: [result for result in results if result.kind == name] for name in names}
    return [section for name in names for section in kind_of(name).sections(own[name], curves)]


def read_result(folder: Path) -> Result[Any] | None:
    """The stage's result; None where there is none, or one that this release does not read."""
    try:
        raw = msgspec.json.decode((folder / FILE_NAME).read_bytes())
        kind = next(kind for kind in map(kind_of, KINDS) if raw["kind"] in (kind.name, kind.identity))
        result = msgspec.convert(raw | {"kind": kind.name}, Result[kind.details])  # type: ignore[name-defined]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, StopIteration, KeyError, TypeError):
        return None
    return result if result.format == FORMAT_VERSION else None
