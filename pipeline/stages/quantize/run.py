"""Stage `quantize`: weights rounded layer by layer on calibration text, then taught by the model they were made of.

    calibrate and round → measure → recover → measure

Each finished layer is kept in rounded/METHOD/, so that a stage that was interrupted goes on behind it.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.mod import calibrate, set_thresholds
from compress.quantize.cache import calibrated_cache_scales
from compress.quantize.calibrated import QuantizedLayerReport, quantize_layers
from compress.quantize.methods import METHODS
from compress.quantize.qat import RANK, quantized_copy, to_quantized, train_through_rounding
from compress.quantize.round_to_nearest import QuantizationError, UnevenRowsError, formats_of_layers
from compress.quantize.sensitivity import choose_formats, rounding_costs
from compress.residual_stream import layers_of
from model.collectives import ALONE, Group
from model.config import ModelConfig
from model.cost import quantized_size
from model.files.cache_scales import with_cache_scheme
from model.files.checkpoint import dense_sources, open_layerwise, tensor_shapes
from model.formats.base import IntegerFormat, WeightFormat
from model.formats.registry import DEFAULT_FINER, format_named
from model.layers import DecoderLayer
from model.lazy import LazyModel, passing
from model.mesh import choose_device, choose_dtype
from model.quantized import quantized_layers, set_quantized
from model.training_memory import Rounding, Setup
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.measure.quality import PUBLISHED_DTYPE
from pipeline.results import Quality, Result
from pipeline.stages.quantize.config import Quantize
from pipeline.stages.quantize.layers import layer_file, layer_files, layer_report, load_layer, save_layer
from pipeline.stages.quantize.report import LayerCost, ProjectionError, QuantizeDetails, Rounded
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.training import RecoveryStage, check_dense
from train.loop import TrainingResult
from train.packing import Batch, calibration_batches
from train.progress import Progress

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)

ROUNDED_NAME, COSTS_NAME = "rounded", "costs.json"
COST_TOKENS = 2_048
"""Of text: enough to tell which layers rounding costs most."""
LEAST_GROUP = 8
"""Smaller ones of four bits, with a scale in fp32 each, take more memory than rows of eight bits."""


class QuantizeStage(RecoveryStage[Quantize]):
    """Rounded weights and the dense model that teaches them."""

    changed: int | None = None
    """Of how many projections recovery has changed levels or scales, once it has run."""

    @property
    def kv_cache_dtype(self) -> str:  # type: ignore[override]
        """The recipe's."""
        return self.config.kv_cache_dtype

    def published_form(self, model: Transformer) -> Transformer:
        """A copy with levels and scales as files will hold them, the rest rounded to bf16."""
        dtype = choose_dtype("auto", choose_device())

        def rounded(part: M) -> M:
            return quantized_copy(part).to(PUBLISHED_DTYPE).to(dtype).requires_grad_(False)

        return rounded(model) if self.mesh.is_whole else self.models.to_ask(model, rounded)

    def remedy(self) -> str:
        """The opposite where steps were too short for any level or scale: then it is not their length that harms."""
        if self.changed != 0:
            return super().remedy()
        return f"a higher learning_rate than {self.config.learning_rate:g} or more tokens may help"

    def dense(self) -> LazyModel:
        """The parent in fp32."""
        return LazyModel.of_folder(self.context.model(self.config.model), device=choose_device())

    def layerwise(self, device: torch.device | None = None) -> tuple[Transformer, Callable[[int], None]]:
        """The parent in fp32 without its layers, embeddings and head as they will stay; and what loads a layer.

        `device`: by default this process's.
        """
        model, load_layer = open_layerwise(self.context.model(self.config.model), device=device or choose_device())
        for name, format in self.formats.items():
            if not name.endswith("_proj"):  # no method sees them
                weight = model.get_parameter(f"{name}.weight").detach().to(PUBLISHED_DTYPE)
                set_quantized(model, name, format.quantize(weight), format)
        return model, load_layer

    def calibration_text(self, tokens: int) -> Sequence[Batch]:
        """Training text whose inputs to each layer decide how its weights are rounded."""
        return calibration_batches(self.data.train, sequence_length=self.sequence_length, max_tokens=tokens)

    def rounded_folder(self, method: str) -> Path:
        """Where the layers that a method has rounded are kept."""
        return self.context.folder / ROUNDED_NAME / method

    @cached_property
    def formats(self) -> dict[str, WeightFormat[Any]]:
        """Of each layer that is quantized, by its name in the model."""
        return _formats(self.config, self.teacher.config, self._enlarged())

    def _enlarged(self) -> dict[str, WeightFormat[Any] | None]:
        """The layers that get the larger format."""
        return {cost.name: _larger(self.config) for cost in self.costs if cost.enlarged}

    @cached_property
    def costs(self) -> list[LayerCost]:
        """What rounding costs, layer by layer, where a budget is spent by it; all processes ask for it together."""
        bits = self.config.average_bits
        if bits is None:
            return []
        path = self.context.folder / COSTS_NAME
        return self.context.measured(path, list[LayerCost], lambda: _layer_costs(self, bits))


