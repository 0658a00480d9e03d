"""Where the models of a stage lie: whole on each process's device, or, where training is in shards, nowhere whole.

load, to_measure    in the shards of all processes, who ask together
to_train            likewise, unless a part of it is frozen
to_calibrate        a layer at a time on the device of each, whose passes are its own
to_ask              likewise, of a model in host memory
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import nn

from model.lazy import LazyModel, passing_copy
from model.mesh import Mesh, choose_device, choose_dtype
from model.transformer import Transformer
from pipeline.measure.quality import load_published


@dataclass(frozen=True)
class Models:
    """How they are opened."""

    mesh: Mesh

    def load(self, folder: Path) -> Transformer:
        """A published model, to be measured."""
        return load_published(folder, self.mesh.undivided)

    def weights(self, folder: Path) -> LazyModel:
        """Of a dense model that is to be converted, on the device and in the dtype of what is measured."""
        device = choose_device()
        return LazyModel.of_folder(folder, choose_dtype("auto", device), device)

    def to_measure(self, model: LazyModel) -> Transformer:
        """One that is not published."""
        if self.mesh.is_whole:
            return model.made()
        from train.sharding import make_frozen

        return make_frozen(model, self.mesh.undivided)

    def to_calibrate(self, model: LazyModel) -> Transformer:
        """One for each process to pass its own text through."""
        return model.made() if self.mesh.is_whole else model.passing()

    def to_train(self, model: LazyModel, *, all_of_it: bool = True) -> Transformer:
        """A student; in shards, if `all_of_it` is trained, no process has it whole."""
        return model.unmade() if all_of_it and not self.mesh.is_whole else model.made()

    def to_ask(self, model: Transformer, change: Callable[[nn.Module], nn.Module] | None = None) -> Transformer:
        """One that was trained, which may move; to `change` it, part by part, a copy is made."""
        device = choose_device()
        if not self.mesh.is_whole:
            return passing_copy(model, lambda part: (change(part) if change else part).to(device))
        return cast("Transformer", change(copy.deepcopy(model)) if change else model).to(device)
