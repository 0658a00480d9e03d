"""Stage `qlora`: an adapter trained on a frozen base, which is quantized first; published unmerged or merged.

    quantize → measure → attach → train → measure the ways of merging

The base is kept as an artifact of its own below the stage's folder: the published adapter carries it along, and other
adapters of the same base can be served with it.
"""

import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from compress.lora import merge, merge_requantized
from compress.mod import calibrate
from compress.quantize.round_to_nearest import UnevenRowsError, quantize_folder
from model.config import ModelConfig
from model.cost import quantized_size
from model.files.adapter import BASE_NAME, save_adapter
from model.files.artifact import MANIFEST_NAME, is_artifact, open_artifact, publish
from model.files.checkpoint import load_config, replace_config, save_model
from model.files.safe_io import write_text
from model.formats.registry import DEFAULT_FORMAT, NO_FORMAT, format_named
from model.lora import LoraConfig, adapted_layers
from model.text.tokenizer import Tokenizer
from model.training_memory import Setup
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.measure.gates import check_bound
from pipeline.measure.quality import PUBLISHED_DTYPE, describe_model
from pipeline.results import Check, ModelReport, Result
from pipeline.stages.qlora.config import Qlora
from pipeline.stages.qlora.report import AdapterSize, MergedQuality, QloraDetails, QuantizedSize
from pipeline.stages.shared.context import Input, StageContext
from pipeline.stages.shared.training import TrainingStage, check_dense, trained_numbers, write_model
from train.loop import TrainingResult

log = logging.getLogger(__name__)

GENERATION_NAME = "generation_config.json"


Q = TypeVar("Q", bound=Qlora)


class QloraStage(TrainingStage[Q]):
    """A frozen base with an adapter is published as it is trained."""

    def published_form(self, model: Transformer) -> Transformer:
        return self.models.to_ask(model)


@dataclass(frozen=True)
class Start:
    """What is known before the first step of training."""

    rows: tuple[ModelReport, ModelReport]
    """The model before quantization, and the base that is trained on."""


def run(context: StageContext) -> Result[QloraDetails] | None:
    """Trains and measures in all processes; the main one publishes, and returns the result."""
    return run_adapted(context, QloraStage)


def run_adapted(context: StageContext, kind: type[QloraStage[Q]]) -> Result[QloraDetails] | None:
    """The same of any kind of stage that trains an adapter on a frozen base."""
    config: Qlora = context.stage.config
    source = context.model(config.model)
    _check(context.stage.kind, config)
    check_dense(context, config.model)
    stage = kind(context, Tokenizer.load(source))
    base = context.folder / BASE_NAME
    if context.processes.is_main:
        _make_base(stage, base)
    start = context.start(Start, partial(_measure_start, stage, base))
    model = stage.load_adapted(base, config.adapter, dense=source)
    training = stage.train(model)
    # The base becomes a parent of what is published, so that the two are known to belong together.
    inputs = {**context.inputs, f"{config.out}, base": Input(base, open_artifact(base, verify=False).digest)}
    stage.context = replace(context, inputs=inputs)
    return _publish(stage, start, model, training)


def setup(config: Qlora, shapes: Mapping[str, ModelConfig]) -> Setup:
    """What its training holds in memory."""
    return Setup(
        shapes[config.model],
        config,
        adapter=config.adapter,
        quantization=config.quantization,
        double_quantization=config.double_quantization,
    )


def _check(kind: str, config: Qlora) -> None:
    if config.quantization == NO_FORMAT and config.adapter.init == "loftq":
        raise UserError(f"{kind}: init loftq starts from the quantization error, but quantization is none.")
    if config.quantization == NO_FORMAT and config.publish == "requantized":
        raise UserError(f"{kind}: publish is requantized, but quantization is none; the merged model would be dense.")


# --- before ----------------------------------------------------------------------------------------------------------


def _make_base(stage: QloraStage[Q], base: Path) -> None:
    """Publishes the frozen base: quantized, or the files of the source as they are."""
    if is_artifact(base):
        return
    config = stage.config
    source = stage.context.inputs[config.model]
    format = format_named(config.quantization, double=config.double_quantization)

    def write(folder: Path) -> None:
        if format is None:
            _link_files(source.folder, folder, leave_out=(MANIFEST_NAME, "README.md"))
            return
        log.info("quantizing %s to %s", config.model, format.title)
        try:
            quantize_folder(source.folder, folder, format)
        except UnevenRowsError as error:
            raise UserError(f"{error} Set quantization: {DEFAULT_FORMAT}, whose blocks run across rows.") from None
        Tokenizer.load(source.folder).save(folder)
        _calibrate_base(stage, folder)

    recipe = {"quantization": config.quantization, "double_quantization": config.double_quantization}
    publish(base, write, stage="quantize", recipe=recipe, parents=(source.digest,))


