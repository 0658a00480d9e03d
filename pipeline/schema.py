"""What a recipe is made of: its models, its data, its stages, what it serves. pipeline/recipe.py reads it.

The settings of each kind of stage stand in its folder, pipeline/stages/NAME/config.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.settings import POSITIVE, out_name, redeclared, setting
from pipeline.stages.import_model.config import ModelSource
from train.sources import DataConfig

DATA_NAME = "data"
"""The folder of a data set in that of the stage which made it."""


@dataclass(frozen=True)
class DataSource(DataConfig):
    """Text of a recipe: some of it is always held out, to measure on."""

    held_out: float = redeclared(DataConfig, "held_out", 0.02, range=(1e-6, 0.5))


@dataclass(frozen=True)
class Serve:
    """What `potstill serve RUN` serves."""

    model: str = setting(refers="model")
    verify: str | None = setting(None, refers="model")
    """Serve this model's distribution instead, with `model` as its draft. `--verify` says the same."""
    kv_cache_dtype: str = setting("auto", choices=("auto", "int8", "fp8"))
    """In what keys and values are cached; `quantize` measures it as `kv_cache`. `--kv-cache-dtype` says the same."""
    price_per_hour: float | None = setting(None, range=POSITIVE)
    """What an hour of the machine costs, in any currency: reports then say what a million tokens cost."""


@dataclass(frozen=True)
class Tracking:
    """Where a run's measurements go besides its own metrics.jsonl."""

    wandb: str = setting("disabled", choices=("disabled", "offline", "online"))
    """A wandb run for each stage, grouped under the recipe's name. WANDB_MODE and its kin hold as everywhere."""


@dataclass(frozen=True)
class Stage:
    """One step of a run, in the order of the run. Imports of models come first, then the recipe's stages."""

    index: int
    kind: str
    """Name of its StageKind, in the list of pipeline/stages/base.py."""
    config: Any
    """Of that kind's class."""
    label: str
    """Last part of its folder's name: the model's name for an import, else the kind."""
    out: str | None
    """Name of the model it publishes."""
    data_out: str | None = None
    """Name of the data set it makes, in `DATA_NAME` of its folder."""

    @property
    def name(self) -> str:
        """Its folder in the run folder, like `01-distill`."""
        return f"{self.index:02d}-{self.label}"


@dataclass(frozen=True)
class Recipe:
    """A whole recipe, checked: every name in it refers to something that exists."""

    name: str
    """Name of the run; its folder is runs/NAME."""
    models: dict[str, ModelSource]
    data: dict[str, DataSource]
    stages: tuple[tuple[str, Any], ...]
    """(kind, settings) in the order in which they run."""
    serve: Serve | None
    tracking: Tracking

    def plan(self) -> tuple[Stage, ...]:
        """Every stage of the run: one import a model, then the recipe's own."""
        imports = [(source.kind, source, name, name) for name, source in self.models.items()]
        others = [(kind, config, kind, out_name(config)) for kind, config in self.stages]
        return tuple(
            Stage(index=index, kind=kind, config=config, label=label, out=out, data_out=out_name(config, "data"))
            for index, (kind, config, label, out) in enumerate(imports + others)
        )

    def data_set(self, name: str, run: Path = Path()) -> DataSource:
        """What the recipe calls by this name: declared, or made by a stage of the run in the folder `run`.

        A stage that makes data says by `data_set(recipe, run, folder)` of its settings how its `folder` is read.
        """
        if name in self.data:
            return self.data[name]
        stage = next(stage for stage in self.plan() if stage.data_out == name)
        return stage.config.data_set(self, run, run / stage.name / DATA_NAME)
