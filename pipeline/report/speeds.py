"""Speeds of a model beside its parent's, as stages keep them and as bars."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.report.charts import Bar, Bars
from pipeline.report.table import speed


@dataclass(frozen=True)
class Decoded:
    """Greedy decoding with that many tokens in the cache."""

    context_tokens: int
    tokens_per_s: dict[str, dict[str, float]]
    """By model, the parent first, and by batch size."""


def decoding_charts(decoded: Decoded) -> list[Bars]:
    """A chart for each batch size."""
    sizes = dict.fromkeys(size for points in decoded.tokens_per_s.values() for size in points)
    return [
        speed_chart(
            f"Decoding, {size} at once, {decoded.context_tokens:,} tokens in the cache each",
            {name: points[size] for name, points in decoded.tokens_per_s.items()},
        )
        for size in sizes
    ]


def speed_chart(title: str, by_model: Mapping[str, float]) -> Bars:
    """A bar for each model."""
    return Bars(title, [Bar(name, value, f"{speed(value)} tokens/s") for name, value in by_model.items()])
