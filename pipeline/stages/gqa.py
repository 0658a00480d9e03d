"""Stage `gqa`: a model with fewer KV heads, converted on calibration text, recovered towards its parent.

    calibrate, layer by layer → convert → measure → compare methods → recovery → decode speed at long context

Each layer's plans are kept as soon as they are made (plans/); a stage that was interrupted goes on at the next layer.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
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
from model.checkpoint import load_config, load_model
from model.config import ModelConfig
from model.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.quality import PUBLISHED_DTYPE, HeldOut
from pipeline.result import Quality, Result, SpeedPoint, write_atomically
from pipeline.schema import Gqa
from pipeline.speed import measure_decoding, prompts_from
from pipeline.stages.context import StageContext
from pipeline.stages.recovery import Beginning, device, finish, held_out_text, published_form, train, training_text

if TYPE_CHECKING:
    from train.data import PreparedData
    from train.evaluate import TeacherStates

log = logging.getLogger(__name__)

START_NAME, PLANS_NAME, COMPARED_NAME = "start.json", "plans", "compared"


@dataclass(frozen=True)
class Start:
    """What is known before the first step of training."""

    parent: Quality
    converted: dict[str, Quality]
    """Right after conversion, by method."""


def run(context: StageContext) -> Result | None:
    """Trains in all processes; the main one measures, publishes, and returns the result."""
    config: Gqa = context.stage.config
    source = context.inputs[config.model].folder
    _check(load_config(source), config)
    data = context.data(config.data, Tokenizer.load(source))
    parent = load_model(source, dtype=PUBLISHED_DTYPE, device=device())
    if context.processes.is_main:
        _calibrate(context, data, parent)
        _measure_start(context, data, parent)
    context.processes.wait()
    start = msgspec.json.decode((context.folder / START_NAME).read_bytes(), type=Start)
    compared = {method: _uptrain_briefly(context, data, parent, method) for method in config.compare}
    student = _converted(context, load_model(source), config.method)
    training = train(context, data, parent, student)
    if not context.processes.is_main:
        return None
    beginning = Beginning(config.model, config.model, start.parent, start.converted[config.method])
    details = {
        "method": config.method,
        "groups": [plan.groups for plan in _load_plans(context, config.method)],
        "compared": [
            {"method": method, "converted": asdict(start.converted[method]), "uptrained": asdict(quality)}
            for method, quality in compared.items()
            if quality is not None
        ],
        "capacity": _capacity(parent.config, config),
    }
    result = finish(context, data, parent, student, beginning=beginning, training=training, details=details)
    return _with_decoding(context, data, result) if result.output else result


def _check(model: ModelConfig, config: Gqa) -> None:
    try:
        for method in _methods(config):
            check_convertible(model, config.kv_heads, method)
    except GroupingError as error:
        raise UserError(f"gqa: {error}") from None


def _methods(config: Gqa) -> list[Method]:
    """The method of the result, then those to compare, each once."""
    return cast("list[Method]", list(dict.fromkeys([config.method, *config.compare])))


# --- conversion ------------------------------------------------------------------------------------------------------


def _calibrate(context: StageContext, data: "PreparedData", parent: Transformer) -> None:
    """Writes the plan of each layer for each method."""
    config: Gqa = context.stage.config
    folder = context.folder / PLANS_NAME
    folder.mkdir(exist_ok=True)
    layers = parent.config.num_layers
    known = next((layer for layer in range(layers) if not _plan_path(folder, layer).exists()), layers)
    if known == layers:
        return
    log.info("comparing heads on %s tokens", f"{config.calibration_tokens:,}")
    text = training_text(context, data, config.calibration_tokens)
    found = head_moments(parent, text, num_units(parent.config, config.kv_heads), skip=known)
    for layer, moments in enumerate(found):
        if moments is None:
            continue
        plans = {method: plan_layer(method, config.kv_heads, moments) for method in _methods(config)}
        _save_plans(_plan_path(folder, layer), plans)
        if (layer + 1) % 10 == 0 or layer + 1 == layers:
            log.info("planned %d of %d layers", layer + 1, layers)


def _plan_path(folder: Path, layer: int) -> Path:
    return folder / f"{layer:04d}.safetensors"


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
    staging = path.with_suffix(".staging")
    save_file(tensors, staging)
    staging.rename(path)


def _load_plans(context: StageContext, method: str) -> list[LayerPlan]:
    return [_load_plan(path, method) for path in sorted((context.folder / PLANS_NAME).glob("*.safetensors"))]


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
    return group_kv_heads(parent, context.stage.config.kv_heads, _load_plans(context, method))


# --- measurement -----------------------------------------------------------------------------------------------------


def _measure_start(context: StageContext, data: "PreparedData", parent: Transformer) -> None:
    config: Gqa = context.stage.config
    if (context.folder / START_NAME).exists():
        return
    held_out = held_out_text(context, data)
    states = held_out.states(parent)
    log.info("measuring the parent and what conversion leaves of it, on %d batches", len(held_out.batches))
    start = Start(
        parent=held_out.quality(parent),
        converted={
            method: _measure_converted(context, parent, method, held_out, states) for method in _methods(config)
        },
    )
    write_atomically(context.folder / START_NAME, msgspec.json.encode(start))


def _measure_converted(
    context: StageContext, parent: Transformer, method: str, held_out: HeldOut, states: "TeacherStates"
) -> Quality:
    quality = held_out.quality(_converted(context, parent, method), states)
    log.info("%s: held-out loss %.3f, KL %.3f", method, quality.nll.value, quality.kl.value if quality.kl else 0.0)
    return quality


def _uptrain_briefly(context: StageContext, data: "PreparedData", parent: Transformer, method: str) -> Quality | None:
    """The quality of one method's model after the small budget; None in processes other than the main one."""
    config: Gqa = context.stage.config
    folder = context.folder / COMPARED_NAME / method
    kept = folder / "quality.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        log.info("uptraining %s for comparison", method)
        student = _converted(context, load_model(context.inputs[config.model].folder), method)
        train(context, data, parent, student, folder=folder, tokens=config.compare_tokens)
        if context.processes.is_main:
            held_out = held_out_text(context, data)
            quality = held_out.quality(published_form(context, data, student), held_out.states(parent))
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            write_atomically(kept, msgspec.json.encode(quality))
        context.processes.wait()
    return msgspec.json.decode(kept.read_bytes(), type=Quality) if context.processes.is_main else None