@dataclass(frozen=True)
class Start:
    """What is known before recovery."""

    parent: Quality
    rounded: list[Rounded]
    """By each method, the one of the result first."""


def run(context: StageContext) -> Result[QuantizeDetails] | None:
    """Trains and measures in all processes; the main one publishes, and returns the result."""
    config: Quantize = context.stage.config
    check_dense(context, config.model)
    stage = QuantizeStage(context, config.model)
    start = context.start(Start, partial(_measure_start, stage))
    student = _student(stage)
    training = _recover(stage, student)
    if config.has_static_cache and context.processes.is_main:
        text = stage.calibration_text(config.calibration_tokens)
        stage.cache_scales = calibrated_cache_scales(stage.published_form(student), text)
    if training.steps and context.processes.is_main:
        _tell_changes(stage, student)
    details = partial(_details, stage, student, start)
    measured = start.parent, start.rounded[0].quality
    return stage.finish_student(student, config.model, measured=measured, training=training, details=details)


def setup(config: Quantize, shapes: Mapping[str, ModelConfig]) -> Setup | None:
    """What its recovery holds in memory; without one there is nothing to plan.

    Layers that a budget of bits would give more count as the others: which they are is found on text.
    """
    if not config.tokens:
        return None
    shape = shapes[config.model]
    return Setup(shape, config, teacher=shape, rounding=Rounding(config.train, _formats(config, shape, {}), RANK))


def shape(config: Quantize, shapes: Mapping[str, ModelConfig], cache: Path) -> ModelConfig:
    """Its parent's. Raises UserError for layers that their formats cannot hold."""
    parent = shapes[config.model]
    _formats(config, parent, {})
    return parent


def formats(config: Quantize, shapes: Mapping[str, ModelConfig], cache: Path) -> dict[str, WeightFormat[Any]]:
    """Where a budget of bits gives some layers more, of as many bytes as on any text, though not of the same layers."""
    shape = shapes[config.model]
    return _formats(config, shape, _enlarged_somewhere(config, shape))


# --- formats ---------------------------------------------------------------------------------------------------------


def _formats(
    config: Quantize, shape: ModelConfig, enlarged: Mapping[str, WeightFormat[Any] | None]
) -> dict[str, WeightFormat[Any]]:
    """Of each layer that is quantized, by its name; `enlarged` before what the recipe says of all layers."""
    _check_method(config, shape)
    ends = ["embed_tokens"] if shape.tie_word_embeddings else ["embed_tokens", "lm_head"]
    try:
        weights: Any = format_named(config.weights.format, **config.weights.options())
        named = {p: weights if n == config.weights.format else format_named(n) for p, n in config.layers.items()}
        overrides = dict.fromkeys(ends, format_named(config.embeddings)) | dict(enlarged) | named
        formats = formats_of_layers(shape, weights, overrides)
        for one in list(formats.values())[:1]:  # raises for what one folder cannot hold
            entry = one.entry_of_layers(formats, PUBLISHED_DTYPE, ())
            with_cache_scheme(entry, [(torch.ones(1), torch.ones(1))] if config.has_static_cache else [])
        return formats
    except UnevenRowsError as error:
        raise UserError(f"quantize: {error} Set {_fitting(config, error)}.") from None
    except ValueError as error:
        raise UserError(f"quantize: {error}") from None


