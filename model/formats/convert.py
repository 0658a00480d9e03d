"""A quantized folder in another layout: the same integers, to the bit, where another program looks for them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model.files.checkpoint import load_model, save_model
from model.files.safe_io import CheckpointError
from model.formats.base import IntegerFormat
from model.formats.registry import format_like
from model.linear import Embedding, Linear
from model.quantized import QuantizedEmbedding, QuantizedLayer, quantized_layers, set_quantized
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer

SAME_BITS = "compressed-tensors"


def export_quantized(folder: str | Path, path: str | Path, *, type: str, name: str | None = None) -> None:
    """Writes the quantized model in `folder` to the new folder `path`, its integers as the format `type` holds them.

    `SAME_BITS` is the format of compressed-tensors with each layer's own bits. A quantized embedding or head becomes
    dense, since nobody else reads them. Raises CheckpointError for what is not quantized,
    and for weights that the format cannot hold.
    """
    folder, path = Path(folder), Path(path)
    if path.exists():
        raise CheckpointError(f"{path} is there already; remove it or name another folder.")
    model = load_model(folder, dtype="auto")
    if not quantized_layers(model):
        raise CheckpointError(f"The weights of {folder} are not quantized; the stage quantize makes some that are.")
    _convert(model, type)
    part = path.with_name(f"{path.name}.part")
    try:
        save_model(model, part, cache_scales=model.cache_scales if type == SAME_BITS else ())
        Tokenizer.load(folder).save(part)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _convert(model: Transformer, type: str) -> None:
    for name, layer in quantized_layers(model).items():
        source: Any = layer.format
        if isinstance(layer, QuantizedEmbedding) or layer is model.lm_head:
            model.set_submodule(name, _dense(layer, model.dtype))
        elif isinstance(source, IntegerFormat):
            try:
                target: Any = format_like(f"int{source.bits}" if type == SAME_BITS else type, source)
                set_quantized(model, name, target.convert(layer.weight, source), target)
            except ValueError as error:
                raise CheckpointError(f"{name} cannot be written as {type}: {error}") from None
        else:
            raise CheckpointError(
                f"{name} is in {source.title}, {type} holds integers on a grid with zeros: let the stage quantize make "
                "them of the model that this one was made of, or of a file imported without keep_blocks."
            )


def _dense(layer: QuantizedLayer, dtype: torch.dtype) -> Embedding | Linear:
    rows, columns = layer.shape
    dense = Embedding(rows, columns) if isinstance(layer, QuantizedEmbedding) else Linear(columns, rows, bias=False)
    dense.weight = nn.Parameter(layer.weight.dequantize(dtype), requires_grad=False)
    return dense
