"""What a kind of stage is, and the list of all kinds. Recipes, keys, plans, runs, reports and the command ask it.

A kind is a folder of pipeline/stages/ (or one module) that defines KIND, and one entry of KINDS. Its configuration and
its report import no torch; its run.py does, and is imported when a stage runs or is planned.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from pipeline.report.section import Curves, Section
from pipeline.results import FILE_NAME, FORMAT_VERSION, Result
from pipeline.settings import references

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.formats.base import WeightFormat
    from model.text.tokenizer import Tokenizer
    from model.training_memory import Setup
    from pipeline.schema import Recipe
    from pipeline.stages.shared.context import StageContext

KINDS = (
    "import_model",
    "pretrain",
    "gqa",
    "mod",
    "synthesize",
    "precompute",
    "distill",
    "sft",
    "qlora",
    "dpo",
    "quantize",
    "evaluate",
    "conversation",
)
"""Modules of pipeline/stages/; a kind that is not listed does not exist."""

C = TypeVar("C")
D = TypeVar("D")


@dataclass(frozen=True)
class Tunable(Generic[C]):
    """What `potstill tune` may do with a kind of stage besides leaving it out."""

    origin: Callable[[C], str]
    """Name of the model that it changes, and that later stages take where the stage is left out."""
    choices: "Callable[[C, ModelConfig], dict[str, C]]"
    """Settings to try on a model of that shape, those of the recipe first, by short names."""


@dataclass(frozen=True)
class StageKind(Generic[C, D]):
    """One kind of stage: what can be said of it without torch. The rest are functions of the module `runner`."""

    name: str
    """Of its module, of its key in a recipe, and in result files."""
    config: type[C]
    """Its settings, a frozen dataclass of fields made by `setting`."""
    details: type[D]
    """What only this kind has to say in its result.json, a frozen dataclass."""
    sections: Callable[[Sequence[Result[D]], Curves], list[Section]] = lambda results, curves: []
    """What the page and the terminal show of all its stages that finished; `curves` are by stage."""
    mistakes: "Callable[[C, Recipe], Iterable[tuple[str, str]]]" = lambda config, recipe: ()
    """(key, the rest of a sentence about it) of what would otherwise fail only after minutes of preparation."""
    stamp: Callable[[C], Any] = lambda config: None
    """Plain data that changes when what it reads outside the run does."""
    kept_figures: tuple[str, ...] = ("start.json",)
    """What it measures before training and keeps in its folder, so that a resumed stage need not measure it again."""
    reads_documents: bool = False
    """Whether it reads its data as documents instead of tokens."""
    reads_pairs: bool = False
    """Whether its data are pairs of a chosen and a rejected answer; others read documents."""
    in_recipes: bool = True
    """Whether an entry of `stages:` may name it."""
    former_name: str | None = None
    """Of a kind that was renamed."""
    tunable: Tunable[C] | None = None
    teacher: Callable[[C], str | None] = lambda config: None
    """Name of a model that it learns from as that is published, quantized or not."""
    starts_from: Callable[[C], str | None] = lambda config: None
    """Name of the model whose weights it goes on from: they must not be quantized."""
    runner: str = ""
    """Module of the functions below; by default the run.py of the kind's folder."""

    @property
    def identity(self) -> str:
        """What digests and manifests call it: this must never change, else finished stages would run again."""
        return self.former_name or self.name

    def models(self, config: C) -> list[str]:
        """Names of the models that it reads, each once."""
        return list(dict.fromkeys(references(config, "model")))

    def data(self, config: C) -> str | None:
        """Name of the data set that it reads."""
        return next(references(config, "data"), None)

    def run(self, context: "StageContext") -> Result[D] | None:
        """Does the work, by `run(context)`. Every process calls it; the main one returns the result.

        It publishes through `context.publish` or not at all, and goes on from what an interruption left in its folder.
        """
        return self._function("run")(context)

    def tokenizer(self, config: C, folders: Mapping[str, Path]) -> "Tokenizer":
        """What reads its data, from the folders of its models: `tokenizer(config, folders)`, or that of the first."""
        from model.text.tokenizer import Tokenizer

        own = self._function("tokenizer")
        return own(config, folders) if own else Tokenizer.load(folders[self.models(config)[0]])

    def setup(self, config: C, shapes: "Mapping[str, ModelConfig]") -> "Setup | None":
        """What its training holds in memory, by `setup(config, shapes of the models before it)`; None without that.

        Raises UserError for what a model of that shape does not have.
        """
        own = self._function("setup")
        return own(config, shapes) if own else None

    def shape(self, config: C, shapes: "Mapping[str, ModelConfig]", cache: Path) -> "ModelConfig | None":
        """What it publishes: that of `setup`, or by `shape(config, shapes, cache)`."""
        if own := self._function("shape"):
            return own(config, shapes, cache)
        setup = self.setup(config, shapes)
        return setup.model if setup else None

    def formats(self, config: C, shapes: "Mapping[str, ModelConfig]", cache: Path) -> "Mapping[str, WeightFormat[Any]]":
        """Of the quantized layers of what it publishes, by `formats(config, shapes, cache)`; without that, none are."""
        own = self._function("formats")
        return own(config, shapes, cache) if own else {}

    def weight_bytes(self, config: C, shapes: "Mapping[str, ModelConfig]", cache: Path) -> int:
        """Of what it publishes."""
        from model.cost import planned_weight_bytes
        from pipeline.measure.quality import PUBLISHED_DTYPE

        shape = self.shape(config, shapes, cache)
        if shape is None:
            raise ValueError(f"{self.name} does not say what it publishes")
        return planned_weight_bytes(shape, self.formats(config, shapes, cache), PUBLISHED_DTYPE)

    def _function(self, name: str) -> Any:
        return getattr(importlib.import_module(self.runner or f"pipeline.stages.{self.name}.run"), name, None)


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
