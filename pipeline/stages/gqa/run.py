"""Stage `gqa`: a model with fewer KV heads, converted on calibration text, recovered towards its parent.

    calibrate, layer by layer → convert → refit → measure → compare methods → train → decode speed at long context

Each layer's plans are kept as soon as they are made (plans/), and each method's refitted projections (refitted/); a
stage that was interrupted goes on after the last of them.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from compress.gqa import (
    GroupingError,
    LayerPlan,
    Method,
    check_convertible,
    grouped,
    head_moments,
    num_units,
    plan_layer,
)
from compress.lora import merge
from compress.refit import refit_outputs
from model.config import ModelConfig
from model.cost import cached_sequences
from model.files.checkpoint import load_config
from model.lazy import LazyModel
from model.lora import LoraConfig
from model.training_memory import Setup
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.measure.quality import PUBLISHED_DTYPE
from pipeline.measure.shortage import unless_short
from pipeline.measure.speed import measure_decoding
from pipeline.report.speeds import Decoded
from pipeline.results import Quality, Result
from pipeline.stages.gqa.config import Gqa
from pipeline.stages.gqa.report import Capacity, Compared, GqaDetails
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.training import RecoveryStage, check_dense, leave_trainable, write_tensors

log = logging.getLogger(__name__)

GqaStage = RecoveryStage[Gqa]

PLANS_NAME, REFITTED_NAME, COMPARED_NAME = "plans", "refitted", "compared"
REFIT = "+refit"
"""What follows a method's name in a recipe when the output projections are fitted again after it."""


@dataclass(frozen=True)
class Start:
    """What is known before the first step of training."""

    parent: Quality
    converted: dict[str, Quality]
    """Right after conversion, by method."""


def run(context: StageContext) -> Result[GqaDetails] | None:
    """Trains and measures in all processes; the main one publishes, and returns the result."""
    config: Gqa = context.stage.config
    check_dense(context, config.model)
    _check(load_config(context.model(config.model)), config)
    stage = GqaStage(context, config.model)
    start, uptrained = _compare(stage)
    student = _trainable(stage, config.method)
    training = stage.train(student)
    if config.train == "adapters" and context.processes.is_main:
        student = merge(student, dtype=torch.float32)

    def details() -> GqaDetails:
        return GqaDetails(
            method=config.method,
            groups=[plan.groups for plan in _load_plans(stage, config.method)],
            compared=[Compared(method, start.converted[method], quality) for method, quality in uptrained.items()],
            capacity=_capacity(load_config(context.model(config.model)), config),
        )

    measured = start.parent, start.converted[config.method]
    result = stage.finish_student(student, config.model, measured=measured, training=training, details=details)
    return _with_decoding(stage, result) if result and result.output else result


def setup(config: Gqa, shapes: Mapping[str, ModelConfig]) -> Setup:
    """What its training holds in memory."""
    parent = shapes[config.model]
    narrow = parent.with_kv_heads(config.layer_kv_heads(parent.num_layers))
    adapter = LoraConfig(rank=config.adapter_rank) if config.train == "adapters" else None
    return Setup(narrow, config, teacher=parent, adapter=adapter, fp32_base=True)


def _check(model: ModelConfig, config: Gqa) -> None:
    try:
        for method in _groupings(config):
            check_convertible(model, config.layer_kv_heads(model.num_layers), method)
    except GroupingError as error:
        raise UserError(f"gqa: {error}") from None
    if not model.kind.has_norms_before_alone and any(method.endswith(REFIT) for method in _methods(config)):
        raise UserError(f"gqa: {model.family} norms what attention adds, so no projection can be fitted; omit {REFIT}.")
    if model.mixture_of_depths is not None and any(method.endswith(REFIT) for method in _methods(config)):
        raise UserError(f"gqa: {config.model} has routers; {REFIT} fits only models whose layers every token passes.")


def _methods(config: Gqa) -> list[str]:
    """The method of the result, then those to compare, each once."""
    return list(dict.fromkeys([config.method, *config.compare]))


def _groupings(config: Gqa) -> list[Method]:
    """The same without what follows grouping."""
    return cast("list[Method]", list(dict.fromkeys(method.removesuffix(REFIT) for method in _methods(config))))


# --- conversion ------------------------------------------------------------------------------------------------------


def _calibrate(stage: GqaStage) -> None:
    """Has the plan of each layer written for each method; all processes share the text, and the main one writes."""
    config, parent, folder = stage.config, stage.parent, stage.context.folder / PLANS_NAME
    processes, layers = stage.context.processes, parent.config.num_layers
    known = next((layer for layer in range(layers) if not _is_planned(_plan_path(folder, layer), config)), layers)
    if (known := processes.agree(known)) == layers:
        return
    log.info("comparing heads on %s tokens", f"{config.calibration_tokens:,}")
    text = processes.dealt(stage.training_text(config.calibration_tokens))
    kv_heads = config.layer_kv_heads(layers)
    units = [num_units(parent.config, layer, wanted) for layer, wanted in enumerate(kv_heads)]
    found = head_moments(parent, text, units, skip=known, group=processes.group)
    for layer, moments in enumerate(found):
        if moments is None or not processes.is_main:
            continue
        plans = {method: plan_layer(method, kv_heads[layer], moments) for method in _groupings(config)}
        _save_plans(_plan_path(folder, layer), plans)
        if (layer + 1) % 10 == 0 or layer + 1 == layers:
            log.info("planned %d of %d layers", layer + 1, layers)


def _plan_path(folder: Path, layer: int) -> Path:
    return folder / f"{layer:04d}.safetensors"


