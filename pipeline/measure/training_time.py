"""How long a stage trains and measures on this machine: a few of its steps, and of its passes over held-out text, are
taken on random weights and timed. Of data that are not there yet the tokens are random, too, in documents as long as a
sequence: those take longer than short ones, among which positions look back less far.
"""

import hashlib
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.lora import inject
from compress.quantize.qat import to_quantized, train_through_rounding
from compress.quantize.round_to_nearest import quantize_model
from model.config import ModelConfig
from model.formats.base import WeightFormat
from model.formats.registry import format_named
from model.mesh import choose_device, choose_dtype, training_dtype
from model.quantized import set_quantized
from model.training_memory import Setup
from model.transformer import Transformer
from pipeline.measure.parity import prompts_of
from pipeline.measure.quality import HeldOut
from train.config import Loss
from train.data import PreparedData, TokenizedDocuments
from train.loop import Trainer
from train.objectives import LanguageModelling, Objective, objective_of
from train.packing import held_out_batches
from train.preference import PreferenceTuning, chosen_answers
from train.tracking import Tracker

DOCUMENTS = 64
STEPS = 4
"""Of which the first, in which kernels are compiled and memory is fetched, does not count."""
PASSES = 4
"""Over one sequence of held-out text each, where there is so much; of them too the first does not count."""


Models = tuple[Transformer, Transformer | None]
"""What a stage trains, and its teacher."""


def training_seconds(setup: Setup, models: Models, data: TokenizedDocuments, sequence_length: int) -> float:
    """All steps of a stage, in one process, which train its `random_models`; what a student writes itself is not in it.

    Steps with routers are timed as without: early every token passes, later fewer do. Those that learn from stored
    distributions are timed as steps that learn the text, which have one product with the vocabulary too. Raises
    MemoryShortageError, and KeyboardInterrupt where a signal came first, for which training stops in peace.
    """
    training: Any = setup.training
    model, teacher = models
    objective = objective_by_settings(training, None if setup.asked_teacher is None else teacher)
    short = replace(training, tokens=(STEPS + 1) * training.batch_tokens, evaluate_every_tokens=None)
    short = replace(short, checkpoint_every_s=1e9)
    with tempfile.TemporaryDirectory() as folder:
        stopwatch = _Stopwatch(Path(folder))
        try:
            Trainer(
                model, objective, data, short, folder=stopwatch.folder, sequence_length=sequence_length,
                tracker=stopwatch,
            ).train()  # fmt: skip
            raise KeyboardInterrupt
        except _TimedError:
            pass
        finally:
            stopwatch.finish()
    return float((training.steps + training.compared_steps) * statistics.median(stopwatch.seconds[1:]))


def measuring_seconds(setup: Setup, models: Models, data: TokenizedDocuments, sequence_length: int) -> float:
    """All passes of a stage over held-out text, before, during and after training, in the form that it publishes.

    With those of the trainer's side and the server's when they are compared.
    """
    config: Any = setup.training
    model, teacher = models
    if setup.rounding is not None:
        to_quantized(model)
    model.to(choose_dtype("auto", model.device))
    answers = chosen_answers(data) if data.paired else data
    lengths = {"sequence_length": sequence_length, "batch_tokens": sequence_length}
    batches = held_out_batches(answers, max_tokens=max(config.held_out_tokens, sequence_length), **lengths)
    share = min(sum(len(batch.tokens) for batch in batches) / config.held_out_tokens, 1.0)
    asked, measured = [], []
    for batch in [batches[0], *batches[: PASSES - 1]]:
        text, began = HeldOut((batch,)), time.monotonic()
        states = None if teacher is None else text.states(teacher)
        if states is not None:
            text.quality_of(states)
        between = time.monotonic()
        text.quality(model, states)
        asked.append((between - began) / len(batch.tokens))
        measured.append((time.monotonic() - between) / len(batch.tokens))
    taught = config.teacher_tokens * (teacher is not None)
    compared = 2 * sum(map(len, prompts_of(batches, setup.model.num_positions)))
    seconds = (share * config.measured_tokens + compared) * statistics.median(measured[1:])
    return float(seconds + share * taught * statistics.median(asked[1:]))


def random_models(setup: Setup) -> Models:
    """What a stage trains, as it is when training begins but for routers, and its teacher."""
    device, training = choose_device(), setup.training
    dtype = training_dtype(training.precision, on_gpu=device.type == "cuda")
    model, teacher = _random(setup.model, 0), None
    if setup.teacher is not None:
        teacher = _random(setup.teacher, 1).to(choose_dtype("auto", device)).requires_grad_(False)
        _quantize(teacher, setup.teacher_formats)
        teacher.to(device)
    if setup.rounding is not None:
        _quantize(model, setup.rounding.formats)
        train_through_rounding(model, setup.rounding.trained, rank=setup.rounding.rank)
    if setup.adapter is not None:
        if not setup.fp32_base:
            model.to(dtype)
        if (format := format_named(setup.quantization, double=setup.double_quantization)) is not None:
            quantize_model(model, format)
        inject(model, setup.adapter)
    return model.to(device), teacher


def _quantize(model: Transformer, formats: Mapping[str, WeightFormat[Any]]) -> None:
    for name, one in formats.items():
        set_quantized(model, name, one.quantize(model.get_parameter(f"{name}.weight").detach()), one)


def random_data(setup: Setup, length: int) -> PreparedData:
    """For a stage whose data are not there yet."""
    paired = getattr(setup.training, "preference_loss", None) is not None
    documents = random_documents(setup.model.vocab_size, length, paired=paired)
    return PreparedData(documents, documents)


def random_documents(vocab_size: int, length: int, *, paired: bool = False) -> TokenizedDocuments:
    """Documents of which each fills a piece of `length` tokens, or pairs of them."""
    size = length + 1  # the last one is only predicted
    tokens = np.random.default_rng(0).integers(0, vocab_size, DOCUMENTS * size).astype(np.int32)
    lengths = np.full(DOCUMENTS, size, dtype=np.int64)
    offsets = np.arange(DOCUMENTS + 1, dtype=np.int64) * size
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    return TokenizedDocuments("random", tokens, offsets, None, lengths, digest, paired=paired)


def _random(config: ModelConfig, seed: int) -> Transformer:
    model = Transformer(config)
    model.initialize(seed)
    return model


def objective_by_settings(training: Any, teacher: Transformer | None) -> Objective:
    """By the losses that its settings name."""
    if (preference := getattr(training, "preference_loss", None)) is not None:
        return PreferenceTuning(preference)
    return LanguageModelling() if teacher is None else objective_of(getattr(training, "loss", Loss()), teacher)


class _TimedError(Exception):
    """Ends training before it would save anything."""


class _Stopwatch(Tracker):
    """Hears how fast each step was, and stops training behind the last one that counts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seconds: list[float] = []
        self._began = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float] | None = None) -> None:
        now = time.monotonic()
        self.seconds.append(now - self._began)
        self._began = now
        if step == STEPS:
            raise _TimedError
