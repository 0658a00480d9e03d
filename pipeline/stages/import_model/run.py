"""Stage `teacher`: imports a model of the recipe from a folder, the hub, a GGUF file or a Python wheel.

Everything goes through our own reader and writer, so what is published is complete, finite, and safetensors and JSON
only, whatever lay beside it at its origin.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.cost import kv_bytes_per_token
from model.files.adapter import CONFIG_NAME as ADAPTER_NAME
from model.files.checkpoint import formats_of_folder, load_config, load_model, save_model, tensor_shapes
from model.files.sources import HUB_FILES, locate
from model.formats.base import WeightFormat
from model.formats.gguf.reader import gguf_config, import_gguf, import_gguf_blocks
from model.text.shipped_templates import set_chat_template
from model.text.tokenizer import Tokenizer
from pipeline.errors import UserError
from pipeline.measure.quality import PUBLISHED_DTYPE
from pipeline.results import ModelReport, NoDetails, Result
from pipeline.stages.import_model.config import ModelSource
from pipeline.stages.shared.context import StageContext

log = logging.getLogger(__name__)


def run(context: StageContext) -> Result[NoDetails] | None:
    """Publishes the model. Raises SourceError when the source is not there or is not what the recipe says."""
    if not context.processes.is_main:
        return None
    source: ModelSource = context.stage.config
    log.info("importing %s from %s", context.stage.label, source.origin)
    digest = context.publish(lambda folder: import_model(source, folder, context.cache))
    return context.result(output=digest, models=[report_of(context.stage.label, context.published)])


def import_model(source: ModelSource, folder: Path, cache: Path) -> None:
    """Writes config, weights in their own dtype, and tokenizer into `folder`."""
    _write_model(source, folder, cache)
    if source.chat_template is not None:
        set_chat_template(folder, source.chat_template)


def _write_model(source: ModelSource, folder: Path, cache: Path) -> None:
    found = _locate(source, cache)
    if found.is_file():
        (import_gguf_blocks if source.keep_blocks else import_gguf)(found, folder)
        return
    if source.keep_blocks:
        raise UserError(f"keep_blocks goes with a wheel or a .gguf file, not with {source.origin}.")
    if (found / ADAPTER_NAME).exists():
        raise UserError(f"{found} holds an adapter over a base; name a model in which it has been merged.")
    model = load_model(found, dtype="auto")
    save_model(model, folder, cache_scales=model.cache_scales)
    Tokenizer.load(found).save(folder)


def report_of(label: str, folder: Path) -> ModelReport:
    """The row of a model that nothing has been measured on yet."""
    config = load_config(folder)
    return ModelReport(
        label=label,
        parameters=config.num_parameters(),
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        kv_bytes_per_token=kv_bytes_per_token(config, PUBLISHED_DTYPE),
    )


def shape(source: ModelSource, shapes: Mapping[str, ModelConfig], cache: Path) -> ModelConfig:
    """The configuration alone: of a model on the hub nothing else is fetched. Raises as `run` does."""
    found = _locate(source, cache, ["config.json"])
    return gguf_config(found) if found.is_file() else load_config(found)


def formats(source: ModelSource, shapes: Mapping[str, ModelConfig], cache: Path) -> dict[str, WeightFormat[Any]]:
    """Of the projections of its layers, by its config.json; blocks of a GGUF file count as what they become in bf16."""
    found = _locate(source, cache, ["config.json"])
    format_of = None if found.is_file() else formats_of_folder(found)
    if format_of is None:
        return {}
    names = [name.removesuffix(".weight") for name in tensor_shapes(load_config(found))]
    return {name: one for name in names if name.endswith("_proj") and (one := format_of(name)) is not None}


def _locate(source: ModelSource, cache: Path, files: list[str] = HUB_FILES) -> Path:
    return locate(source.origin, revision=source.revision, sha256=source.sha256, files=files, cache=cache)
