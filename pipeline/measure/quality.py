"""Held-out quality with confidence intervals.

Batches of held-out text are the independent draws behind every interval: tokens of one text are not independent. They
are dealt to the processes that measure together, whose figures of each batch are gathered: those of one process.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch

from model.attention import AttentionOf, PackedAttention, PagedAttention
from model.collectives import ALONE, Group
from model.cost import kv_bytes_per_token, num_weights, outline_of, planned_weight_bytes, weight_bytes
from model.files.checkpoint import formats_by_layer, load_config, load_model
from model.kv_format import choose_kv_format
from model.layers import Routing
from model.mesh import Mesh, choose_device, choose_dtype, this_rank
from model.transformer import Transformer
from pipeline.measure.gates import estimate
from pipeline.results import ModelReport, Quality
from train.data import PreparedData
from train.evaluate import Comparison, TeacherStates, compare, compute_teacher_states, mean_nll, mean_nll_of_states
from train.packing import Batch, held_out_batches
from train.progress import Progress

MIN_BATCHES, MAX_BATCH_TOKENS = 8, 2_048
"""Held-out text comes in at least so many batches where it can: they are the draws behind an interval."""
PUBLISHED_DTYPE = torch.bfloat16
"""Of weights on disk. Quality is measured on the rounded weights, so the figures are those of what is served."""


class _Forward(TypedDict):
    """How the model that is measured is run."""

    routing: Routing | None
    attention: AttentionOf


@dataclass(frozen=True)
class HeldOut:
    """Held-out batches, and what the reference model says about them once it has been asked.

    All processes of `group` ask for the same figures at the same time, each with the model, and all of them get them.
    """

    batches: tuple[Batch, ...]
    group: Group = ALONE

    @classmethod
    def of(cls, data: PreparedData, *, sequence_length: int, max_tokens: int, group: Group = ALONE) -> "HeldOut":
        """The first `max_tokens` of the held-out split."""
        size = max(min(max_tokens // MIN_BATCHES, MAX_BATCH_TOKENS), sequence_length)
        wanted = {"sequence_length": sequence_length, "batch_tokens": size, "max_tokens": max(max_tokens, size)}
        return cls(tuple(held_out_batches(data.held_out, **wanted)), group)

    @property
    def num_tokens(self) -> int:
        """Those that are predicted."""
        return sum(self._num_labels)

    @property
    def alone(self) -> "HeldOut":
        """The same text, measured by this process without the others."""
        return replace(self, group=ALONE)

    def quality(
        self,
        model: Transformer,
        reference: TeacherStates | None = None,
        *,
        routing: Callable[[int], Routing] | None = None,
        kv_cache_dtype: str = "auto",
    ) -> Quality:
        """Measures `model`, against a reference's states of the same batches if given.

        `routing`: who passes layers that have a router in the batch of a number, instead of the rule by which the model
        is served; `kv_cache_dtype`: the server's option, so that attention goes over keys and values as that cache
        keeps them. With the model's own states as the reference, `kl` is what the cache alone costs.
        """
        model.eval()  # dropout is for training
        attention = _attention_over(kv_cache_dtype, model)
        hows: list[_Forward] = [
            {"routing": None if routing is None else routing(number), "attention": attention} for number in self._dealt
        ]
        if reference is None:
            with self._shown() as batches:
                nlls = [mean_nll(model, [batch], **how) for batch, how in zip(batches, hows, strict=True)]
            return self._on_text(self._gathered([nlls], model.device)[0])
        compared = self._compared(model, reference, hows)
        own = [[one.nll for one in compared], [one.kl for one in compared]]
        own += [[one.agreement for one in compared], [one.acceptance for one in compared]]
        nlls, *distances = self._gathered(own, model.device)
        kl, agreement, acceptance = (estimate(values, self._num_labels) for values in distances)
        return replace(self._on_text(nlls), kl=kl, agreement=agreement, acceptance=acceptance)

    def states(self, reference: Transformer) -> TeacherStates:
        """The reference's side of every comparison, computed once: of the batches that are this process's."""
        with self._shown() as batches:
            return compute_teacher_states(reference.eval(), batches)

    def quality_of(self, reference: TeacherStates) -> Quality:
        """The reference's own quality, of which the states are most of the work."""
        nlls = mean_nll_of_states(reference, self._own)
        return self._on_text(self._gathered([nlls], reference.weight.device)[0])

    @property
    def _dealt(self) -> list[int]:
        """Numbers of this process's batches.

        Where they are not the same for all, the last once more: a model in shards makes its passes in all processes.
        """
        last, most = len(self.batches) - 1, math.ceil(len(self.batches) / self.group.count)
        return [min(turn * self.group.count + self.group.index, last) for turn in range(most)]

    @property
    def _own(self) -> list[Batch]:
        return [self.batches[number] for number in self._dealt]

    @contextmanager
    def _shown(self) -> Iterator[Iterator[Batch]]:
        """This process's batches, one after the other; of several the time left is shown."""

        def batches() -> Iterator[Batch]:
            for batch in own:
                yield batch
                progress.advance(1, "held-out text")

        own = self._own
        with Progress("measuring", len(own), enabled=this_rank().index == 0 and len(own) > 1) as progress:
            yield batches()

    def _gathered(self, figures: Sequence[Sequence[float]], device: torch.device) -> list[list[float]]:
        """Of rows of figures of this process's batches, the rows of all batches in their order."""
        own = torch.tensor(figures, dtype=torch.float64, device=device)
        everywhere = self.group.gather(own.T.contiguous()).transpose(0, 1).flatten(0, 1)
        return everywhere[: len(self.batches)].T.tolist()

    @property
    def _num_labels(self) -> list[int]:
        return [batch.num_labels for batch in self.batches]

    def _on_text(self, nlls: Sequence[float]) -> Quality:
        """By the mean loss of each batch."""
        labels, spelled = self._num_labels, [batch.num_bytes for batch in self.batches]
        nll, sums = estimate(nlls, labels), zip(nlls, labels, spelled, strict=True)
        bits = [mean * count / (math.log(2) * (size or math.nan)) for mean, count, size in sums]
        perplexity = math.exp(min(nll.value, 700.0))
        return Quality(tokens=sum(labels), nll=nll, perplexity=perplexity, bits_per_byte=estimate(bits, spelled))

    def _compared(self, model: Transformer, reference: TeacherStates, hows: Sequence[_Forward]) -> list[Comparison]:
        """Of each own batch; one pass gives the model's own loss as well."""
        with self._shown() as batches:
            return [
                compare(model, replace(reference, hidden=(hidden,)), [batch], **how)
                for batch, hidden, how in zip(batches, reference.hidden, hows, strict=True)
            ]