def _fitting(config: Quantize, error: UnevenRowsError) -> str:
    """Settings with which the rows of all layers of the format divide; the finer one has a scale a row."""
    format, rows = error.format, error.rows
    if error.layer.endswith(("embed_tokens", "lm_head")):
        return f"embeddings: {DEFAULT_FINER}"
    if format.name != config.weights.format:
        pattern = next((pattern for pattern, name in config.layers.items() if name == format.name), None)
        return f"larger: {DEFAULT_FINER}" if pattern is None else f'layers: {{"{pattern}": {DEFAULT_FINER}}}'
    if not isinstance(format, IntegerFormat):
        return f"weights: {{format: {DEFAULT_FINER}}}"
    settings = []
    if (group := format.dividing_group(*rows)) != format.group:
        enough = group is None or group >= LEAST_GROUP
        settings.append(f"weights.group: {group}" if enough else f"weights: {{format: {DEFAULT_FINER}}}")
    if format.rounding and math.gcd(*rows) % (format.rounding.group or 1):
        settings.append("weights.activations: false")
    return " and ".join(settings)


def _check_method(config: Quantize, shape: ModelConfig) -> None:
    scaled = [method for method in (config.method, *config.compare) if METHODS[method].scaling != "none"]
    if scaled and (shape.kind.joins_projections or not shape.kind.has_norms_before or shape.experts):
        why = "have routers that read the norms too" if shape.experts else "do not have them apart"
        raise UserError(
            f"quantize: {scaled[0]} divides norms and projections by its scales, but layers of the family "
            f"{shape.family} {why}; gptq, autoround, weighted and round divide nothing."
        )


def _larger(config: Quantize) -> WeightFormat[Any]:
    """Of layers that need more bits; integers round activations as those of the other layers do."""
    format: Any = format_named(config.larger)
    weights: Any = format_named(config.weights.format, **config.weights.options())
    return replace(format, rounding=weights.rounding) if isinstance(format, IntegerFormat) else format


def _enlarged_somewhere(config: Quantize, shape: ModelConfig) -> dict[str, WeightFormat[Any] | None]:
    """Layers that would get the larger format if rounding any weight cost the same."""
    if config.average_bits is None:
        return {}
    small, large = _candidates(config)
    sizes = tensor_shapes(shape)
    shapes = {
        name: (sizes[f"{name}.weight"][0], sizes[f"{name}.weight"][1]) for name in formats_of_layers(shape, small)
    }
    costs = {name: {small: float(rows * columns), large: 0.0} for name, (rows, columns) in shapes.items()}
    try:
        chosen = choose_formats(costs, shapes, config.average_bits)
    except ValueError as error:
        raise UserError(f"quantize: {error}") from None
    return {name: large for name, format in chosen.items() if format == large}


def _candidates(config: Quantize) -> tuple[WeightFormat[Any], WeightFormat[Any]]:
    """What a budget of bits chooses from for each layer."""
    small: Any = format_named(config.weights.format, **config.weights.options())
    try:
        return small, _larger(config)
    except ValueError as error:
        raise UserError(f"quantize: larger: {error}") from None


def _layer_costs(stage: QuantizeStage, average_bits: float) -> list[LayerCost]:
    """Of each layer; as many as the budget lets have more bits get them, those whose rounding would cost most."""
    config = stage.config
    small, large = _candidates(config)
    text, group = stage.calibration_text(min(config.calibration_tokens, COST_TOKENS)), stage.context.processes.group
    dense = stage.models.to_calibrate(stage.dense())
    log.info("asking what each layer's rounding would cost, on %s tokens", f"{sum(len(b.tokens) for b in text):,}")
    costs = rounding_costs(dense, text[group.index :: group.count], [small, large], group)
    weights = {name: dense.get_parameter(f"{name}.weight") for name in costs}
    shapes = {name: (len(w), w.shape[1]) for name, w in weights.items()}
    try:
        chosen = choose_formats(costs, shapes, average_bits)
    except ValueError as error:
        raise UserError(f"quantize: {error}") from None
    return [LayerCost(name, costs[name][small], format == large) for name, format in chosen.items()]


