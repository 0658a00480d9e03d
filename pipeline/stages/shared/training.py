"""What the stages share that train a model: train, measure, check, publish.

    train → round to bf16 → write candidate/ → measure → parity → gate → publish

What is measured after training is read back from candidate/, so the figures are those of the files that are published;
without training they are those from before. A kill at any point costs at most the work since the last arrow or
checkpoint; the same command goes on from there.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Generic, TypeVar, cast

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from compress.lora import inject
from compress.mod import calibrate, set_thresholds
from model.files.adapter import CONFIG_NAME as ADAPTER_NAME
from model.files.artifact import READERS
from model.files.checkpoint import TensorFiles, is_quantized, save_model
from model.files.safe_io import sync_file
from model.kv_format import FixedScales
from model.lazy import LazyModel
from model.lora import LoraConfig, LoraError
from model.mesh import choose_device, choose_dtype, training_dtype, training_mesh
from model.quantized import QuantizedEmbedding, quantized_layers
from model.routed import routed_layers
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from pipeline.errors import RunInterrupted, StageFailed, UserError
from pipeline.measure.gates import check_gate, describe, describe_loss
from pipeline.measure.parity import check_parity
from pipeline.measure.quality import PUBLISHED_DTYPE, HeldOut, describe_base, describe_model, load_published
from pipeline.measure.shortage import unless_short
from pipeline.measure.speed import known_positions, prompts_from, within
from pipeline.results import Check, ModelReport, Quality, Result, TrainingDetails
from pipeline.stages.shared.config import CURVE_TOKENS, Decoding, Recovery, Training
from pipeline.stages.shared.context import StageContext
from pipeline.stages.shared.models import Models
from pipeline.tracking import tracked
from train.evaluate import TeacherStates
from train.loop import DivergedError, MemoryShortageError, Trainer, TrainingResult
from train.objectives import (
    LanguageModelling,
    RoutableObjective,
    RoutedTraining,
    RoutingConfig,
    StoredDistillation,
    objective_of,
)
from train.packing import Batch, held_out_batches
from train.preference import PreferenceTuning
from train.tracking import Tracker
from train.wandb_run import WandbRun

log = logging.getLogger(__name__)

CALIBRATION_TOKENS = 8_192
"""Training tokens on which the thresholds of routers are set."""

C = TypeVar("C", bound=Training)
R = TypeVar("R", bound=Recovery)
D = TypeVar("D", bound=TrainingDetails)
S = TypeVar("S", bound=Decoding)


class TrainingStage(Generic[C]):
    """A stage that trains a model, at work: its settings, its data, and the steps that all such stages share.

    Each process makes one, once it has checked what goes in: the data are tokenized here.
    """

    teacher_name: str | None = None
    """The recipe's, of the model that held-out figures are compared with, if there is one."""
    teacher: Transformer
    kv_cache_dtype = "auto"
    """In what keys and values of the result will be cached, and its quality is measured."""

    def __init__(self, context: StageContext, tokenizer: Tokenizer) -> None:
        self.context, self.config = context, cast("C", context.stage.config)
        self.data = context.data(self.config.data, tokenizer)
        self.sequence_length = context.data_set(self.config.data).sequence_length
        self.mesh = training_mesh(self.config.dp_shard_size)
        self.models = Models(self.mesh)

    @cached_property
    def held_out(self) -> HeldOut:
        """The text that the stage measures on."""
        return self._held_out(self.config.held_out_tokens)

    @cached_property
    def reference(self) -> TeacherStates:
        """What the teacher makes of that text; ValueError without one."""
        if self.teacher_name is None:
            raise ValueError("the stage has no teacher")
        return self.teacher_states(self.held_out)

    def teacher_states(self, held_out: HeldOut) -> TeacherStates:
        """What the teacher makes of a text."""
        return held_out.states(self.teacher)

    def _held_out(self, max_tokens: int) -> HeldOut:
        group = self.context.processes.group
        if self.mesh.tensor > 1:  # who divides a teacher's layers asks it for the same batches
            from train.sharding import data_group

            group = data_group(self.mesh, choose_device())
        return HeldOut.of(self.data, sequence_length=self.sequence_length, max_tokens=max_tokens, group=group)

    @property
    def has_trained(self) -> bool:
        """Whether this process has a model that was trained: of one in shards the main process alone gets the whole."""
        return self.mesh.is_whole or self.context.processes.is_main

    def for_trained(self, held_out: HeldOut) -> HeldOut:
        """The same text as it is measured by those that have."""
        return held_out if self.mesh.is_whole else held_out.alone

    def training_text(self, tokens: int = CALIBRATION_TOKENS) -> Sequence[Batch]:
        """The first `tokens` of the training text: what structure is decided on."""
        length = self.sequence_length
        most = max(tokens, length)
        return held_out_batches(self.data.train, sequence_length=length, batch_tokens=length, max_tokens=most)

    @property
    def training_dtype(self) -> torch.dtype:
        """Of products."""
        return training_dtype(self.config.precision, on_gpu=choose_device().type == "cuda")

    def load_adapted(self, base: Path, adapter: LoraConfig, *, dense: Path | None = None) -> Transformer:
        """The frozen model in `base`, in the dtype of products, with a fresh adapter.

        `dense`: the folder of the model that a quantized one was made from.
        """
        model = self.models.to_adapt(base, self.training_dtype)
        weights = TensorFiles(dense) if dense is not None and adapter.init == "loftq" else None
        try:
            names = inject(model, adapter, seed=self.config.seed, dense=weights)
        except LoraError as error:
            raise UserError(f"{self.context.stage.kind}: {error}") from None
        log.info("training an adapter of %s parameters on %d linear layers", f"{trained_numbers(model):,}", len(names))
        return model

    # --- training ----------------------------------------------------------------------------------------------------

    def objective(self) -> RoutableObjective | PreferenceTuning:
        """What training minimizes."""
        return LanguageModelling()

    def train(
        self,
        model: Transformer,
        *,
        folder: Path | None = None,
        tokens: int | None = None,
        routing: RoutingConfig | None = None,
    ) -> TrainingResult:
        """Trains `model` in place in all processes as far as the budget says.

        In another `folder` than the stage's, and on another budget of `tokens`, for a comparison: without a curve.
        Routers, where the model has some, go on at their capacity, or learn as `routing` says; then their thresholds
        are set anew. Frozen ones route as they are served, and keep their thresholds.

        Raises RunInterrupted after a signal, StageFailed when training diverged or its memory did not suffice.
        """
        context, settings = self.context, replace(self.config, tokens=tokens or self.config.tokens)
        objective, mixture = self.objective(), model.config.mixture_of_depths
        curve = self._curve() if folder is None else None
        if routing is None and mixture is not None and learns_routing(model):
            routing = RoutingConfig(mixture.capacity, anneal_fraction=0.0)
        with self._tracker(folder) as tracker:
            trainer = Trainer(
                model,
                objective if routing is None else RoutedTraining(cast("RoutableObjective", objective), routing),
                self.data.train,
                settings,
                folder=folder or context.folder,
                sequence_length=self.sequence_length,
                tracker=tracker,
                evaluate=curve,
            )
            log.info("training on %s tokens in %d steps", f"{settings.tokens:,}", settings.steps)
            try:
                training = trainer.train()
            except (DivergedError, MemoryShortageError) as error:
                raise StageFailed(f"{context.stage.name}: {error}") from None
        if training.interrupted:
            raise RunInterrupted(
                f"{context.stage.name} is saved at step {training.steps} of {settings.steps}; "
                "the same command goes on from here"
            )
        self.calibrate_routers(model)
        return training

    @contextmanager
    def _tracker(self, folder: Path | None) -> Iterator[Tracker]:
        """Of the stage, or of training for a comparison in another folder, which is a run of its own in wandb."""
        context = self.context
        own: AbstractContextManager[WandbRun | None] = nullcontext(context.wandb)
        if folder is not None and context.processes.is_main:
            own = tracked(context.recipe, context.stage, folder, folder.name)
        with own as wandb:
            tracker = Tracker(folder or context.folder, wandb)
            try:
                yield tracker
            finally:
                tracker.finish()

    def _curve(self) -> Callable[[Transformer], dict[str, float]] | None:
        """What the loop calls now and then: held-out figures of the model as it would be published now."""
        if self.config.evaluate_every_tokens is None:
            return None
        held_out = self._held_out(min(CURVE_TOKENS, self.config.held_out_tokens)).alone
        reference = None if self.teacher_name is None else self.teacher_states(held_out)

        def measure(model: Transformer) -> dict[str, float]:
            quality = held_out.quality(self.published_form(model), reference)
            found = {"cross_entropy": quality.nll, "kl": quality.kl, "agreement": quality.agreement}
            found |= {"acceptance": quality.acceptance}
            return {f"held_out_{name}": estimate.value for name, estimate in found.items() if estimate is not None}

        return measure

    def published_form(self, model: Transformer) -> Transformer:
        """As it would be published: a copy of a model that is trained, rounded to bf16, its routers calibrated."""
        dtype = choose_dtype("auto", choose_device())
        form = self.models.to_ask(model, lambda part: part.to(PUBLISHED_DTYPE).to(dtype).requires_grad_(False))
        if learns_routing(model):
            calibrate(form, self.training_text())
        return form

    def calibrate_routers(self, model: Transformer) -> None:
        """Sets the thresholds of routers that have learned as suits the rounded weights, where the model is whole."""
        if not self.has_trained or not learns_routing(model):
            return
        calibrated = self.published_form(model).config.mixture_of_depths
        set_thresholds(model, calibrated.thresholds if calibrated else ())

    # --- after -------------------------------------------------------------------------------------------------------

    def finish(
        self,
        write: Callable[[Path], None],
        *,
        training: TrainingResult,
        details: Callable[[], D],
        before: Sequence[ModelReport] = (),
        untrained: Quality | None = None,
        more_checks: Sequence[Check] = (),
    ) -> Result[D] | None:
        """Lets `write` fill the candidate, measures it, and publishes it if parity and gates allow.

        All processes measure; the main one writes, asks for `details`, and returns the result. `before` are rows of
        models that were measured already, the last of them that of the model before training; `untrained`, its quality
        then, makes such a row, of the sizes that it has now.
        """
        context, config = self.context, self.config
        candidate = context.folder / "candidate"
        if context.processes.is_main:
            shutil.rmtree(candidate, ignore_errors=True)
            write(candidate)
        context.processes.wait()
        log.info("measuring %s after training", config.out)
        published = self.models.load(candidate)
        quality = self._quality(published, None if training.steps else untrained)
        examined = self.examine(published)
        context.processes.wait()  # all have read what moves when it is published
        if not context.processes.is_main:
            return None
        after = describe_model(config.out, published, quality, kv_cache_dtype=self.kv_cache_dtype)
        if untrained is not None:
            label = f"{config.out}, before"
            before = [*before, replace(after, label=label, quality=untrained, same_shape_as=config.out)]
        reports = [*before, after]
        known = before[-1].quality if before else None
        worse = describe_loss(known, quality) if known and training.steps else None
        if worse:
            log.warning("training made %s worse: %s; %s", config.out, worse, self.remedy())
        measure = partial(check_parity, candidate, self.held_out.batches, published.device)
        parity, skipped = unless_short(f"Parity of {config.out}", measure)
        found, own_checks = examined(details())
        checks = (*check_gate(config.gate, quality, known), *more_checks, *own_checks)
        for check in checks:
            log.info("%s", describe(check))
        gates = ({} if parity is None else {"parity": parity}) | {check.name: check for check in checks}
        output = None
        if (parity is None or parity.passed) and all(check.passed for check in checks):
            output = context.publish(
                lambda folder: _move_files(candidate, folder),
                reports=reports,
                gates={name: asdict(one) for name, one in gates.items()},
                readers=_readers(published),
            )
        return context.result(
            output=output,
            models=reports,
            gate=checks,
            parity=parity,
            skipped=skipped,
            training=(training.tokens, training.seconds),
            details=replace(found, steps=training.steps, skipped_steps=training.skipped),
        )

    def examine(self, published: Transformer) -> Callable[[D], tuple[D, Sequence[Check]]]:
        """What a kind measures, in all processes, of what is published beside its quality, and what it asks of that.

        Returns what adds it to the details.
        """
        return lambda details: (details, ())

    def remedy(self) -> str:
        """What may help where training has made a model worse."""
        return f"a lower learning_rate than {self.config.learning_rate:g} or more tokens may help"

    def _quality(self, published: Transformer, known: Quality | None) -> Quality:
        """Of what is published; `known` before, unless its cache changes it."""
        if known is not None and self.kv_cache_dtype == "auto":
            return known
        states = None if self.teacher_name is None else self.reference
        return self.held_out.quality(published, states, kv_cache_dtype=self.kv_cache_dtype)


