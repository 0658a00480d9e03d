"""Adapters: what is trained beside how small a base, and what each way of merging costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.section import Curves, Section, Table
from pipeline.report.table import count, size
from pipeline.results import Quality, Result, TrainingDetails

_WAYS = {
    "adapter": "adapter beside its base",
    "merged": "merged, bf16",
    "requantized": "merged, quantized again",
}
_COLUMNS = ("handed over as", "perplexity", "KL to base with adapter", "same first token", "gate")


@dataclass(frozen=True)
class AdapterSize:
    """What is trained."""

    rank: int
    layers: int
    parameters: int


@dataclass(frozen=True)
class QuantizedSize:
    """Of the quantized weights."""

    weights: int
    bytes: int
    bits_per_weight: float


@dataclass(frozen=True, kw_only=True)
class MergedQuality(Quality):
    """Of one way of handing over base and adapter, beside both unmerged."""

    way: str


@dataclass(frozen=True, kw_only=True)
class QloraDetails(TrainingDetails):
    """What is said of an adapter."""

    adapter: AdapterSize
    quantized: QuantizedSize | None
    """None without a quantized layer."""
    merges: list[MergedQuality]
    max_merge_kl: float
    publish: str


QloraResult = Result[QloraDetails]


def sections(results: Sequence[QloraResult], curves: Curves) -> list[Section]:
    """One for each stage."""
    return [
        Section(f"Adapter: {result.stage}", _summary(result), tables=[merges_table(result.details)])
        for result in results
    ]


def merges_table(details: QloraDetails) -> Table:
    """One line for each way of handing over base and adapter."""
    rows = []
    for merged in details.merges:
        kl = merged.kl.value if merged.kl else 0.0
        agreement = merged.agreement.value if merged.agreement else 0.0
        verdict = "–" if merged.way == "adapter" else _verdict(merged, details.max_merge_kl)
        rows.append([_WAYS[merged.way], f"{merged.perplexity:.3f}", f"{kl:.5f}", f"{agreement:.1%}", verdict])
    note = (
        "Held-out text. The gate compares the worst end of the 95 % interval of the KL; a merged model above it is not "
        "published."
    )
    return Table(rows, _COLUMNS, note=note)


def _verdict(merged: Quality, bound: float) -> str:
    worst = merged.kl.high if merged.kl else 0.0
    return f"{'holds' if worst <= bound else 'refused'}: {worst:.4g} of {bound:g}"


def _summary(result: QloraResult) -> str:
    adapter, quantized = result.details.adapter, result.details.quantized
    dense, base, after = (row.quality.perplexity for row in result.models if row.quality)
    text = f"Rank {adapter.rank} on {adapter.layers} layers: {count(adapter.parameters)} numbers were trained. "
    if quantized:
        text += (
            f"The quantized weights of these layers take {size(quantized.bytes)}, "
            f"{quantized.bits_per_weight:.3f} bits each. "
            f"Held-out perplexity: {dense:.2f} before quantization, {base:.2f} after it, "
        )
    else:
        text += f"Held-out perplexity: {base:.2f} before training, "
    return f"{text}{after:.2f} with the adapter ({after / base - 1:+.1%})."