# --- rounding --------------------------------------------------------------------------------------------------------


def _measure_start(stage: QuantizeStage) -> Start:
    methods = dict.fromkeys([stage.config.method, *stage.config.compare])
    return Start(stage.held_out.quality_of(stage.reference), [_measured(stage, method) for method in methods])


def _measured(stage: QuantizeStage, method: str) -> Rounded:
    _round(stage, method)
    quality = stage.held_out.quality(_as_published(stage, method), stage.reference)
    log.info("%s: perplexity %.3f, KL %.4f", method, quality.perplexity, quality.kl.value if quality.kl else 0.0)
    return Rounded(method, quality, sum(report.seconds for report in _reports(stage, method)))


def _round(stage: QuantizeStage, method: str) -> None:
    """Has each layer's rounded weights written, but those that lie there already.

    The text is dealt to all processes, unless rounding is learned; the others read what the main one has written.
    """
    processes, formats = stage.context.processes, stage.formats  # which all ask for together
    found = processes.agree(len(layer_files(stage.rounded_folder(method))))
    is_dealt = METHODS[method].rounding != "learned"
    if found < stage.teacher.config.num_layers and (is_dealt or processes.is_main):
        _round_from(stage, method, found, formats, processes.group if is_dealt else ALONE)
    processes.wait()


def _round_from(
    stage: QuantizeStage, method: str, found: int, formats: Mapping[str, WeightFormat[Any]], group: Group
) -> None:
    """The same where so many layers are there already, by the processes of a group, each of which has one at a time."""
    folder, is_main = stage.rounded_folder(method), group.index == 0
    (model, load_dense), text = stage.layerwise(), stage.calibration_text(stage.config.calibration_tokens)
    log.info("rounding by %s on %s tokens", method, f"{sum(len(batch.tokens) for batch in text):,}")
    total = model.config.num_layers
    with Progress(f"rounding by {method}", total, done=found, enabled=is_main) as progress:

        def load_next(number: int) -> None:
            if number:
                layers_of(model)[number - 1].to_empty(device="meta")
            load_dense(number)

        def restore(number: int) -> bool:
            if number < found:
                load_layer(model, layer_file(folder, number), formats)
            return number < found

        def keep(report: QuantizedLayerReport) -> None:
            if is_main:
                save_layer(model, report, folder)
            progress.advance(1, f"layer {report.number + 1} of {total}")

        chosen = replace(METHODS[method], iterations=stage.config.iterations, scale_dtype=PUBLISHED_DTYPE)
        try:
            quantize_layers(
                model,
                text[group.index :: group.count],
                formats.get,
                chosen,
                group=group,
                load_layer=load_next,
                restore=restore,
                on_layer=keep,
            )
        except QuantizationError as error:
            raise UserError(f"quantize: {error}") from None


def _reports(stage: QuantizeStage, method: str) -> list[QuantizedLayerReport]:
    """What is said of each layer that the method has rounded."""
    return [layer_report(path) for path in layer_files(stage.rounded_folder(method))]


def _opened(
    stage: QuantizeStage, method: str, device: torch.device | None = None
) -> tuple[Transformer, Callable[[int], None]]:
    """The model in fp32 without its layers, and what gives it a rounded one."""
    model, _ = stage.layerwise(device)
    paths = layer_files(stage.rounded_folder(method))
    return model, lambda number: load_layer(model, paths[number], stage.formats)


def _rounded(stage: QuantizeStage, method: str, device: torch.device | None = None) -> Transformer:
    """The model in fp32 with all its rounded layers."""
    model, load = _opened(stage, method, device)
    for number in range(model.config.num_layers):
        load(number)
    _calibrate_routers(stage, model, lambda: stage.models.to_ask(model))
    return model


def _as_published(stage: QuantizeStage, method: str) -> Transformer:
    """The same in the form that is measured; in shards, of all processes."""
    if stage.mesh.is_whole:
        return stage.published_form(_rounded(stage, method))
    model, load = _opened(stage, method)
    _calibrate_routers(stage, model, lambda: passing(*_opened(stage, method)))
    dtype = choose_dtype("auto", model.device)

    def load_published(number: int) -> None:
        load(number)
        layers_of(model)[number].to(PUBLISHED_DTYPE).to(dtype)

    return stage.models.in_shards(model.to(PUBLISHED_DTYPE).to(dtype), load_published)