class RecoveryStage(TrainingStage[R]):
    """One that trains a smaller model towards the larger one `teacher`, in the recipe's name, whose tokens it reads.

    Where there is no such model here, towards what it has stored with the data.
    """

    cache_scales: Sequence[FixedScales] = ()
    """For a cache of the student in 8 bits, if they were calibrated."""
    matching: Sequence[int] | None = None
    """Of each of the student's layers the teacher's that it is to be like; by default evenly spread ones."""

    def __init__(self, context: StageContext, teacher: str | None, *, tokens_of: str | None = None) -> None:
        """`tokens_of`: the model whose tokens are read where there is no teacher."""
        super().__init__(context, Tokenizer.load(context.model(teacher or str(tokens_of))))
        self.teacher_name = teacher
        if teacher is not None and not self.mesh.is_whole:
            _ = self.reference  # by all processes, which hold the teacher together

    @cached_property
    def teacher(self) -> Transformer:  # type: ignore[override]  # made when first asked for
        """As it is asked in training and for comparisons: in shards where the student is trained in shards."""
        return load_published(self.context.model(str(self.teacher_name)), self.mesh)

    @property
    def parent(self) -> Transformer:
        """The same model, to calibrate on."""
        return self.teacher if self.mesh.is_whole else self.models.to_calibrate(self.parent_weights)

    @property
    def parent_weights(self) -> LazyModel:
        """And to be converted."""
        return self.models.weights(self.context.model(str(self.teacher_name)))

    def objective(self) -> RoutableObjective:
        """Towards what the teacher has stored with the data, or else by its passes."""
        stored = self.data.train.distributions
        if stored is None or self.config.loss.kind == "cross_entropy":
            return objective_of(self.config.loss, self.teacher, self.matching)
        if self.teacher_name and stored.teacher and stored.teacher != self.context.inputs[self.teacher_name].digest:
            name = f"{self.context.stage.kind}: the data {self.config.data}"
            raise UserError(f"{name} holds distributions of another model than {self.teacher_name}.")
        return StoredDistillation(self.config.loss)

    def trained_briefly(self, folder: Path, make: Callable[[], Transformer], tokens: int) -> Quality:
        """Held-out quality of what `make` makes, behind a small budget of training, in every process.

        It is kept in `folder`, where training that was interrupted goes on.
        """
        kept = folder / "quality.json"
        if not kept.exists():
            folder.mkdir(parents=True, exist_ok=True)
            log.info("training %s briefly, for comparison", folder.name)
            student = make()
            self.train(student, folder=folder, tokens=tokens)
            held_out, is_sharded = self.for_trained(self.held_out), not self.mesh.is_whole
            states = self.teacher_states(held_out) if is_sharded else self.reference
            keep = self.context.decided if is_sharded else self.context.measured
            keep(kept, Quality, lambda: held_out.quality(self.published_form(student), states))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return msgspec.json.decode(kept.read_bytes(), type=Quality)

    def finish_student(
        self,
        student: Transformer,
        origin: str,
        *,
        measured: tuple[Quality | None, Quality],
        training: TrainingResult,
        details: Callable[[], D],
    ) -> Result[D] | None:
        """`finish` of a student with the tokenizer of the model `origin`.

        `measured`: the quality of the teacher, if it is here, and that of the student before training.
        """
        teacher, untrained = measured
        return self.finish(
            partial(write_model, student, Tokenizer.load(self.context.model(origin)), cache_scales=self.cache_scales),
            training=training,
            details=details,
            before=[self._describe_teacher(self.teacher_name, teacher)] if self.teacher_name else [],
            untrained=untrained,
        )

    def _describe_teacher(self, name: str, quality: Quality | None) -> ModelReport:
        if self.mesh.tensor == 1:
            return describe_model(name, self.teacher, quality)
        return describe_base(name, self.context.model(name), quality)

    def side_by_side(self, settings: S) -> tuple[S, dict[str, Path], list[list[int]]]:
        """What speeds are measured on: as much of the settings as the models know positions for, the folders of teacher
        and published student, by name, and held-out prompts."""
        models = {name: self.context.model(name) for name in (self.teacher_name,) if name}
        folders = models | {self.config.out: self.context.published}
        fitting, count = within(settings, known_positions(folders.values())), max(settings.batch_sizes, default=1)
        return fitting, folders, prompts_from(self.held_out.batches, count=count, prompt_tokens=fitting.context_tokens)


