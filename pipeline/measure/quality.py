"""Held-out quality with confidence intervals.

Batches of held-out text are the independent draws behind every interval: tokens of one text are not independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch

from model.attention import AttentionOf, PackedAttention, PagedAttention
from model.cost import kv_bytes_per_token, num_weights, weight_bytes
from model.files.checkpoint import load_model
from model.kv_format import choose_kv_format
from model.layers import Routing
from model.mesh import choose_device, choose_dtype
from model.transformer import Transformer
from pipeline.measure.gates import estimate
from pipeline.results import ModelReport, Quality
from train.data import PreparedData
from train.evaluate import Comparison, TeacherStates, compare, compute_teacher_states, mean_nll, mean_nll_of_states
from train.packing import Batch, held_out_batches

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
    """Held-out batches, and what the reference model says about them once it has been asked."""

    batches: tuple[Batch, ...]

    @classmethod
    def of(cls, data: PreparedData, *, sequence_length: int, max_tokens: int) -> "HeldOut":
        """The first `max_tokens` of the held-out split."""
        size = max(min(max_tokens // MIN_BATCHES, MAX_BATCH_TOKENS), sequence_length)
        wanted = {"sequence_length": sequence_length, "batch_tokens": size, "max_tokens": max(max_tokens, size)}
        return cls(tuple(held_out_batches(data.held_out, **wanted)))

    def quality(
        self,
        model: Transformer,
        reference: TeacherStates | None = None,
        *,
        routing: Routing | None = None,
        kv_cache_dtype: str = "auto",
    ) -> Quality:
        """Measures `model`, against a reference's states of the same batches if given.

        `routing`: who passes layers that have a router, instead of the rule by which the model is served;
        `kv_cache_dtype`: the server's option, so that attention goes over keys and values as that cache keeps them.
        With the model's own states as the reference, `kl` is what the cache alone costs.
        """
        model.eval()  # dropout is for training
        how: _Forward = {"routing": routing, "attention": _attention_over(kv_cache_dtype, model)}
        compared = [] if reference is None else self._compared(model, reference, how)
        alone = [] if compared else [mean_nll(model, [batch], **how) for batch in self.batches]
        quality = self._on_text(alone or [one.nll for one in compared])
        if not compared:
            return quality
        labels = self._num_labels
        return replace(
            quality,
            kl=estimate([one.kl for one in compared], labels),
            agreement=estimate([one.agreement for one in compared], labels),
            acceptance=estimate([one.acceptance for one in compared], labels),
        )

    def states(self, reference: Transformer) -> TeacherStates:
        """The reference's side of every comparison, computed once."""
        return compute_teacher_states(reference.eval(), self.batches)

    def quality_of(self, reference: TeacherStates) -> Quality:
        """The reference's own quality, of which the states are most of the work."""
        return self._on_text(mean_nll_of_states(reference, self.batches))

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

    def _compared(self, model: Transformer, reference: TeacherStates, how: _Forward) -> list[Comparison]:
        """Of each batch; one pass gives the model's own loss as well."""
        return [
            compare(model, replace(reference, hidden=(hidden,)), [batch], **how)
            for batch, hidden in zip(self.batches, reference.hidden, strict=True)
        ]


def _attention_over(kv_cache_dtype: str, model: Transformer) -> AttentionOf:
    """Keys and values as the model computes them need no cache."""
    kv_format = choose_kv_format(kv_cache_dtype, model.dtype, model.cache_scales)
    if kv_format.dtype == model.dtype:
        return PackedAttention
    return partial(PagedAttention.over_documents, kv_format=kv_format)


def load_published(folder: Path) -> Transformer:
    """A model as it is published, on this process's device, in the dtype that this multiplies fast."""
    device = choose_device()
    return load_model(folder, dtype=choose_dtype("auto", device), device=device)


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
