"""The linear weights of a model rounded to a format of fewer bits (model/formats), each for itself.

A folder is quantized tensor by tensor, so that memory holds the small model (of one shard) and one dense weight.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.files.checkpoint import TensorFiles, format_of_folder, load_config, tensor_shapes, write_checkpoint
from model.formats.base import QuantizedMatrix, WeightFormat
from model.linear import Linear
from model.lora import adapted_layers
from model.quantized import quantized_layers, set_quantized
from model.transformer import Transformer


class QuantizationError(ValueError):
    """A model that cannot be quantized; the sentence says why."""


def quantize_folder(
    source: str | Path, target: str | Path, format: WeightFormat[Any], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Reads a model folder and writes it with the decoder's linear weights quantized, for `load_model` and others.

    Embeddings, norms, biases and the head keep the dtype of the source's embeddings.
    Raises QuantizationError for a model that is quantized already, CheckpointError for a folder that cannot be read.
    """
    if format_of_folder(source) is not None:
        raise QuantizationError(f"{source} is quantized already; quantize the model that it was made from.")
    config, files = load_config(source), TensorFiles(source)
    sources: dict[str, Callable[[], Tensor | QuantizedMatrix]] = {
        name: partial(files.read, name) for name in tensor_shapes(config)
    }
    with torch.device("meta"):
        quantized = [f"{name}.weight" for name in _linear_layers(Transformer(config))]
    sources |= {name: partial(_quantize, files, name, format) for name in quantized}
    write_checkpoint(
        target,
        config,
        sources,
        dtype=files.read("model.embed_tokens.weight").dtype,
        max_shard_bytes=max_shard_bytes,
        formats=dict.fromkeys(quantized, format),
    )


@torch.no_grad()
def quantize_model(model: Transformer, format: WeightFormat[Any]) -> Transformer:
    """Quantizes the decoder's linear weights of a model in memory, one after another, and returns it.

    Raises QuantizationError for a model that is quantized already or carries an adapter.
    """
    if quantized_layers(model):
        raise QuantizationError("The model is quantized already; quantize the one that it was made from.")
    if adapted_layers(model):
        raise QuantizationError("The model has an unmerged adapter; merge it before you quantize.")
    for name, layer in _linear_layers(model).items():
        set_quantized(model, name, format.quantize(layer.weight.detach()), format)
    return model


def _linear_layers(model: Transformer) -> dict[str, Linear]:
    """The decoder's projections. Not the head, which costs quality and is often the embedding, and no router."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear) and name.endswith("_proj")}


def _quantize(files: TensorFiles, name: str, format: WeightFormat[Any]) -> QuantizedMatrix:
    weight = files.read(name)
    if not torch.isfinite(weight).all():
        raise QuantizationError(f"{files.places[name]} holds values in {name} that are not finite.")
    return format.quantize(weight)