def _calibrate_base(stage: QloraStage[Q], folder: Path) -> None:
    """Sets anew the thresholds of routers, whose scores are not what they were before quantization.

    From here on they stay: several adapters may share the base, and each is trained under the rule by which it is
    served.
    """
    if load_config(folder).mixture_of_depths is None:
        return
    model = stage.models.load_to_calibrate(folder)
    calibrate(model, stage.training_text())
    replace_config(folder, model.config)


def _measure_start(stage: QloraStage[Q], base: Path) -> Start:
    held_out, config = stage.held_out, stage.config
    log.info("measuring the base, on %s held-out tokens", f"{held_out.num_tokens:,}")
    folders = {config.model: stage.context.model(config.model), f"{config.out}, before": base}
    models = {name: stage.models.load(folder) for name, folder in folders.items()}
    dense, frozen = (describe_model(name, model, held_out.quality(model)) for name, model in models.items())
    return Start((dense, frozen))


# --- after -----------------------------------------------------------------------------------------------------------


def _publish(
    stage: QloraStage[Q], start: Start, model: Transformer, training: TrainingResult
) -> Result[QloraDetails] | None:
    config, context, adapter = stage.config, stage.context, stage.config.adapter
    tokenizer = Tokenizer.load(context.model(config.model))
    merges = _measure_merges(stage, model) if stage.has_trained else []

    def details() -> QloraDetails:
        return QloraDetails(
            adapter=AdapterSize(
                rank=adapter.rank,
                layers=len(adapted_layers(model)),
                parameters=trained_numbers(model),
            ),
            quantized=_quantized_size(model),
            merges=merges,
            max_merge_kl=config.max_merge_kl,
            publish=config.publish,
        )

    def write(folder: Path) -> None:
        if config.publish == "adapter":
            _write_adapter(model, adapter, context.folder / BASE_NAME, tokenizer, folder)
        elif config.publish == "merged":
            write_model(merge(model, dtype=PUBLISHED_DTYPE), tokenizer, folder)
        else:
            save_model(merge_requantized(model, dtype=PUBLISHED_DTYPE), folder)
            tokenizer.save(folder)

    checks = _merge_checks(merges, config)
    return stage.finish(write, training=training, details=details, before=start.rows, more_checks=checks)


def _measure_merges(stage: QloraStage[Q], model: Transformer) -> list[MergedQuality]:
    """Each way of handing over base and adapter: its quality, compared with base and adapter side by side."""
    ways: dict[str, Callable[[], Transformer]] = {
        "adapter": lambda: model,
        "merged": lambda: merge(model, dtype=PUBLISHED_DTYPE).to(model.dtype),
    }
    if stage.config.quantization != NO_FORMAT:
        ways["requantized"] = lambda: merge_requantized(model, dtype=PUBLISHED_DTYPE).to(model.dtype)
    log.info("measuring base and adapter side by side, and merged")
    held_out = stage.for_trained(stage.held_out)
    states = held_out.states(stage.models.to_ask(model))
    rows = []
    for way, make in ways.items():
        quality = held_out.quality(stage.models.to_ask(make()), states)
        kl = quality.kl.value if quality.kl else math.nan
        log.info("%s: perplexity %.3f, KL %.5f to base with adapter", way, quality.perplexity, kl)
        rows.append(MergedQuality(**vars(quality), way=way))
    return rows


def _merge_checks(merges: list[MergedQuality], config: Qlora) -> list[Check]:
    """What stands between a merged model and its publication."""
    published = [row for row in merges if row.way == config.publish != "adapter"]
    return [check_bound("max_merge_kl", quality.kl, config.max_merge_kl) for quality in published]


def _quantized_size(model: Transformer) -> QuantizedSize | None:
    """Bytes of the quantized weights, and bits for each; None without any."""
    weights, stored = quantized_size(model)
    return QuantizedSize(weights, stored, 8 * stored / weights) if weights else None


def _write_adapter(model: Transformer, adapter: LoraConfig, base: Path, tokenizer: Tokenizer, folder: Path) -> None:
    """The adapter for peft, and below it the base that it needs."""
    save_adapter(model, folder, adapter, base=BASE_NAME)
    tokenizer.save(folder)
    _link_files(base, folder / BASE_NAME, leave_out=(MANIFEST_NAME,))
    # Its own one holds a time, with which the same training would give another digest whenever it is done.
    write_text(folder / BASE_NAME / MANIFEST_NAME, open_artifact(base, verify=False).repeatable().to_json())
    _link_or_copy(base / GENERATION_NAME, folder / GENERATION_NAME)


def _link_files(source: Path, target: Path, leave_out: tuple[str, ...] = ()) -> None:
    """All files of an artifact under another name, without a second copy on the disk where that is possible."""
    shutil.copytree(
        source, target, copy_function=_link_or_copy, ignore=shutil.ignore_patterns(*leave_out), dirs_exist_ok=True
    )


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
