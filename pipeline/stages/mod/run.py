"""Stage `mod`: a model some of whose layers are entered by selected tokens alone, recovered towards its dense parent.

    choose layers → fit routers → measure, beside random routing → train → thresholds → measure, publish → time

What is measured and timed follows the served rule, a threshold on each token's own score.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from compress.lora import merge
from compress.mod import (
    RandomRouting,
    calibrate,
    every_nth,
    least_important,
    measure_selections,
    routed,
    set_thresholds,
)
from compress.token_costs import fit_routers, mean_costs, skipping_costs
from model.config import MixtureOfDepths, ModelConfig
from model.cost import flops_per_token
from model.files.checkpoint import load_config
from model.lazy import LazyModel
from model.lora import LoraConfig
from model.text.tokenizer import Tokenizer
from model.training_memory import Setup
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.measure.shortage import unless_short
from pipeline.measure.speed import BEHIND_A_PROMPT, known_positions, measure_decoding, measure_prefill, repeated
from pipeline.results import Quality, Result
from pipeline.stages.mod.config import Mod
from pipeline.stages.mod.report import AtRandom, Flops, ModDetails, Picture, Speeds
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.training import RecoveryStage, check_dense, leave_trainable, write_tensors
from train.objectives import RoutingConfig

log = logging.getLogger(__name__)

ModStage = RecoveryStage[Mod]

ROUTERS_NAME, CONVERTED_NAME = "routers.safetensors", "converted.json"
PICTURED_TOKENS = 160
"""Of the piece of held-out text that the report shows token by token."""
FLOPS_CONTEXT = 2048
"""Length of the text that operations are counted for."""


@dataclass(frozen=True)
class Converted:
    """What conversion has decided; the routers that it fitted lie beside."""

    layers: tuple[int, ...]
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class Start(Converted):
    """What is known before the first step of training."""

    parent: Quality
    converted: Quality
    """Right after conversion."""
    random: Quality
    """The same with as many tokens selected at random."""


def run(context: StageContext) -> Result[ModDetails] | None:
    """Trains and measures in all processes; the main one publishes, and returns the result."""
    config: Mod = context.stage.config
    check_dense(context, config.model)
    _check(load_config(context.model(config.model)), config)
    stage = ModStage(context, config.model)
    start = context.start(Start, partial(_measure_start, stage))
    converted = _routed(stage, LazyModel.of_folder(context.model(config.model)), start)
    student = stage.models.to_train(converted)
    leave_trainable(student, config.train, adapter_rank=config.adapter_rank, seed=config.seed)
    routing = RoutingConfig(config.capacity, config.anneal_fraction, config.auxiliary_weight)
    training = stage.train(student, routing=routing)
    if config.train == "adapters" and context.processes.is_main:
        student = merge(student, dtype=torch.float32)
        stage.calibrate_routers(student)
    details, measured = partial(_describe, stage, student, start), (start.parent, start.converted)
    result = stage.finish_student(student, config.model, measured=measured, training=training, details=details)
    return _with_speeds(stage, result) if result and result.output else result


def setup(config: Mod, shapes: Mapping[str, ModelConfig]) -> Setup:
    """What its training holds in memory. Layers keep as much as without routers: early every token passes."""
    parent = shapes[config.model]
    adapter = LoraConfig(rank=config.adapter_rank) if config.train == "adapters" else None
    routers = config.least_important or len(named_layers(config, parent.num_layers))
    trained = routers if config.train == "router" else 0
    return Setup(parent, config, teacher=parent, adapter=adapter, routers=trained, fp32_base=True, routed=True)


def shape(config: Mod, shapes: Mapping[str, ModelConfig], cache: Path) -> ModelConfig:
    """What it publishes. Of layers that are chosen by a measurement the number is known."""
    parent = shapes[config.model]
    _check(parent, config)
    layers = named_layers(config, parent.num_layers)
    if config.least_important is not None:
        layers = tuple(range(config.least_important))
    return replace(parent, mixture_of_depths=_mixture(config, layers))


def _check(model: ModelConfig, config: Mod) -> None:
    if model.mixture_of_depths is not None:
        raise UserError(f"mod: {config.model} already has routers; name its dense parent.")
    if not model.kind.has_norms_before_alone:
        raise UserError(
            f"mod: {config.model} is a model of the family {model.family}, which norms what its blocks add."
        )
    asked = max((*config.layers, (config.least_important or 1) - 1))
    if asked >= model.num_layers:
        raise UserError(f"mod: {config.model} has {model.num_layers} layers, 0 to {model.num_layers - 1}.")
    if not config.layers and config.least_important is None and config.every > model.num_layers:
        raise UserError(f"mod: every is {config.every}, but {config.model} has only {model.num_layers} layers.")


# --- conversion ------------------------------------------------------------------------------------------------------


def _convert(stage: ModStage) -> Converted:
    """Chooses the layers and fits the routers; all processes share the text, and the main one keeps these."""
    config, parent, processes = stage.config, stage.parent, stage.context.processes
    text, group = processes.dealt(stage.training_text(config.calibration_tokens)), processes.group
    costs = None
    if config.start == "fitted" or config.least_important is not None:
        log.info("estimating on %s tokens what each one's absence costs", f"{config.calibration_tokens:,}")
        exact = LazyModel.of_folder(stage.context.model(config.model), device=parent.device)
        costs = skipping_costs(stage.models.to_calibrate(exact), text, config.route, group)  # type: ignore[arg-type]
    layers = named_layers(config, parent.config.num_layers)
    if config.least_important is not None and costs is not None:
        layers = least_important(mean_costs(costs, parent.device, group), config.least_important)
    student = routed(stage.parent_weights, _mixture(config, layers))
    if config.start == "fitted" and costs is not None:
        student = student.with_weights(fit_routers(layers, costs, parent.device, group))
    calibrated = stage.models.to_calibrate(student)
    calibrate(calibrated, text, group)
    if processes.is_main:
        routers = {name: make().contiguous() for name, make in student.weights.items() if ".router." in name}
        write_tensors(stage.context.folder / ROUTERS_NAME, routers)
    mixture = calibrated.config.mixture_of_depths
    return Converted(layers, mixture.thresholds if mixture else ())


def _measure_start(stage: ModStage) -> Start:
    """Converts, and measures what is left."""
    converted = stage.context.measured(stage.context.folder / CONVERTED_NAME, Converted, partial(_convert, stage))
    held_out, student = stage.held_out, stage.models.to_measure(_routed(stage, stage.parent_weights, converted))
    log.info("measuring the parent and what conversion leaves of it, on %s held-out tokens", f"{held_out.num_tokens:,}")
    states, capacities = stage.reference, dict.fromkeys(converted.layers, stage.config.capacity)
    return Start(
        **vars(converted),
        parent=held_out.quality_of(states),
        converted=held_out.quality(student, states),
        random=held_out.quality(student, states, routing=partial(RandomRouting, capacities)),
    )


def named_layers(config: Mod, num_layers: int) -> tuple[int, ...]:
    """Those that the recipe names, or every n-th; with `least_important` a measurement chooses instead."""
    return tuple(sorted(set(config.layers))) or every_nth(num_layers, config.every)


def _mixture(config: Mod, layers: tuple[int, ...]) -> MixtureOfDepths:
    return MixtureOfDepths(config.route, layers, config.capacity)  # type: ignore[arg-type]  # the schema says which


def _routed(stage: ModStage, parent: LazyModel, converted: Converted) -> LazyModel:
    """The model with the routers that conversion has left."""
    mixture = replace(_mixture(stage.config, converted.layers), thresholds=converted.thresholds)
    return routed(parent, mixture).with_weights(load_file(stage.context.folder / ROUTERS_NAME))


# --- after training --------------------------------------------------------------------------------------------------


def _describe(stage: ModStage, student: Transformer, start: Start) -> ModDetails:
    """What the report says of the routing of the trained model."""
    config, held_out = stage.config, stage.held_out
    model = stage.published_form(student)
    layers = model.config.mixture_of_depths.layers if model.config.mixture_of_depths else ()
    selected = measure_selections(model, held_out.batches)
    realised = selected.float().mean(1).tolist()
    log.info("layers select %.3f of the tokens, from %.3f to %.3f", _mean(realised), min(realised), max(realised))
    by_layer = dict(zip(layers, realised, strict=True))
    random = held_out.alone.quality(model, routing=partial(RandomRouting, by_layer))
    set_thresholds(model, (0.0,) * len(layers))
    learned = measure_selections(model, held_out.batches).float().mean(1).tolist()
    return ModDetails(
        route=config.route,
        train=config.train,
        layers=layers,
        capacity=config.capacity,
        realised=realised,
        learned=learned,
        flops=Flops(
            context=FLOPS_CONTEXT,
            parent=flops_per_token(replace(model.config, mixture_of_depths=None), FLOPS_CONTEXT),
            target=flops_per_token(model.config, FLOPS_CONTEXT, [config.capacity] * len(layers)),
            executed=flops_per_token(model.config, FLOPS_CONTEXT, realised),
        ),
        random=AtRandom(trained=random, converted=start.random),
        picture=_picture(stage, held_out.batches[0].tokens, selected),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _picture(stage: ModStage, tokens: torch.Tensor, selected: torch.Tensor) -> Picture:
    """The first tokens of the held-out text and, for each routed layer, which of them it selects, as 0 and 1."""
    tokenizer = Tokenizer.load(stage.context.model(stage.config.model))
    shown = tokens[:PICTURED_TOKENS].tolist()
    return Picture(
        tokens=[tokenizer.decode([token]) for token in shown],
        selected=["".join(str(int(chosen)) for chosen in row[: len(shown)]) for row in selected],
    )


def _with_speeds(stage: ModStage, result: Result[ModDetails]) -> Result[ModDetails]:
    """Adds what prefill and decoding of parent and result take, measured side by side in this run."""
    settings, folders, prompts = stage.side_by_side(stage.config.speed)
    prompt_tokens = min(settings.prefill_tokens, known_positions(folders.values()) - BEHIND_A_PROMPT)
    log.info("timing a prompt of %s tokens, and decoding", f"{prompt_tokens:,}")

    def measure() -> Speeds:
        prefill = measure_prefill(folders, repeated(prompts[0], prompt_tokens))
        decoding = measure_decoding(folders, prompts, settings)
        return Speeds(prompt_tokens, settings.context_tokens, prefill, decoding)

    speeds, skipped = unless_short("Speed of prefill and decoding", measure)
    if speeds is None:
        return replace(result, skipped=(*result.skipped, *skipped))
    return replace(result, details=replace(result.details, speeds=speeds))
