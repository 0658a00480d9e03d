"""Which trial comes next, running it, and what is written in the end.

First each choice alone and brief: fewer layers with all their bits, fewer bits with all layers; those first that the
largest combinations within the memory have. Of these the search predicts combinations: their distance to the teacher is
the sum of theirs, their time a token the product of their ratios, their memory is known by arithmetic. When all are
tried, or half of the time is over, combinations run in full, the most promising first.
"""

import logging
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import GateRefused, RunInterrupted, RunLockedError, StageFailed, UserError
from pipeline.files import write_atomically
from pipeline.processes import Processes
from pipeline.recipe import recipe_to_yaml
from pipeline.report.front import candidates_of, front_section
from pipeline.report.page import sections_page, write_report
from pipeline.report.section import Cell, Section, Table
from pipeline.report.table import ABSENT, size
from pipeline.results import Result
from pipeline.run import Run
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe
from pipeline.tune.targets import Measured, Targets
from pipeline.tune.trials import Growing, Space, Trial

log = logging.getLogger(__name__)

RECORD, PAGE, WINNER = "trials.json", "tune.html", "winner.yaml"
END = -1


class Record(msgspec.Struct):
    """A trial that was begun, in trials.json."""

    choices: list[str | None]
    brief: bool
    state: str = "begun"
    """Or `done`, or why it failed."""

    @property
    def trial(self) -> Trial:
        return Trial(tuple(self.choices), self.brief)


# --- what comes next --------------------------------------------------------------------------------------------------


def singles(space: Space, memory: Mapping[Trial, int], fitting: Sequence[Trial]) -> list[Trial]:
    """Each choice alone that some combination which fits has, brief where that is less work.

    Those of the largest combinations come first, as these are likely to be near the teacher: wherever the search stops
    asking, it can predict some. `memory`: bytes of what can be made.
    """
    found: dict[Trial, None] = {}
    for combination in sorted(fitting, key=lambda one: -memory[one]):
        for place in range(len(combination.choices)):
            alone = combination.only(place)
            if alone in memory:
                found[alone] = None
    brief = [replace(one, brief=True) for one in found]
    return [less if space.stages(less) != space.stages(one) else one for one, less in zip(found, brief, strict=True)]


def predict(trial: Trial, memory: float, alone: dict[Trial, Measured], teacher: Measured) -> Measured | None:
    """What a combination should give by what its choices gave alone; None where one of them is not known."""
    kl, tpot = 0.0, teacher.tpot
    for place, choice in enumerate(trial.choices):
        if choice is None:
            continue
        lone = trial.only(place)
        one = alone.get(lone) or alone.get(replace(lone, brief=True))
        if one is None:
            return None
        kl += one.kl
        tpot *= one.tpot / teacher.tpot if math.isfinite(teacher.tpot) else 1.0
    return Measured(trial.name, memory, tpot, kl)


def order(predicted: Sequence[tuple[Trial, Measured]], targets: Targets) -> list[Trial]:
    """The most promising first."""
    return [trial for trial, one in sorted(predicted, key=lambda pair: targets.rank(pair[1]))]


# --- running ----------------------------------------------------------------------------------------------------------


