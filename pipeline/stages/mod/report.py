"""Mixture of depths: what it cost, what it saves and by which clock, who skips what."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from pipeline.report.charts import Bar, Bars, Chart, TokenMap
from pipeline.report.section import Curves, Section, Table
from pipeline.report.speeds import Decoded, decoding_charts, speed_chart
from pipeline.results import Quality, Result, TrainingDetails

_GAINS = ("prefill", "decoding")
_SKIPPED = {"attention": "skip the attention", "mlp": "skip the MLP", "block": "skip all"}


@dataclass(frozen=True)
class Flops:
    """Operations of one token in the layers, in a text of `context` tokens."""

    context: int
    parent: float
    target: float
    """At the capacity that was asked for."""
    executed: float
    """At what the layers select."""


@dataclass(frozen=True)
class AtRandom:
    """Quality of the same weights with as many tokens selected by chance."""

    trained: Quality
    converted: Quality


@dataclass(frozen=True)
class Picture:
    """The beginning of the held-out text and, for each routed layer, which tokens it selects, as 0 and 1."""

    tokens: list[str]
    selected: list[str]


@dataclass(frozen=True)
class Speeds:
    """Tokens a second of the parent and of the result, in this order."""

    prefill_tokens: int
    context_tokens: int
    prefill: dict[str, float]
    decoding: dict[str, dict[str, float]]
    """By batch size."""


@dataclass(frozen=True, kw_only=True)
class ModDetails(TrainingDetails):
    """What is said of a routed model."""

    route: str
    train: str
    layers: tuple[int, ...]
    capacity: float
    realised: list[float]
    """The part of the held-out tokens that each of the layers selects."""
    learned: list[float]
    """The same by the thresholds that training left, before they were calibrated."""
    flops: Flops
    random: AtRandom
    picture: Picture
    speeds: Speeds | UnsetType = UNSET
    """Unset where nothing was published."""


ModResult = Result[ModDetails]


def sections(results: Sequence[ModResult], curves: Curves) -> list[Section]:
    """Several side by side first, then one for each stage."""
    head = ("model", "routed", "trained", "loss", "to the parent's", "at random", "operations", *_GAINS)
    table = Table([_side_by_side(result) for result in results], head)
    return [Section("Ways to route", tables=[table])] * (len(results) > 1) + [_section(result) for result in results]


def _side_by_side(result: ModResult) -> list[str]:
    """What it routes and trains, what that cost and saved."""
    details, (parent, _, after) = result.details, result.models
    loss, parent_loss = (row.quality.nll.value if row.quality else 0.0 for row in (after, parent))
    return [
        after.label,
        f"{details.route} of {len(details.layers)} layers",
        details.train,
        f"{loss:.3f}",
        f"{(loss / parent_loss - 1) * 100:+.1f} %",
        f"{details.random.trained.nll.value:.3f}",
        f"{details.flops.executed / details.flops.parent:.3f}×",
        *_gains(details.speeds),
    ]


def _gains(speeds: Speeds | UnsetType) -> list[str]:
    """By the clock, beside the parent: prefill, and decoding at the largest batch."""
    if not speeds or not all(speeds.decoding.values()):
        return ["–"] * len(_GAINS)
    before, after = speeds.prefill.values()
    slow, fast = speeds.decoding.values()
    most = max(slow, key=int)
    return [f"{after / before:.2f}×", f"{fast[most] / slow[most]:.2f}× ({most} at once)"]


def _section(result: ModResult) -> Section:
    details = result.details
    charts: list[Chart] = []
    if details.speeds:
        charts.append(speed_chart(f"Prefill of {details.speeds.prefill_tokens:,} tokens", details.speeds.prefill))
        charts += decoding_charts(Decoded(details.speeds.context_tokens, details.speeds.decoding))
    shares = zip(details.layers, details.realised, strict=True)
    charts.append(
        Bars(
            f"Part of the held-out tokens that each layer selects; target {details.capacity:g}",
            [Bar(f"layer {layer}", share, f"{share:.3f}") for layer, share in shares],
        )
    )
    charts.append(
        TokenMap(
            f"Who passes where: layers {details.layers[0]} (top) to {details.layers[-1]}, tokens from left to right",
            details.picture.tokens,
            details.layers,
            details.picture.selected,
            note="Held-out text; the more routed layers select a token, the darker it is.",
        )
    )
    return Section(f"Mixture of depths: {result.stage}", _summary(result), tables=[_qualities(result)], charts=charts)


def _qualities(result: ModResult) -> Table:
    details, (parent, before, after) = result.details, result.models
    capacity, realised = f"{details.capacity:.3f}", f"{_mean(details.realised):.3f}"
    rows = [
        _row(parent.label, parent.quality, "all"),
        _row("converted", before.quality, capacity),
        _row("converted, at random", details.random.converted, capacity),
        _row(f"{after.label}, trained", after.quality, realised),
        _row(f"{after.label}, at random", details.random.trained, realised),
    ]
    note = "At random: the same weights, with as many tokens selected by chance."
    return Table(rows, ("held-out text", "loss", "KL to the parent", "tokens selected"), note=note)


def _row(name: str, quality: Quality | None, selected: str) -> list[str]:
    loss = quality.nll.value if quality else 0.0
    return [name, f"{loss:.3f}", f"{quality.kl.value:.3f}" if quality and quality.kl else "", selected]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _summary(result: ModResult) -> str:
    """Loss beside the parent's, operations beside the target, and the clock."""
    details, flops = result.details, result.details.flops
    parent, _, after = result.models
    losses = [row.quality.nll.value for row in (parent, after) if row.quality]
    skipped = _SKIPPED[details.route]
    sentence = f"In {len(details.layers)} layers, tokens that the router does not select {skipped}. "
    if len(losses) == 2:
        sentence += f"The held-out loss is {(losses[1] / losses[0] - 1) * 100:+.1f} % of the parent's. "
    sentence += (
        f"In a text of {flops.context:,} tokens, one takes {flops.executed / 1e6:.0f} million operations in the "
        f"layers, {flops.executed / flops.target:.3f} times the target and "
        f"{flops.executed / flops.parent:.3f} times the parent's. "
        f"Thresholds as learned would select {_mean(details.learned):.3f} of the tokens, calibrated ones select "
        f"{_mean(details.realised):.3f} (target {details.capacity:g})."
    )
    return sentence + _clock(details.speeds)


def _clock(speeds: Speeds | UnsetType) -> str:
    if not speeds:
        return ""
    parent, ours = speeds.prefill.values()
    gains = [f"{ours / parent:.2f}× in prefill of {speeds.prefill_tokens:,} tokens"]
    before, after = speeds.decoding.values()
    gains += [f"{after[size] / before[size]:.2f}× decoding {size} at once" for size in before]
    return f" By the clock, beside the parent: {', '.join(gains)}."