def _capacity(parent: ModelConfig, config: Gqa) -> dict[str, Any]:
    """Sequences whose keys and values fit the memory, before and after."""
    settings, itemsize = config.long_context, PUBLISHED_DTYPE.itemsize
    tokens = settings.context_tokens + settings.new_tokens
    after = replace(parent, num_kv_heads=config.kv_heads)
    return {
        "cache_gib": settings.cache_gib,
        "tokens": tokens,
        "sequences": [
            int(settings.cache_gib * 2**30 // (tokens * shape.kv_bytes_per_token(itemsize)))
            for shape in (parent, after)
        ],
    }


def _with_decoding(context: StageContext, data: "PreparedData", result: Result) -> Result:
    """Adds the decoding speeds of parent and result at long context, measured one after the other."""
    config: Gqa = context.stage.config
    settings = config.long_context
    prompts = prompts_from(
        held_out_text(context, data).batches,
        count=max(settings.batch_sizes, default=0),
        prompt_tokens=settings.context_tokens,
    )
    log.info("measuring decoding with %s tokens in the cache", f"{settings.context_tokens:,}")
    speeds: dict[str, Sequence[SpeedPoint]] = {
        name: measure_decoding(str(folder), prompts, settings)
        for name, folder in (
            (config.model, context.inputs[config.model].folder),
            (config.out, context.folder / "model"),
        )
    }
    decoding = {
        "context_tokens": settings.context_tokens,
        "tokens_per_s": {
            name: {str(point.batch_size): point.tokens_per_s for point in points} for name, points in speeds.items()
        },
    }
    return replace(result, details={**result.details, "decoding": decoding})
