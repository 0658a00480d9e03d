"""The list of weight formats. Naming one imports it: the list alone needs no torch."""

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config_fields import shown
from model.files.safe_io import CheckpointError

if TYPE_CHECKING:
    from model.formats.base import FormatOfLayer, IntegerFormat, WeightFormat

FORMATS = {
    "nf4": "model.formats.bitsandbytes:NF4",
    "int8": "model.formats.compressed_tensors:Int8",
    "int4": "model.formats.compressed_tensors:Int4",
    "int6": "model.formats.compressed_tensors:Int6",
    "fp8": "model.formats.compressed_tensors:Fp8",
    "gptq": "model.formats.gptq:Gptq",
    "awq": "model.formats.awq:Awq",
    "ggml": "model.formats.ggml:Ggml",
    "ternary": "model.formats.bitnet:Ternary",
}
"""By the names that recipes use."""
DEFAULT_FORMAT, NO_FORMAT = next(iter(FORMATS)), "none"
FOREIGN_FORMATS = ("gptq", "awq")
"""Those that only the files of other programs are in, and `potstill export` writes."""
DEFAULT_WEIGHTS, DEFAULT_FINER = "int4", "int8"
"""Of a model that is quantized to be served, and of its embeddings and the layers that need more bits."""


def _class_of(name: str) -> "type[WeightFormat[Any]]":
    module, _, attribute = FORMATS[name].partition(":")
    return getattr(import_module(module), attribute)


def format_named(name: str, *, double: bool = True, **options: Any) -> "WeightFormat[Any] | None":
    """The format that a recipe asks for; None for "none". ValueError for an option that the format does not have.

    `double`: quantize the scales too, where it can; `options`: its fields, such as group and symmetric.
    """
    return None if name == NO_FORMAT else _class_of(name).with_options(double=double, **options)


def format_like(name: str, source: "IntegerFormat") -> "IntegerFormat":
    """The format of that name with the bits, groups and zeros of another; ValueError where it has no such.

    With zeros where those who read it need some: what `convert` then writes are the same numbers.
    """
    kind: Any = _class_of(name)
    known = {field.name for field in fields(kind)}
    options = {option: getattr(source, option) for option in ("group", "symmetric", "bits") if option in known}
    return kind(**options | ({"symmetric": False} if kind.others_need_zeros else {}))


def formats_of_config(folder: Path, raw: dict[str, Any]) -> "FormatOfLayer | None":
    """The format of each layer by the contents of a config.json; None for dense weights, CheckpointError for others."""
    entry = raw.get("quantization_config")
    if not entry:
        return None
    if not isinstance(entry, dict):
        raise CheckpointError(f"{folder / 'config.json'} has quantization_config {shown(entry)}; it must be an object.")
    classes = [_class_of(name) for name in FORMATS]
    try:
        found = next((layers for one in classes if (layers := one.of_layers(entry)) is not None), None)
        what = next((text for one in classes if (text := one.describe(entry))), entry.get("quant_method")) or "unknown"
    except (TypeError, KeyError, AttributeError, IndexError, re.error) as reason:
        raise CheckpointError(f"{folder / 'config.json'} has an unreadable quantization_config: {reason!r}.") from None
    if found is not None:
        return found
    what = " ".join(str(what).split())
    known = ", ".join(one.with_options().title for one in classes)
    raise CheckpointError(f"{folder} is quantized ({what}); only plain floating-point weights and {known} can be read.")
