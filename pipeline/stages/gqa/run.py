"""Stage `gqa`: a model with fewer KV heads, converted on calibration text, recovered towards its parent.

    calibrate, layer by layer → convert → refit → measure → compare methods → train → decode speed at long context

Each layer's plans are kept as soon as they are made (plans/), and each method's refitted projections (refitted/); a
stage that was interrupted goes on after the last of them.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compress.gqa import (
    GroupingError,
    LayerPlan,
    Method,
    check_convertible,
    group_kv_heads,
    head_moments,
    num_units,
    plan_layer,
)
from compress.lora import inject, merge
from compress.refit import refit_outputs
from model.config import ModelConfig
from model.cost import Setup, cached_sequences
from model.files.checkpoint import load_config, load_model
from model.lora import LoraConfig
from model.mesh import choose_device
from model.routed import routed_layers
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.measure.quality import PUBLISHED_DTYPE
from pipeline.measure.speed import measure_decoding, prompts_from
from pipeline.report.speeds import Decoded
from pipeline.results import Quality, Result, write_atomically
from pipeline.stages.gqa.config import Gqa
from pipeline.stages.gqa.report import Capacity, Compared, GqaDetails
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.training import (
    Teacher,
    check_dense,
    curve_of,
    finish,
    held_out_text,
    published_form,
    train,
    training_text,
    write_model,
)
from train.objectives import objective_of

if TYPE_CHECKING:
    from train.data import PreparedData

log = logging.getLogger(__name__)

Measure = Callable[[Transformer], Quality]

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
    """Trains in all processes; the main one measures, publishes, and returns the result."""
    config: Gqa = context.stage.config
    source = context.inputs[config.model].folder
    check_dense(context, config.model)
    _check(load_config(source), config)
    data = context.data(config.data, Tokenizer.load(source))
    parent = load_model(source, dtype=PUBLISHED_DTYPE, device=choose_device())
    start, uptrained = _compare(context, data, parent)
    student = _trainable(context, config.method)
    objective, curve = objective_of(config.loss, parent), curve_of(context, data, parent)
    training = train(context, data, student, objective, curve=curve)
    if not context.processes.is_main:
        return None
    if config.train == "adapters":
        student = merge(student, dtype=torch.float32)
    details = GqaDetails(
        method=config.method,
        groups=[plan.groups for plan in _load_plans(context, config.method)],
        compared=[Compared(method, start.converted[method], quality) for method, quality in uptrained.items()],
        capacity=_capacity(parent.config, config),
    )
    result = finish(
        context,
        data,
        partial(write_model, student, Tokenizer.load(source)),
        training=training,
        details=details,
        teacher=Teacher(config.model, parent, start.parent, start.converted[config.method]),
    )
    return _with_decoding(context, data, result) if result.output else result


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
    if model.mixture_of_depths is not None and any(method.endswith(REFIT) for method in _methods(config)):
        raise UserError(f"gqa: {config.model} has routers; {REFIT} fits only models whose layers every token passes.")


def _methods(config: Gqa) -> list[str]:
    """The method of the result, then those to compare, each once."""
    return list(dict.fromkeys([config.method, *config.compare]))


def _groupings(config: Gqa) -> list[Method]:
    """The same without what follows grouping."""
    return cast("list[Method]", list(dict.fromkeys(method.removesuffix(REFIT) for method in _methods(config))))


# --- conversion ------------------------------------------------------------------------------------------------------


def _calibrate(context: StageContext, data: "PreparedData", parent: Transformer) -> None:
    """Writes the plan of each layer for each method."""
    config: Gqa = context.stage.config
    folder = context.folder / PLANS_NAME
    layers = parent.config.num_layers
    known = next((layer for layer in range(layers) if not _is_planned(_plan_path(folder, layer), config)), layers)
    if known == layers:
        return
    log.info("comparing heads on %s tokens", f"{config.calibration_tokens:,}")
    text = training_text(context, data, config.calibration_tokens)
    kv_heads = config.layer_kv_heads(parent.config.num_layers)
    units = [num_units(parent.config, layer, wanted) for layer, wanted in enumerate(kv_heads)]
    found = head_moments(parent, text, units, skip=known)
    for layer, moments in enumerate(found):
        if moments is None:
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
    _write_tensors(path, tensors)


def _load_plans(context: StageContext, method: str) -> list[LayerPlan]:
    grouping = method.removesuffix(REFIT)
    return [_load_plan(path, grouping) for path in sorted((context.folder / PLANS_NAME).glob("*.safetensors"))]


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


def _converted(context: StageContext, parent: Transformer, method: str) -> Transformer:
    """A new model by one method, in the parent's dtype; what was fitted for it must lie in refitted/."""
    converted = group_kv_heads(parent, _load_plans(context, method))
    if method.endswith(REFIT):
        converted.load_state_dict(load_file(_refitted_path(context, method)), strict=False)
    return converted


