"""Stage `dpo`: an adapter that learns from pairs of a chosen and a rejected answer; published as `qlora` publishes one.

    quantize, if asked for → measure → attach → train on pairs → measure pairs and the ways of merging

The reference of the loss, and of the held-out comparison, is the model with its adapter taken off.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.lora import LoraConfig, without_lora
from model.text.tokenizer import Tokenizer
from model.training_memory import Setup
from model.transformer import Transformer
from pipeline.measure.gates import estimate, wilson
from pipeline.measure.quality import HeldOut
from pipeline.results import Check, Result
from pipeline.stages.dpo.config import Dpo
from pipeline.stages.dpo.report import DpoDetails, PairFigures, Share, TrainedPairs
from pipeline.stages.qlora import run as qlora
from pipeline.stages.qlora.report import QloraDetails
from pipeline.stages.qlora.run import QloraStage, run_adapted
from pipeline.stages.shared.context import StageContext
from train.config import PreferenceLoss
from train.evaluate import TeacherStates
from train.packing import Batch, cut
from train.preference import (
    PreferenceTuning,
    chosen_answers,
    count_unfit,
    labels_of_pairs,
    pair_batches,
    pair_logps,
    preference_losses,
)


def run(context: StageContext) -> Result[QloraDetails] | None:
    """Trains and measures in all processes; the main one publishes, and returns the result."""
    return run_adapted(context, DpoStage)


def setup(config: Dpo, shapes: Mapping[str, ModelConfig]) -> Setup:
    """What its training holds in memory: no second model, and both answers of a pair in one micro-batch."""
    return replace(qlora.setup(config, shapes), whole_documents=True)


class DpoStage(QloraStage[Dpo]):
    """A frozen base with an adapter that is trained on pairs, and measured on chosen answers beside its base."""

    model: Transformer
    """Base and adapter, once they are loaded."""
    base: Transformer | None = None
    """The base in shards, where that is how it is trained, until it has been asked."""

    def __init__(self, context: StageContext, tokenizer: Tokenizer) -> None:
        super().__init__(context, tokenizer)
        self.teacher_name = self.config.model

    def load_adapted(self, base: Path, adapter: LoraConfig, *, dense: Path | None = None) -> Transformer:
        """As every stage with an adapter loads one; it is kept here to be asked without."""
        self.model = super().load_adapted(base, adapter, dense=dense)
        if not self.mesh.is_whole:
            self.base = self.models.load(base, self.training_dtype)
            _ = self.reference, self.reference_logps
        return self.model

    def objective(self) -> PreferenceTuning:
        return PreferenceTuning(self.config.preference_loss)

    def remedy(self) -> str:
        config = self.config
        return (
            "where answers are driven far apart, chosen ones become less likely too: a larger nll_weight than "
            f"{config.nll_weight:g} teaches them beside that (1 is usual); a larger beta than {config.beta:g}, a lower "
            f"learning_rate than {config.learning_rate:g} or fewer tokens keep it nearer to its base"
        )

    # --- held-out answers ---------------------------------------------------------------------------------------------

    def _held_out(self, max_tokens: int) -> HeldOut:
        chosen = replace(self.data, held_out=chosen_answers(self.data.held_out))
        group = self.context.processes.group
        return HeldOut.of(chosen, sequence_length=self.sequence_length, max_tokens=max_tokens, group=group)

    def teacher_states(self, held_out: HeldOut) -> TeacherStates:
        with self._without_adapter() as base:
            return held_out.states(base)

    @contextmanager
    def _without_adapter(self) -> Iterator[Transformer]:
        if self.base is not None:
            yield self.base
            return
        with without_lora(self.model):
            yield self.model

    # --- held-out pairs -----------------------------------------------------------------------------------------------

    @cached_property
    def pairs(self) -> Sequence[Batch]:
        """As many pairs as there are chosen answers to measure on."""
        most = 2 * self.config.held_out_tokens
        return pair_batches(self.data.held_out, sequence_length=self.sequence_length, max_tokens=most)

    @cached_property
    def reference_logps(self) -> Tensor:
        """Of the base, [P, 2]."""
        with self._without_adapter() as base, torch.autocast(base.device.type, enabled=False):
            return pair_logps(base, self.pairs)

    def _curve(self) -> Callable[[Transformer], dict[str, float]] | None:
        measure = super()._curve()
        self.base = None
        if measure is None:
            return None

        def measure_both(model: Transformer) -> dict[str, float]:
            found = self.pair_figures(logps := pair_logps(self.published_form(model), self.pairs))
            pairs = {"reward_accuracy": found.accuracy.value, "reward_margin": found.margin.value, "loss": found.loss}
            pairs["nll_loss"] = float(chosen_nll(logps, labels_of_pairs(self.pairs)).mean())
            return measure(model) | {f"held_out_{name}": value for name, value in pairs.items()}

        return measure_both

    def pair_figures(self, logps: Tensor) -> PairFigures:
        """Of log-probabilities [P, 2] of chosen and rejected answers."""
        return pair_figures(logps, self.reference_logps, labels_of_pairs(self.pairs), self.config.preference_loss)

    def examine(self, published: Transformer) -> Callable[[Any], tuple[Any, Sequence[Check]]]:
        """Adds what is known of pairs, which every process measures."""
        return partial(self._with_pairs, self.pair_figures(pair_logps(published, self.pairs)))

    def _with_pairs(self, found: PairFigures, details: Any) -> tuple[Any, Sequence[Check]]:
        """The accuracy's bound is held against the low end of its interval."""
        shortened, left_out = count_unfit(self.data.train, self.sequence_length)
        trained = TrainedPairs(len(cut(self.data.train, self.sequence_length)) // 2, shortened, left_out)
        details = DpoDetails(**vars(details), trained=trained, held_out=found)
        bound, share = self.config.gate.min_reward_accuracy, found.accuracy
        if bound is None:
            return details, ()
        return details, [Check("min_reward_accuracy", share.value, share.low, bound, passed=share.low >= bound)]


def pair_figures(logps: Tensor, reference: Tensor, labels: Tensor, loss: PreferenceLoss) -> PairFigures:
    """Of log-probabilities [P, 2] by the model and by its reference, of answers with so many labels [P, 2]."""
    gained = logps.double() - reference.double()
    rewards = loss.beta * (gained / labels if loss.kind == "ipo" else gained)
    margins = rewards[:, 0] - rewards[:, 1]
    pairs, right = len(margins), int((margins > 0).sum())
    nll, nll_before = (chosen_nll(answers, labels) for answers in (logps, reference))
    return PairFigures(
        pairs=pairs,
        likelier_before=float((reference[:, 0] > reference[:, 1]).double().mean()),
        likelier=float((logps[:, 0] > logps[:, 1]).double().mean()),
        accuracy=Share(right / pairs, *wilson(right, pairs)),
        margin=estimate(margins.tolist(), [1.0] * pairs),
        nll=float(nll.mean()),
        nll_before=float(nll_before.mean()),
        loss=float(preference_losses(margins, nll, loss).mean()),
        loss_before=float(preference_losses(torch.zeros_like(margins), nll_before, loss).mean()),
    )


def chosen_nll(logps: Tensor, labels: Tensor) -> Tensor:
    """Nats a token of each chosen answer, fp64 [P], from log-probabilities of both and how many labels they have."""
    return -logps[:, 0].double() / labels[:, 0]