def _is_planned(path: Path, config: Gqa) -> bool:
    """Whether the file is there and knows every method; one to compare may have come later."""
    if not path.exists():
        return False
    with safe_open(path, framework="pt") as file:
        return {f"{method}.groups" for method in _groupings(config)} <= set(file.keys())


def _save_plans(path: Path, plans: Mapping[Method, LayerPlan]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for method, plan in plans.items():
        parts = asdict(plan) | {
            "groups": torch.tensor(plan.groups),
            "restore_norm": torch.tensor(plan.restore_norm),
            "key_in": torch.view_as_real(plan.key_in),
            "key_out": torch.view_as_real(plan.key_out),
        }
        tensors |= {f"{method}.{name}": part.contiguous() for name, part in parts.items() if part is not None}
    write_tensors(path, tensors)


def _load_plans(stage: GqaStage, method: str) -> list[LayerPlan]:
    grouping = method.removesuffix(REFIT)
    return [_load_plan(path, grouping) for path in sorted((stage.context.folder / PLANS_NAME).glob("*.safetensors"))]


def _load_plan(path: Path, method: str) -> LayerPlan:
    tensors = load_file(path)
    parts = {field.name: tensors.get(f"{method}.{field.name}") for field in fields(LayerPlan)}
    decoded: dict[str, Any] = {
        "groups": tuple(tuple(group) for group in tensors[f"{method}.groups"].tolist()),
        "restore_norm": bool(tensors[f"{method}.restore_norm"]),
        "key_in": torch.view_as_complex(tensors[f"{method}.key_in"]),
        "key_out": torch.view_as_complex(tensors[f"{method}.key_out"]),
    }
    return LayerPlan(**(parts | decoded))


def _converted(stage: GqaStage, parent: LazyModel, method: str) -> LazyModel:
    """The model by one method; what was fitted for it must lie in refitted/."""
    converted = grouped(parent, _load_plans(stage, method))
    return converted.with_weights(load_file(_refitted_path(stage, method))) if method.endswith(REFIT) else converted


def _refit(stage: GqaStage) -> None:
    """Has the fitted projections written of each method that wants them, likewise."""
    processes = stage.context.processes
    text = processes.dealt(stage.training_text(stage.config.calibration_tokens))
    for method in _methods(stage.config):
        path = _refitted_path(stage, method)
        if method.endswith(REFIT) and processes.agree(int(not path.exists())):
            log.info("fitting the output projections of %s", method.removesuffix(REFIT))
            start = _converted(stage, stage.parent_weights, method.removesuffix(REFIT))
            weights = refit_outputs(stage.models.to_calibrate(start), stage.parent, text, processes.group)
            if processes.is_main:
                write_tensors(path, weights)


def _refitted_path(stage: GqaStage, method: str) -> Path:
    return stage.context.folder / REFITTED_NAME / f"{method}.safetensors"


def _trainable(stage: GqaStage, method: str) -> Transformer:
    """The converted model with what the recipe leaves trainable."""
    config = stage.config
    converted = _converted(stage, LazyModel.of_folder(stage.context.model(config.model)), method)
    student = stage.models.to_train(converted)
    leave_trainable(student, config.train, adapter_rank=config.adapter_rank, seed=config.seed)
    return student


# --- measurement -----------------------------------------------------------------------------------------------------


def _compare(stage: GqaStage) -> tuple[Start, dict[str, Quality]]:
    """What is known before training, and by method the quality after the small budget."""
    context, held_out = stage.context, stage.held_out
    _calibrate(stage)
    context.processes.wait()
    _refit(stage)
    context.processes.wait()

    def measure_all() -> Start:
        log.info(
            "measuring the parent and what conversion leaves of it, on %s held-out tokens", f"{held_out.num_tokens:,}"
        )
        converted = {method: _measure_converted(stage, method) for method in _methods(stage.config)}
        return Start(held_out.quality_of(stage.reference), converted)

    start = context.start(Start, measure_all)
    uptrained = {}
    for method in stage.config.compare:
        kept, make = context.folder / COMPARED_NAME / method, partial(_trainable, stage, method)
        uptrained[method] = stage.trained_briefly(kept, make, stage.config.compare_tokens)
    return start, uptrained


def _measure_converted(stage: GqaStage, method: str) -> Quality:
    converted = stage.models.to_measure(_converted(stage, stage.parent_weights, method))
    quality = stage.held_out.quality(converted, stage.reference)
    log.info("%s: held-out loss %.3f, KL %.3f", method, quality.nll.value, quality.kl.value if quality.kl else 0.0)
    return quality


def _capacity(parent: ModelConfig, config: Gqa) -> Capacity:
    """Sequences whose keys and values fit the memory, before and after."""
    settings = config.long_context
    tokens = settings.context_tokens + settings.new_tokens
    after = parent.with_kv_heads(config.layer_kv_heads(parent.num_layers))
    before, now = (
        cached_sequences(shape, PUBLISHED_DTYPE, cache_bytes=settings.cache_gib * 2**30, tokens=tokens)
        for shape in (parent, after)
    )
    return Capacity(settings.cache_gib, tokens, (before, now))


def _with_decoding(stage: GqaStage, result: Result[GqaDetails]) -> Result[GqaDetails]:
    """Adds the decoding speeds of parent and result at long context, measured side by side."""
    settings, folders, prompts = stage.side_by_side(stage.config.long_context)
    log.info("measuring decoding with %s tokens in the cache", f"{settings.context_tokens:,}")
    found, skipped = unless_short("Decoding speed", partial(measure_decoding, folders, prompts, settings))
    if found is None:
        return replace(result, skipped=(*result.skipped, *skipped))
    return replace(result, details=replace(result.details, decoding=Decoded(settings.context_tokens, found)))