def _student(stage: QuantizeStage) -> Transformer:
    """The one to be trained and published.

    In shards no process has its layers, but the main one, in host memory, where it is not trained.
    """
    config, method = stage.config, stage.config.method
    if not config.tokens and not stage.has_trained:
        return _opened(stage, method)[0]
    if not config.tokens:
        return _rounded(stage, method, None if stage.mesh.is_whole else torch.device("cpu"))
    how: Any = {"dense": _before_rounding(stage), "scale_dtype": PUBLISHED_DTYPE, "seed": config.seed}
    if stage.mesh.is_whole:
        return train_through_rounding(_rounded(stage, method), config.train, **how)
    model, load = _opened(stage, method)
    _calibrate_routers(stage, model, lambda: passing(*_opened(stage, method)))
    return train_through_rounding(model, config.train, load_layer=load, **how)


def _calibrate_routers(stage: QuantizeStage, model: Transformer, opened: Callable[[], Transformer]) -> None:
    """Sets anew the thresholds of routers, whose scores rounding has changed; `opened`: the model, to be asked."""
    if model.config.mixture_of_depths is None:
        return
    calibrate(asked := opened(), stage.training_text())
    mixture = asked.config.mixture_of_depths
    set_thresholds(model, mixture.thresholds if mixture else ())


# --- recovery --------------------------------------------------------------------------------------------------------


def _recover(stage: QuantizeStage, student: Transformer) -> TrainingResult:
    """Trains what the recipe says, and leaves the student quantized."""
    if not stage.config.tokens:
        return TrainingResult(0, 0, 0.0, {}, interrupted=False, skipped=0)
    training = stage.train(student)
    if stage.has_trained:
        to_quantized(student)
    return training


def _tell_changes(stage: QuantizeStage, student: Transformer) -> None:
    """Of a recovery, which may have been too short to change any number that files hold."""
    paths = layer_files(stage.rounded_folder(stage.config.method))
    stage.changed = sum(
        _changed_projections(layer, path) for layer, path in zip(layers_of(student), paths, strict=True)
    )
    total = sum(len(quantized_layers(layer)) for layer in layers_of(student))
    log.info("recovery has changed levels or scales of %d of %d projections", stage.changed, total)
    if not stage.changed:
        log.warning("recovery has changed no level and no scale of %s: %s", stage.config.out, stage.remedy())


def _changed_projections(layer: DecoderLayer, path: Path) -> int:
    """How many are not as they were rounded, in the file `path`."""
    rounded, changed = load_file(path), 0
    for name, quantized in quantized_layers(layer).items():
        tensors = quantized.format.to_files(name, quantized.weight, PUBLISHED_DTYPE)
        changed += not all(torch.equal(tensor.cpu(), rounded[part]) for part, tensor in tensors.items())
    return changed


def _before_rounding(stage: QuantizeStage) -> Callable[[str], Tensor] | None:
    """What reads a weight of the parent, where weights are trained that begin at its own."""
    if stage.config.train == "scales" or METHODS[stage.config.method].scaling != "none":
        return None
    sources = dense_sources(stage.context.model(stage.config.model))
    return lambda name: sources[name]()


def _details(stage: QuantizeStage, student: Transformer, start: Start) -> QuantizeDetails:
    weights, stored = quantized_size(student)
    formats = {name: layer.format.title for name, layer in quantized_layers(student).items()}
    sizes = Counter[str]()
    for layer in quantized_layers(student).values():
        sizes[layer.format.title] += math.prod(layer.shape)
    reports = _reports(stage, stage.config.method)
    errors = {name: error for report in reports for name, error in report.errors.items()}
    return QuantizeDetails(
        method=stage.config.method,
        format=" and ".join(title for title, _ in sizes.most_common()),
        bits_per_weight=8 * stored / weights,
        compared=start.rounded,
        errors=[ProjectionError(name, formats[name], error) for name, error in errors.items()],
        costs=stage.costs,
        train=stage.config.train,
        kv_cache=stage.config.kv_cache,
    )
