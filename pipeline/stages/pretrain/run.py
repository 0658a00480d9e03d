"""Stage `pretrain`: a model of a given shape, trained on text from fresh weights.

initialize → train → measure
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from compress.mod import every_nth, measure_selections
from model.config import ConfigError, MixtureOfDepths, ModelConfig
from model.cost import training_flops_per_token
from model.families.registry import FAMILIES
from model.lazy import LazyModel
from model.text.tokenizer import Tokenizer, TokenizerError
from model.training_memory import Setup
from model.transformer import Transformer
from pipeline.errors import UserError
from pipeline.results import Result
from pipeline.stages.pretrain.config import Architecture, Pretrain
from pipeline.stages.pretrain.report import PretrainDetails, TrainingFlops
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.training import TrainingStage, write_model


def run(context: StageContext) -> Result[PretrainDetails] | None:
    """Trains and measures in all processes; the main one publishes, and returns the result."""
    config: Pretrain = context.stage.config
    own = tokenizer(config, {name: entry.folder for name, entry in context.inputs.items()})
    fresh = LazyModel.fresh(model_config(config.architecture, own), config.seed)
    stage = TrainingStage[Pretrain](context, own)
    model = stage.models.to_train(fresh)
    training = stage.train(model)
    details = partial(_describe, stage, model, trained_tokens=training.tokens)
    return stage.finish(partial(write_model, model, own), training=training, details=details)


def setup(config: Pretrain, shapes: Mapping[str, ModelConfig]) -> Setup:
    """What its training holds in memory."""
    return Setup(model_config(config.architecture, shapes[config.tokenizer]), config)


def tokenizer(config: Pretrain, folders: Mapping[str, Path]) -> Tokenizer:
    """The whole of another model's tokenizer, or the most common part of it. Raises UserError."""
    whole, size = Tokenizer.load(folders[config.tokenizer]), config.architecture.vocab_size
    try:
        return whole if size is None else whole.shortened(size)
    except TokenizerError as error:
        raise UserError(f"pretrain: {error}") from None


def _describe(stage: TrainingStage[Pretrain], model: Transformer, *, trained_tokens: int) -> PretrainDetails:
    """What training took in operations, and how many tokens each routed layer selects by the served rule."""
    per_token = training_flops_per_token(model.config, stage.sequence_length)
    flops = TrainingFlops(per_token, per_token * trained_tokens)
    if model.config.mixture_of_depths is None:
        return PretrainDetails(training_flops=flops)
    selected = measure_selections(stage.published_form(model), stage.held_out.batches)
    return PretrainDetails(training_flops=flops, realised=selected.float().mean(1).tolist())


def model_config(shape: Architecture, tokenizer: Tokenizer | ModelConfig) -> ModelConfig:
    """The whole configuration, with the vocabulary of a tokenizer or of a model that uses it. Raises UserError."""
    heads = shape.query_heads
    if shape.head_dim is None and shape.hidden_size % heads:
        raise UserError(
            f"pretrain: hidden_size {shape.hidden_size} is no multiple of {heads} query_heads; set head_dim."
        )
    routers = shape.mixture_of_depths
    if routers.every is not None and routers.every > shape.layers:
        raise UserError(f"pretrain: mixture_of_depths.every is {routers.every}, but there are {shape.layers} layers.")
    try:
        config = ModelConfig.from_hf(
            {
                "architectures": [FAMILIES[shape.family].architecture],
                "vocab_size": shape.vocab_size or tokenizer.vocab_size,
                "hidden_size": shape.hidden_size,
                "intermediate_size": shape.intermediate_size,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": heads,
                "num_key_value_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "max_position_embeddings": shape.max_position_embeddings,
                "rope_theta": shape.rope_theta,
                "tie_word_embeddings": shape.tie_word_embeddings,
                "initializer_range": shape.initializer_range,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": list(tokenizer.eos_token_ids),
                "pad_token_id": tokenizer.pad_token_id,
            }
        )
    except ConfigError as error:
        raise UserError(f"pretrain: {error}") from None
    if routers.every is None:
        return config
    layers = every_nth(shape.layers, routers.every)
    mixture = MixtureOfDepths(routers.route, layers, routers.capacity)  # type: ignore[arg-type]  # the schema says which
    return replace(config, mixture_of_depths=mixture)
