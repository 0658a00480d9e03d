"""The weights of a model rounded to formats of fewer bits (model/formats), each for itself.

A folder is quantized tensor by tensor, so that memory holds the small model (of one shard) and one dense weight.
"""

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.files.checkpoint import TensorFiles, formats_of_folder, load_config, tensor_shapes, write_checkpoint
from model.formats.base import QuantizedMatrix, WeightFormat
from model.linear import Embedding, Linear
from model.lora import adapted_layers
from model.quantized import quantized_layers, set_quantized
from model.transformer import Transformer


class QuantizationError(ValueError):
    """A model that cannot be quantized; the sentence says why."""


class UnevenRowsError(QuantizationError):
    """A layer that its format cannot hold because groups do not divide its rows."""

    def __init__(self, layer: str, reason: ValueError, format: WeightFormat[Any], rows: Collection[int]) -> None:
        """`rows`: weights of a row, of all layers in this format."""
        super().__init__(f"{layer} cannot be quantized: {reason}")
        self.layer, self.format, self.rows = layer, format, rows


Overrides = Mapping[str, WeightFormat[Any] | None]
"""Formats of the layers that shell patterns name, by full name or its end: "lm_head", "*.layers.0.*", "embed_tokens";
of several patterns the last holds. None leaves a layer dense."""


def formats_of_layers(
    config: ModelConfig, format: WeightFormat[Any], overrides: Overrides = MappingProxyType({})
) -> dict[str, WeightFormat[Any]]:
    """By name, of the layers that will be quantized, in the model's order: the decoder's projections, in `format`.

    Embedding and head only where `overrides` names them; the head of tied embeddings is the embedding. Raises
    QuantizationError for a pattern that matches nothing, and for a layer that its format cannot hold;
    UnevenRowsError where that is by the length of its rows.
    """
    with torch.device("meta"):
        modules = {name: m for name, m in Transformer(config).named_modules() if isinstance(m, Linear | Embedding)}
    formats: dict[str, WeightFormat[Any] | None] = {name: format for name in modules if name.endswith("_proj")}
    for pattern, other in overrides.items():
        named = [name for name in modules if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        if not named:
            raise QuantizationError(f"The pattern {pattern!r} names no layer of this model.")
        formats |= dict.fromkeys(named, other)
    chosen = {name: one for name in modules if (one := formats.get(name)) is not None}
    rows = {name: modules[name].weight.shape[1] for name in chosen}
    for name, one in chosen.items():
        if isinstance(modules[name], Embedding) and not one.holds_embeddings:
            raise QuantizationError(f"{one.title} holds no embeddings; leave {name} dense, or choose another format.")
        try:
            one.check_row(rows[name])
        except ValueError as reason:
            alike = {rows[other] for other, format in chosen.items() if format == one}
            raise UnevenRowsError(name, reason, one, alike) from None
    return chosen


def quantize_folder(
    source: str | Path,
    target: str | Path,
    format: WeightFormat[Any],
    *,
    overrides: Overrides = MappingProxyType({}),
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Reads a model folder and writes it quantized (see `formats_of_layers`), for `load_model` and others.

    What is not quantized keeps the dtype of the source's embeddings.
    Raises QuantizationError for a model that is quantized already, CheckpointError for a folder that cannot be read.
    """
    if formats_of_folder(source) is not None:
        raise QuantizationError(f"{source} is quantized already; quantize the model that it was made from.")
    config, files = load_config(source), TensorFiles(source)
    sources: dict[str, Callable[[], Tensor | QuantizedMatrix]] = {
        name: partial(files.read, name) for name in tensor_shapes(config)
    }
    layers = formats_of_layers(config, format, overrides)
    formats = {f"{name}.weight": one for name, one in layers.items()}
    sources |= {name: partial(_quantize, files, name, one) for name, one in formats.items()}
    write_checkpoint(
        target,
        config,
        sources,
        dtype=files.read("model.embed_tokens.weight").dtype,
        max_shard_bytes=max_shard_bytes,
        formats=formats,
    )


@torch.no_grad()
def quantize_model(
    model: Transformer, format: WeightFormat[Any], *, overrides: Overrides = MappingProxyType({})
) -> Transformer:
    """Quantizes weights of a model in memory (see `formats_of_layers`), one after another, and returns it.

    Raises QuantizationError for a model that is quantized already or carries an adapter.
    """
    if quantized_layers(model):
        raise QuantizationError("The model is quantized already; quantize the one that it was made from.")
    if adapted_layers(model):
        raise QuantizationError("The model has an unmerged adapter; merge it before you quantize.")
    for name, one in formats_of_layers(model.config, format, overrides).items():
        set_quantized(model, name, one.quantize(model.get_parameter(f"{name}.weight").detach()), one)
    return model


def _quantize(files: TensorFiles, name: str, format: WeightFormat[Any]) -> QuantizedMatrix:
    weight = files.read(name)
    if not torch.isfinite(weight).all():
        raise QuantizationError(f"{files.places[name]} holds values in {name} that are not finite.")
    try:
        return format.quantize(weight)
    except ValueError as reason:
        raise QuantizationError(f"{name} cannot be quantized: {reason}") from None
