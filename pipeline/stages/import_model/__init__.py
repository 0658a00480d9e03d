"""Imports a model that a recipe names."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.results import NoDetails
from pipeline.stages.base import StageKind
from pipeline.stages.import_model.config import ModelSource

if TYPE_CHECKING:
    from model.config import ModelConfig


class ImportKind(StageKind[ModelSource, NoDetails]):
    """One stage for each entry of `models:`."""

    name, config, details = "import_model", ModelSource, NoDetails
    in_recipes = False
    identity = "teacher"  # its name in the first release, whose runs and models must keep their digests

    def stamp(self, config: ModelSource) -> Any:
        """Sizes and times of a local source's files: when they change, the model is imported anew.

        An import that gives the same files has the same digest, so the stages after it do not run again for nothing.
        """
        path = Path(config.origin).expanduser()
        if config.origin.startswith("wheel:") or not path.exists():
            return None
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    def shape(self, config: ModelSource, shapes: "Mapping[str, ModelConfig]", cache: Path) -> "ModelConfig":
        from pipeline.stages.import_model.run import read_config

        return read_config(config, cache)


KIND = ImportKind()
