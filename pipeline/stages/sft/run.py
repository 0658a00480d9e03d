"""Stage `sft`: a finished model, or an adapter beside it, trained on data without a teacher.

measure → train → merge the adapter, if there is one
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from compress.lora import merge, merged_weights
from model.config import ModelConfig
from model.lazy import LazyModel
from model.text.tokenizer import Tokenizer
from model.training_memory import Setup
from pipeline.measure.quality import PUBLISHED_DTYPE, describe_model
from pipeline.results import ModelReport, Result, TrainingDetails
from pipeline.stages.sft.config import Sft
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.training import TrainingStage, check_dense, write_model

log = logging.getLogger(__name__)

SftStage = TrainingStage[Sft]


def run(context: StageContext) -> Result[TrainingDetails] | None:
    """Trains and measures in all processes; the main one publishes, and returns the result."""
    config: Sft = context.stage.config
    check_dense(context, config.model)
    source = context.model(config.model)
    tokenizer = Tokenizer.load(source)
    stage = SftStage(context, tokenizer)
    before = context.start(ModelReport, partial(_measure_start, stage))
    if config.adapter is None:
        model = stage.models.to_train(LazyModel.of_folder(source))
    else:
        model = stage.load_adapted(source, config.adapter)
        merged_weights(model)  # an adapter that cannot be merged is refused now, not after training
    training = stage.train(model)

    def write(folder: Path) -> None:
        whole = model if config.adapter is None else merge(model, dtype=PUBLISHED_DTYPE)
        write_model(whole, tokenizer, folder)

    return stage.finish(write, training=training, details=TrainingDetails, before=[before])


def setup(config: Sft, shapes: Mapping[str, ModelConfig]) -> Setup:
    """What its training holds in memory."""
    return Setup(shapes[config.model], config, adapter=config.adapter)


def _measure_start(stage: SftStage) -> ModelReport:
    name, held_out = stage.config.model, stage.held_out
    log.info("measuring %s before training, on %s held-out tokens", name, f"{held_out.num_tokens:,}")
    model = stage.models.load(stage.context.model(name))
    return describe_model(name, model, held_out.quality(model))
