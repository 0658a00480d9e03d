"""Where the models of a stage lie: whole on each process's device, or, where training is in shards, nowhere whole.

load, to_measure                 in the shards of all processes, who ask together
to_train, to_adapt               likewise
to_calibrate, load_to_calibrate  a layer at a time on the device of each, whose passes are its own
to_ask                           likewise, of a model in host memory
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from model.files.checkpoint import load_model, open_layerwise
from model.lazy import LazyModel, passing, passing_copy, unmade_of_folder
from model.mesh import Mesh, MeshError, choose_device, choose_dtype, training_mesh
from model.transformer import Transformer
from pipeline.measure.quality import load_published

log = logging.getLogger(__name__)


def asking_mesh() -> Mesh | None:
    """The launcher's, where models are only asked: one that training does not know is no mistake there."""
    try:
        return training_mesh(None).undivided
    except MeshError as error:
        log.info("%s. Until then each process has whole models.", error)
        return None


@dataclass(frozen=True)
class Models:
    """How they are opened."""

    mesh: Mesh

    def load(self, folder: Path, dtype: torch.dtype | None = None) -> Transformer:
        """A published model, to be measured."""
        return load_published(folder, self.mesh.undivided, dtype)

    def weights(self, folder: Path) -> LazyModel:
        """Of a dense model that is to be converted, on the device and in the dtype of what is measured."""
        device = choose_device()
        return LazyModel.of_folder(folder, choose_dtype("auto", device), device)

    def to_measure(self, model: LazyModel) -> Transformer:
        """One that is not published."""
        return model.made() if self.mesh.is_whole else self.in_shards(*model.opened())

    def in_shards(self, model: Transformer, make_layer: Callable[[int], None]) -> Transformer:
        """The same of one whose layers hold no memory yet."""
        from train.sharding import make_frozen

        return make_frozen(model, make_layer, self.mesh.undivided)

    def to_calibrate(self, model: LazyModel) -> Transformer:
        """One for each process to pass its own text through."""
        return model.made() if self.mesh.is_whole else model.passing()

    def load_to_calibrate(self, folder: Path) -> Transformer:
        """The same of a published model without an adapter."""
        if self.mesh.is_whole:
            return load_published(folder)
        device = choose_device()
        return passing(*open_layerwise(folder, dtype=choose_dtype("auto", device), device=device))

    def to_train(self, model: LazyModel) -> Transformer:
        """A student; in shards no process has it whole."""
        return model.made() if self.mesh.is_whole else model.unmade()

    def to_adapt(self, folder: Path, dtype: torch.dtype) -> Transformer:
        """The base of an adapter, on this process's device; likewise."""
        if self.mesh.is_whole:
            return load_model(folder, dtype=dtype, device=choose_device())
        return unmade_of_folder(folder, dtype, choose_device())

    def to_ask(self, model: Transformer, change: Callable[[nn.Module], nn.Module] | None = None) -> Transformer:
        """One that was trained, which may move; to `change` it, part by part, a copy is made."""
        device = choose_device()
        if not self.mesh.is_whole:
            return passing_copy(model, lambda part: (change(part) if change else part).to(device))
        return cast("Transformer", change(copy.deepcopy(model)) if change else model).to(device)