def check_dense(context: StageContext, name: str) -> None:
    """Raises UserError where a stage is to change weights that are quantized, or wait under an unmerged adapter."""
    folder, kind = context.model(name), context.stage.kind
    if (folder / ADAPTER_NAME).exists():
        raise UserError(f"{kind}: {name} carries an adapter already; publish it merged to go on from it.")
    if is_quantized(folder):
        raise UserError(f"{kind}: {name} is quantized already; name the model that it was made from.")


def leave_trainable(student: Transformer, what: str, *, adapter_rank: int, seed: int) -> None:
    """Freezes all but what the recipe trains: the `full` model, `adapters` and routers, or routers alone."""
    if what == "full":
        return
    student.requires_grad_(False)
    if what == "adapters":
        inject(student, LoraConfig(rank=adapter_rank), seed=seed)
    for layer in routed_layers(student):
        layer.router.requires_grad_(True)


def trained_numbers(model: Transformer) -> int:
    """How many training changes."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def learns_routing(model: Transformer) -> bool:
    """Whether the model has routers and they are trained. A base frozen below an adapter keeps its own."""
    return any(layer.router.weight.requires_grad for layer in routed_layers(model))


def write_model(
    model: Transformer, tokenizer: Tokenizer, folder: Path, *, cache_scales: Sequence[FixedScales] = ()
) -> None:
    """A model as it is published."""
    save_model(model, folder, dtype=PUBLISHED_DTYPE, cache_scales=cache_scales)
    tokenizer.save(folder)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A file that a stage goes on from: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".staging")
    save_file(dict(tensors), staging, metadata)
    sync_file(staging)
    staging.rename(path)


def _readers(model: Transformer) -> list[str]:
    """The other programs that open the folder: those that know all its layers. They look for dense embeddings."""
    if not model.config.opens_elsewhere or isinstance(model.model.embed_tokens, QuantizedEmbedding):
        return []
    formats = [layer.format for layer in quantized_layers(model).values()]
    return [name for name in READERS if all(name in format.readers for format in formats)]


def _move_files(source: Path, target: Path) -> None:
    """Moves a folder's contents; both lie on one file system."""
    for path in sorted(source.iterdir()):
        path.rename(target / path.name)
    source.rmdir()
