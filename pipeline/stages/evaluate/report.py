"""What models pass of the suite, side by side."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.measure.gates import wilson
from pipeline.measure.suite.tasks import TASKS
from pipeline.report.section import Cell, Curves, Section, Table
from pipeline.results import Estimate, Result

ANSWERS_NAME = "answers.json"
"""Every answer of the suite, in the stage's folder."""


@dataclass(frozen=True)
class Score:
    """Of one model on one task of the suite."""

    model: str
    task: str
    passed: int
    prompts: int
    low: float
    """Ends of the 95 % confidence interval (Wilson) of the share that passes; prompts are the independent draws."""
    high: float

    @property
    def share(self) -> float:
        return self.passed / self.prompts


@dataclass(frozen=True)
class HarnessScore:
    """Of one model in one task of lm-evaluation-harness."""

    model: str
    task: str
    metric: str
    value: Estimate
    """Its margin is 1.96 standard errors, as the harness finds them."""
    samples: int
    """Questions; 0 for a group of tasks."""
    few_shot: int

    @property
    def row(self) -> str:
        shots = f", {self.few_shot} examples" if self.few_shot else ""
        return f"{self.task}: {self.metric}{shots}"


@dataclass(frozen=True)
class EvaluateDetails:
    """What only an evaluation has to say."""

    suite: tuple[Score, ...] = ()
    harness: tuple[HarnessScore, ...] = ()


def scores_of(marked: Iterable[tuple[str, str, bool]]) -> tuple[Score, ...]:
    """Counts (model, task, whether an answer passed)."""
    answers = list(marked)
    asked = Counter((model, task) for model, task, _ in answers)
    passed = Counter((model, task) for model, task, right in answers if right)
    return tuple(
        Score(model, task, passed[model, task], count, *wilson(passed[model, task], count))
        for (model, task), count in asked.items()
    )


def sections(results: Sequence[Result[EvaluateDetails]], curves: Curves) -> list[Section]:
    """All models that were asked, side by side: a row a task."""
    return [*_suite_section(results), *_harness_section(results)]


def _suite_section(results: Sequence[Result[EvaluateDetails]]) -> list[Section]:
    scores = {(score.task, score.model): score for result in results for score in result.details.suite}
    if not scores:
        return []
    first, *others = dict.fromkeys(model for _, model in scores)
    rows = [
        [
            f"{name}: {task.asks}",
            *(_cell(scores.get((name, model)), scores.get((name, first))) for model in (first, *others)),
        ]
        for name, task in TASKS.items()
        if any(asked == name for asked, _ in scores)
    ]
    note = (
        "Passed, of all prompts, and the 95 % confidence interval of the share (Wilson). Greedy, by the serving "
        f"engine, in the chat template. Marked where the interval lies below that of {first}. All answers stand in "
        f"{ANSWERS_NAME} of the stage's folder."
    )
    return [Section("Suite", tables=[Table(rows, ["prompts that pass", first, *others], note=note)])]


def _cell(score: Score | None, first: Score | None) -> str | Cell:
    if score is None:
        return "–"
    text = f"{score.passed} of {score.prompts}, {score.low * 100:.0f} – {score.high * 100:.0f} %"
    return Cell(text, "bad") if first and score.high < first.low else text


def _harness_section(results: Sequence[Result[EvaluateDetails]]) -> list[Section]:
    scores = {(score.row, score.model): score for result in results for score in result.details.harness}
    if not scores:
        return []
    models = list(dict.fromkeys(model for _, model in scores))
    rows = [
        [row, *(_value(scores.get((row, model))) for model in models)]
        for row in dict.fromkeys(row for row, _ in scores)
    ]
    samples = sorted({score.samples for score in scores.values() if score.samples})
    note = f"Answered by the serving engine; ± is the 95 % confidence interval. Questions: {_range(samples)}."
    return [Section("lm-evaluation-harness", tables=[Table(rows, ["task", *models], note=note)])]


def _value(score: HarnessScore | None) -> str:
    if score is None:
        return "–"
    margin = "" if score.value.margin is None else f" ± {score.value.margin:.3f}"
    return f"{score.value.value:.3f}{margin}"


def _range(samples: Sequence[int]) -> str:
    return f"{samples[0]:,}" if len(samples) == 1 else f"{samples[0]:,} to {samples[-1]:,} a task" if samples else "–"
