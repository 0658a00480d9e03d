"""Rounded layers on the disk, a file each: what a stage goes on behind, and what is measured, trained and published."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open
from safetensors.torch import load_file

from compress.quantize.calibrated import QuantizedLayerReport
from compress.residual_stream import layers_of
from model.formats.base import WeightFormat
from model.quantized import quantized_layers, set_quantized
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


def load_layer(model: Transformer, path: Path, formats: Mapping[str, WeightFormat[Any]]) -> QuantizedLayerReport:
    """Gives a dense layer in memory what the file holds; returns what was said of it."""
    with safe_open(path, framework="pt") as file:
        report = msgspec.json.decode(file.metadata()["report"], type=QuantizedLayerReport)
    tensors, layer = load_file(path), layers_of(model)[report.number]
    for full_name in report.errors:
        name = full_name.removeprefix(f"model.layers.{report.number}.")
        format = formats[full_name]
        weight = format.from_files(name, model.get_parameter(f"{full_name}.weight").shape, tensors.__getitem__)
        set_quantized(layer, name, format.moved(weight, model.device), format)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(tensors[name])
    return report


def layer_file(folder: Path, number: int) -> Path:
    """Where a layer lies."""
    return folder / f"{number:04d}.safetensors"


def layer_files(folder: Path) -> list[Path]:
    """Of the layers that are done, in order."""
    return sorted(folder.glob("*.safetensors"))