def _attention_over(kv_cache_dtype: str, model: Transformer) -> AttentionOf:
    """Keys and values as the model computes them need no cache."""
    kv_format = choose_kv_format(kv_cache_dtype, model.dtype, model.cache_scales)
    if kv_format.dtype == model.dtype:
        return PackedAttention
    return partial(PagedAttention.over_documents, kv_format=kv_format)


def load_published(folder: Path, mesh: Mesh | None = None, dtype: torch.dtype | None = None) -> Transformer:
    """A model as it is published, on this process's device; by default in the dtype that this multiplies fast.

    `mesh`: of processes that load it together; in shards, if it asks for them.
    """
    device = choose_device()
    dtype = dtype or choose_dtype("auto", device)
    if mesh is not None and not mesh.is_whole:
        from train.sharding import load_frozen

        return load_frozen(folder, mesh, dtype)
    return load_model(folder, dtype=dtype, device=device)


def describe_base(label: str, folder: Path, quality: Quality | None = None) -> ModelReport:
    """The row of one that no process has whole layers of, by its files; without an adapter that it may carry."""
    shape = load_config(folder)
    report = describe_model(label, outline_of(shape), quality)
    return replace(report, weight_bytes=planned_weight_bytes(shape, formats_by_layer(folder), PUBLISHED_DTYPE))


def describe_model(
    label: str, model: Transformer, quality: Quality | None = None, *, kv_cache_dtype: str = "auto"
) -> ModelReport:
    """The row of one model, with the sizes in which it is published, and served with this `kv_cache_dtype`."""
    kv_format = choose_kv_format(kv_cache_dtype, PUBLISHED_DTYPE)
    return ModelReport(
        label=label,
        parameters=num_weights(model),
        weight_bytes=weight_bytes(model, PUBLISHED_DTYPE),
        kv_bytes_per_token=kv_bytes_per_token(model.config, kv_format.dtype),
        quality=quality,
    )
