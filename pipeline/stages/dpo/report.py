"""Preferences: how often held-out chosen answers win, before and after, and how far the model is from its reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pipeline.report.charts import Lines, Series
from pipeline.report.section import Curves, Section, Table
from pipeline.results import Estimate, Result
from pipeline.stages.qlora.report import QloraDetails, QloraResult
from pipeline.stages.qlora.report import sections as of_adapters

_COLUMNS = ("model", "chosen likelier", "reward accuracy", "95 %", "reward margin", "NLL of chosen", "loss")
_MEANINGS = (
    "pairs whose chosen answer has the higher log-probability",
    "pairs whose chosen answer gained more log-probability on the reference than the rejected one",
    "of the reward accuracy (Wilson)",
    "mean difference of the two rewards, β times what each answer gained, in nats",
    "negative log-likelihood of chosen answers, nats a token, of all pairs alike",
    "mean loss of a pair: the preference's, log 2 = 0.693 where nothing is learnt, and nll_weight × the column before",
)
_REWARDS = {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}


@dataclass(frozen=True)
class Share:
    """Of pairs, and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairFigures:
    """Of held-out pairs."""

    pairs: int
    likelier_before: float
    """Part of the pairs whose chosen answer has the higher log-probability, by the reference."""
    likelier: float
    """The same by the model that was trained."""
    accuracy: Share
    """Of the pairs whose chosen answer has the higher reward."""
    margin: Estimate
    """Of the rewards, nats."""
    loss: float
    loss_before: float
    nll: float | None = None
    """Of chosen answers by the model that was trained, nats a token, a mean over pairs; None in results of old."""
    nll_before: float | None = None
    """The same by the reference."""


@dataclass(frozen=True)
class TrainedPairs:
    """What was trained on."""

    pairs: int
    shortened: int
    """Of these, pairs with an answer that ends with the sequence."""
    left_out: int
    """Others, whose prompt leaves no room for an answer."""


@dataclass(frozen=True, kw_only=True)
class DpoDetails(QloraDetails):
    """What is said of an adapter that learnt preferences."""

    trained: TrainedPairs
    held_out: PairFigures


DpoResult = Result[DpoDetails]


def sections(results: Sequence[DpoResult], curves: Curves) -> list[Section]:
    """Two for each stage: of its pairs, and of its adapter."""
    pairs = [_preferences(result, curves) for result in results]
    return [section for own, result in zip(pairs, results, strict=True) for section in (own, *_of_adapter(result))]


def _of_adapter(result: DpoResult) -> list[Section]:
    return of_adapters([cast("QloraResult", result)], {})


def _preferences(result: DpoResult, curves: Curves) -> Section:
    return Section(
        f"Preferences: {result.stage}",
        _summary(result),
        tables=[pairs_table(result)],
        charts=_charts(curves.get(result.stage, ())),
    )


def _summary(result: DpoResult) -> str:
    trained, kl = result.details.trained, result.models[-1].quality
    text = f"Trained on {trained.pairs:,} pairs of answers. "
    if trained.shortened:
        text += f"{trained.shortened:,} of them have an answer that is longer than a sequence and ends with it. "
    if trained.left_out:
        text += f"{trained.left_out:,} others were left out, since their prompts leave no room for an answer. "
    if kl and kl.kl:
        text += f"On held-out chosen answers the model is {kl.kl.value:.3f} nats a token (KL) from its reference."
    return text


def pairs_table(result: DpoResult) -> Table:
    """The reference and what was made of it, on held-out pairs."""
    found, (*_, before, after) = result.details.held_out, result.models
    interval = f"{found.accuracy.low:.1%} to {found.accuracy.high:.1%}"
    margin = f" ± {found.margin.margin:.3f}" if found.margin.margin is not None else ""
    rows = [
        [
            before.label,
            f"{found.likelier_before:.1%}",
            "–",
            "–",
            "0",
            _nats(found.nll_before),
            f"{found.loss_before:.3f}",
        ],
        [
            after.label,
            f"{found.likelier:.1%}",
            f"{found.accuracy.value:.1%}",
            interval,
            f"{found.margin.value:.3f}{margin}",
            _nats(found.nll),
            f"{found.loss:.3f}",
        ],
    ]
    return Table(rows, _COLUMNS, _MEANINGS, note=f"{found.pairs:,} held-out pairs.")


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _charts(logged: Sequence[Mapping[str, float]]) -> list[Lines]:
    """Rewards of batches as they were trained on; the part of the pairs that were right and the chosen answers' NLL."""
    rows = [row for row in logged if "rewards/accuracies" in row]

    def line(name: str, key: str, *, marked: bool = False) -> Series:
        return Series(name, [(row["tokens"], row[key]) for row in rows if key in row], marked=marked)

    def both(key: str, held_out: str) -> list[Series]:
        return [line("trained on", key), line("held out", held_out, marked=True)]

    rewards = [line(name, key) for key, name in _REWARDS.items()]
    shares = both("rewards/accuracies", "held_out_reward_accuracy")
    return [
        Lines("Rewards while training", rewards, "tokens", "nats"),
        Lines("Reward accuracy", shares, "tokens", "part of the pairs", from_zero=True),
        Lines("NLL of chosen answers", both("nll_loss", "held_out_nll_loss"), "tokens", "nats a token"),
    ]