class Search:
    """One search in its run folder: trials.json says what was begun, the run's stages what came of it."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, targets: Targets, *, cache: Path, processes: Processes
    ) -> None:
        self.folder, self.targets, self.cache, self.processes = folder, targets, cache, processes
        self.space = Space.of(recipe, cache)
        if targets.tpot is not None and 1 not in self.space.batch_sizes:
            raise UserError("--tpot is of one request, but `speed.batch_sizes` of the stage that evaluates has no 1.")
        self.memory = dict(self._sizes())
        self.fitting = [one for one in self.memory if targets.memory is None or self.memory[one] <= targets.memory]
        if not self.fitting:
            raise UserError(
                f"--memory is {size(int(targets.memory or 0))}, but the smallest model that can be tried, "
                f"{min(self.memory, key=self.memory.__getitem__).name}, takes {size(min(self.memory.values()))}."
            )
        self.all = [*singles(self.space, self.memory, list(self.memory)), *self.memory]
        """Every trial that there can be: processes agree on places in it."""
        self.growing = Growing(self.space)
        self.run = Run(self.growing.recipe, folder, cache=cache, processes=processes)
        self.records = self._read()
        self.measured: dict[Trial, list[Measured]] = {}
        """The model and, where it drafts for its teacher, the pair."""
        self.places: list[int] = []
        self.teacher = Measured("teacher", math.inf, math.inf, 0.0)

    def _sizes(self) -> Iterator[tuple[Trial, int]]:
        """Of what can be made at all."""
        for trial in self.space.combinations():
            try:
                yield trial, self.space.weight_bytes(trial, self.cache)
            except ValueError as error:
                log.debug("%s cannot be tried: %s", trial.name, error)

    def execute(self, budget_s: float) -> None:
        """Tries until all is tried or the time is over, that of earlier calls included. Raises RunInterrupted.

        What is unfinished by then is kept, and the same command with a larger budget goes on with it.
        """
        for record in [one for one in self.records if one.state == "done"]:
            self._agreed(lambda trial=record.trial: trial)  # type: ignore[misc]
        spent = sum(result.cost.seconds for result in self.run.results if result is not None)
        left = self.processes.agree(int(budget_s - spent))
        if left <= 0:
            return
        end = time.monotonic() + left
        try:
            with alarm_after(left if self.processes.is_main else None):
                while self._agreed(lambda: self._next(end, budget_s)):
                    pass
        except (KeyboardInterrupt, RunInterrupted):
            if time.monotonic() < end:
                raise
            log.info("the time is over; what the last trial has done is kept")

    def _agreed(self, choose: Callable[[], Trial | None]) -> bool:
        """Runs what the main process chooses; False at the end."""
        trial = choose() if self.processes.is_main else None
        place = self.processes.agree(self.all.index(trial) if trial in self.all else END)
        if place != END:
            self.attempt(self.all[place])
        return place != END

    def _next(self, end: float, budget_s: float) -> Trial | None:
        """What was begun and not finished, else what is new: choices alone for half of the time, then combinations."""
        known = {record.trial: record.state for record in self.records}
        left = end - time.monotonic()
        begun = [one for one, state in known.items() if state == "begun" and one in self.all]
        alone = [one for one in singles(self.space, self.memory, self.fitting) if one not in known]
        together = self._promising(known)
        new = [*together, *alone] if left < budget_s / 2 else [*alone, *together]
        trial = next(iter([*begun, *new]), None)
        if trial is not None:
            log.info("trial %d: %s (%.0f min left)", len(self.measured) + 1, trial.name, left / 60)
        return trial

    def _promising(self, known: Collection[Trial]) -> list[Trial]:
        """What fits and is not known, as far as its choices are known alone; the most promising first."""
        alone = {one: found[0] for one, found in self.measured.items()}
        guesses = [
            (one, predict(one, self.memory[one], alone, self.teacher)) for one in self.fitting if one not in known
        ]
        return order([(one, guess) for one, guess in guesses if guess], self.targets)

    def attempt(self, trial: Trial) -> None:
        """Runs the stages that the trial adds; one that fails is noted, and its stages leave the recipe again."""
        longer, place = self.growing.add(trial)
        before = len(self.run.results)
        self._note(trial, "begun")
        self.run.recipe = longer.recipe
        try:
            self.run.execute()
        except RunLockedError:
            raise
        except (GateRefused, StageFailed, UserError) as error:
            log.warning("%s failed: %s", trial.name, error)
            del self.run.results[before:]
            self.run.recipe = self.growing.recipe
            self._note(trial, str(error))
            return
        self.growing = longer
        self._note(trial, "done")
        place += len(self.space.recipe.models)
        if (result := self.run.results[place]) is not None:
            self._keep(trial, place, result)

    def _keep(self, trial: Trial, place: int, result: Result[Any]) -> None:
        teacher, model, pair = result.models
        self.teacher = Measured(teacher.label, teacher.weight_bytes, _tpot(teacher.speed), 0.0)
        kl = model.quality.kl.value if model.quality and model.quality.kl else math.inf
        self.measured[trial] = [
            Measured(trial.name, model.weight_bytes, _tpot(model.speed), kl),
            Measured(f"{trial.name}, verified", pair.weight_bytes, _tpot(pair.speed), 0.0, verified=True),
        ]
        self.places += [] if place in self.places else [place]

    def _read(self) -> list[Record]:
        path = self.folder.path / RECORD
        return msgspec.json.decode(path.read_bytes(), type=list[Record]) if path.is_file() else []

    def _note(self, trial: Trial, state: str) -> None:
        """A trial's record, written before it begins and after it ends."""
        if not self.processes.is_main:
            return
        record = next((one for one in self.records if one.trial == trial), None)
        if record is None:
            self.records.append(record := Record(list(trial.choices), trial.brief))
        record.state = state
        self.folder.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder.path / RECORD, msgspec.json.format(msgspec.json.encode(self.records)))

    @property
    def page(self) -> Path:
        return self.folder.path / PAGE

    # --- the end ------------------------------------------------------------------------------------------------------

    def best(self) -> tuple[Trial, Measured]:
        """What meets the targets best, or misses them least. Raises UserError where no trial is done."""
        every = [(trial, one) for trial, found in self.measured.items() for one in found]
        if not every:
            raise UserError(
                "The budget is over and no trial is finished; what was done is kept, and the same command with a "
                "larger --budget goes on with it"
            )
        return min(every, key=lambda pair: self.targets.rank(pair[1]))

    def write(self) -> tuple[str, Path]:
        """Writes the winning recipe, the page and the run's own report; the sentence about them, the recipe's path."""
        trial, one = self.best()
        name = f"{self.space.recipe.name[:58]}-tuned"
        recipe = self.space.recipe_of(trial, name=name, verified=one.verified)
        path = self.folder.path / WINNER
        sentence = self.verdict(one)
        write_atomically(path, f"# {sentence}\n{recipe_to_yaml(recipe)}".encode())
        page = sections_page(self.run.recipe.name, [self._section(sentence), *self._front()])
        write_atomically(self.page, page.encode())
        write_report(self.folder)
        return sentence, path

    def verdict(self, one: Measured) -> str:
        """What was found, and by how much each target is missed."""
        text = f"{one.name}: {_facts(one)}"
        words = {"memory": "memory", "tpot": "time per token", "max_kl": "KL"}
        missed = [f"{words[k]} by {over:.0%}" for k, over in self.targets.excess(one).items() if over > 0]
        if missed:
            return f"No trial meets every target; the nearest, {text}, misses {' and '.join(missed)}."
        return f"The best of what was tried is {text}."

    def _section(self, sentence: str) -> Section:
        """Every trial with the targets beside it."""
        ranked = sorted((one for found in self.measured.values() for one in found), key=self.targets.rank)
        rows: list[list[str | Cell]] = [[one.name, *self._cells(one)] for one in [self.teacher, *ranked]]
        ended = [record for record in self.records if record.state not in STATES]
        rows += [[record.trial.name, Cell(record.state, "text")] for record in ended]
        head = ["trial", "weights", "ms a token", "KL", "targets"]
        note = "Nearest to the targets first; KL(teacher ‖ model) on held-out text, nats a token; speed of one request."
        return Section("Trials", sentence, tables=[Table(rows, head, note=note)])

    def _cells(self, one: Measured) -> list[str | Cell]:
        met = all(over <= 0 for over in self.targets.excess(one).values())
        tpot = f"{1e3 * one.tpot:.2f}" if math.isfinite(one.tpot) else ABSENT
        return [size(int(one.memory)), tpot, f"{one.kl:.4f}", Cell("met", "good") if met else Cell("missed", "bad")]

    def _front(self) -> list[Section]:
        results = [result for place in self.places if (result := self.run.results[place]) is not None]
        found = candidates_of(self.run.recipe, results).values()
        return [front_section(candidates) for candidates in found]


STATES = ("begun", "done")


def _tpot(speed: Sequence[Any]) -> float:
    return next((1 / point.tokens_per_s for point in speed if point.batch_size == 1), math.inf)


def _facts(one: Measured) -> str:
    tpot = f", {1e3 * one.tpot:.2f} ms a token" if math.isfinite(one.tpot) else ""
    return f"{size(int(one.memory))} of weights{tpot}, KL {one.kl:.4f}"


@contextmanager
def alarm_after(seconds: float | None) -> Iterator[None]:
    """Asks the process to stop, as Ctrl-C does, when so much time is over; also one that a shell told to ignore Ctrl-C.

    Shells do so with what they start in the background.
    """
    if seconds is None:
        yield
        return
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
