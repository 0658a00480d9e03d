"""Rounded layers on the disk, a file each: what a stage goes on behind, and what is measured, trained and published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from compress.quantize.calibrated import QuantizedLayerReport
from compress.residual_stream import layers_of
from model.formats.base import WeightFormat
from model.quantized import quantized_layers, set_quantized
from model.tensor_parallel import LAYERS
from model.transformer import Transformer
from pipeline.measure.quality import PUBLISHED_DTYPE
from pipeline.stages.shared.training import write_tensors


def save_layer(model: Transformer, report: QuantizedLayerReport, folder: Path) -> None:
    """Writes one that was rounded."""
    layer = layers_of(model)[report.number]
    tensors = {name: parameter.detach().cpu() for name, parameter in layer.named_parameters()}
    for name, quantized in quantized_layers(layer).items():
        tensors |= quantized.format.to_files(name, quantized.weight, PUBLISHED_DTYPE)
    told = {"report": msgspec.json.encode(report).decode()}
    write_tensors(layer_file(folder, report.number), tensors, told)


def load_layer(model: Transformer, path: Path, formats: Mapping[str, WeightFormat[Any]]) -> None:
    """Gives a layer of the model what the file holds, whatever it held before."""
    report, tensors = layer_report(path), load_file(path)
    layer = layers_of(model)[report.number]
    for whole_name in report.errors:
        name = whole_name.removeprefix(f"{LAYERS}{report.number}.")
        linear: Any = layer.get_submodule(name)
        format, shape = formats[whole_name], torch.Size((linear.out_features, linear.in_features))
        weight = format.from_files(name, shape, tensors.__getitem__)
        set_quantized(layer, name, format.moved(weight, model.device), format)
    rest = {name: tensors[name].to(model.device) for name, _ in layer.named_parameters()}
    layer.load_state_dict(rest, assign=True)


def layer_report(path: Path) -> QuantizedLayerReport:
    """What was said of a layer when it was rounded."""
    with safe_open(path, framework="pt") as file:
        return msgspec.json.decode(file.metadata()["report"], type=QuantizedLayerReport)


def layer_file(folder: Path, number: int) -> Path:
    """Where a layer lies."""
    return folder / f"{number:04d}.safetensors"


def layer_files(folder: Path) -> list[Path]:
    """Of the layers that are done, in order."""
    return sorted(folder.glob("*.safetensors"))