def _refit(context: StageContext, data: "PreparedData", parent: Transformer) -> None:
    """Writes the fitted projections of each method that wants them."""
    config: Gqa = context.stage.config
    for method in _methods(config):
        path = _refitted_path(context, method)
        if method.endswith(REFIT) and not path.exists():
            log.info("fitting the output projections of %s", method.removesuffix(REFIT))
            fitted = _converted(context, parent, method.removesuffix(REFIT))
            refit_outputs(fitted, parent, training_text(context, data, config.calibration_tokens))
            weights = {name: weight for name, weight in fitted.state_dict().items() if name.endswith("o_proj.weight")}
            _write_tensors(path, weights)


def _refitted_path(context: StageContext, method: str) -> Path:
    return context.folder / REFITTED_NAME / f"{method}.safetensors"


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    staging = path.with_suffix(".staging")
    save_file(dict(tensors), staging)
    staging.rename(path)


def _trainable(context: StageContext, method: str) -> Transformer:
    """The converted model with what the recipe leaves trainable."""
    config: Gqa = context.stage.config
    student = _converted(context, load_model(context.inputs[config.model].folder), method)
    if config.train == "adapters":
        inject(student, LoraConfig(rank=config.adapter_rank), seed=config.seed)
        for layer in routed_layers(student):
            layer.router.requires_grad_(True)
    return student


# --- measurement -----------------------------------------------------------------------------------------------------


def _compare(context: StageContext, data: "PreparedData", parent: Transformer) -> tuple[Start, dict[str, Quality]]:
    """What is known before training, and by method the quality after the small budget (for the main process)."""
    config: Gqa = context.stage.config
    held_out, states = held_out_text(context, data), None
    if context.processes.is_main:
        _calibrate(context, data, parent)
        _refit(context, data, parent)
        states = held_out.states(parent)
    measure = partial(held_out.quality, reference=states)

    def measure_all() -> Start:
        log.info("measuring the parent and what conversion leaves of it, on %d batches", len(held_out.batches))
        converted = {method: _measure_converted(context, parent, method, measure) for method in _methods(config)}
        return Start(held_out.quality(parent), converted)

    start = context.start(Start, measure_all)
    return start, {method: _uptrain_briefly(context, data, parent, method, measure) for method in config.compare}


def _measure_converted(context: StageContext, parent: Transformer, method: str, measure: Measure) -> Quality:
    quality = measure(_converted(context, parent, method))
    log.info("%s: held-out loss %.3f, KL %.3f", method, quality.nll.value, quality.kl.value if quality.kl else 0.0)
    return quality


def _uptrain_briefly(
    context: StageContext, data: "PreparedData", parent: Transformer, method: str, measure: Measure
) -> Quality:
    """Trains one method's model on the small budget, in all processes; the one that can measure does."""
    config: Gqa = context.stage.config
    folder = context.folder / COMPARED_NAME / method
    kept = folder / "quality.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        log.info("uptraining %s for comparison", method)
        student = _trainable(context, method)
        objective = objective_of(config.loss, parent)
        train(context, data, student, objective, folder=folder, tokens=config.compare_tokens)
        if context.processes.is_main:
            write_atomically(kept, msgspec.json.encode(measure(published_form(context, data, student))))
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        context.processes.wait()
    return msgspec.json.decode(kept.read_bytes(), type=Quality)


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


def _with_decoding(context: StageContext, data: "PreparedData", result: Result[GqaDetails]) -> Result[GqaDetails]:
    """Adds the decoding speeds of parent and result at long context, measured side by side."""
    config: Gqa = context.stage.config
    settings = config.long_context
    prompts = prompts_from(
        held_out_text(context, data).batches,
        count=max(settings.batch_sizes, default=0),
        prompt_tokens=settings.context_tokens,
    )
    log.info("measuring decoding with %s tokens in the cache", f"{settings.context_tokens:,}")
    folders = {config.model: context.inputs[config.model].folder, config.out: context.folder / "model"}
    decoding = Decoded(settings.context_tokens, measure_decoding(folders, prompts, settings))
    return replace(result, details=replace(result.details, decoding=decoding))
