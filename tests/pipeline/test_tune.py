"""`potstill tune`: what it tries, in which order, what it keeps, and what it writes."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.processes import Processes
from pipeline.recipe import load_recipe
from pipeline.run import run_recipe
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe
from pipeline.stages.base import read_result
from pipeline.tune.search import RECORD, Record, Search, alarm_after, order, predict, singles
from pipeline.tune.targets import Measured, Targets
from pipeline.tune.trials import Growing, Space, Trial
from tests.pipeline.tiny_run import RECIPE, ROOT, write_teacher, write_text

SMALL = {"data": "text", "batch_tokens": 256, "micro_batch_tokens": 128, "held_out_tokens": 256}
STAGES = [
    {
        "distill": SMALL
        | {
            "teacher": "teacher",
            "student": {"from": "teacher", "layers": 2, "importance_tokens": 256},
            "tokens": 8192,
            "precision": "fp32",
            "out": "student",
        }
    },
    {"quantize": SMALL | {"model": "student", "method": "round", "calibration_tokens": 256, "out": "small"}},
    {
        "evaluate": {
            "model": "small",
            "against": "teacher",
            "data": "text",
            "held_out_tokens": 256,
            "speed": {"batch_sizes": [1], "prompt_tokens": 8, "new_tokens": 4},
        }
    },
]


def overrides(home: Path, stages: object = STAGES, served: str = "small") -> list[str]:
    """What makes configs/tiny.yaml a recipe to tune, on a teacher and a text in `home`."""
    if not (home / "teacher").exists():
        write_teacher(home / "teacher")
        write_text(home / "text")
    return [
        f"models.teacher.from={home / 'teacher'}",
        f"data.text.source={home / 'text'}",
        f"stages={json.dumps(stages)}",
        f"serve={{model: {served}, price_per_hour: 0.5}}",
    ]


def space_of(home: Path) -> Space:
    return Space.of(load_recipe(RECIPE, overrides(home)), home / "cache")


# --- what is tried ----------------------------------------------------------------------------------------------------


def test_every_combination_but_the_teacher_itself_is_tried_once(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    found = [trial.choices for trial in space.combinations()]
    layers, bits = space.choices
    assert {"layers 2", "heads 2"} <= set(layers) and len(bits) >= 5
    assert set(found) == set(itertools.product((None, *layers), (None, *bits))) - {(None, None)}
    assert len(found) == len(set(found))


def test_a_stage_that_is_left_out_is_read_as_what_it_would_have_been_made_from(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    alone = space.stages(Trial((None, "int8")))
    assert [kind for kind, _ in alone] == ["quantize", "evaluate"] and alone[0][1].model == "teacher"
    student = space.stages(Trial(("layers 2", None)))
    assert student[-1][1].model == "student" and student[-1][1].against == "teacher"
    assert space.stages(Trial(("layers 2", None), brief=True))[0][1].tokens == 1024


def test_trials_share_the_stages_with_which_they_begin(tmp_path: Path) -> None:
    growing = Growing(space_of(tmp_path))
    for bits in ("int8", "int4"):
        growing, _ = growing.add(Trial(("layers 2", bits)))
    kinds = [kind for kind, _ in growing.recipe.stages]
    assert kinds == ["distill", "quantize", "evaluate", "quantize", "evaluate"]
    again, place = growing.add(Trial(("layers 2", "int8")))
    assert again.recipe == growing.recipe and place == 2


# --- in which order ---------------------------------------------------------------------------------------------------

amounts = st.floats(0.1, 10.0)
models = st.lists(st.builds(Measured, st.just("one"), amounts, amounts, amounts), min_size=1, max_size=8)
targets = st.builds(Targets, amounts | st.none(), amounts | st.none(), amounts | st.none())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(models, targets)
def test_what_comes_first_meets_the_targets_if_anything_does_and_no_other_beats_it(
    models: list[Measured], targets: Targets
) -> None:
    def meets(one: Measured) -> bool:
        return (
            (targets.memory is None or one.memory <= targets.memory)
            and (targets.tpot is None or one.tpot <= targets.tpot)
            and (targets.max_kl is None or one.kl <= targets.max_kl)
        )

    names = [Trial((str(number),)) for number in range(len(models))]
    best = models[names.index(order(list(zip(names, models, strict=True)), targets)[0])]
    assert meets(best) or not any(map(meets, models))
    for other in filter(meets, models):
        worse_nowhere = other.memory < best.memory and other.tpot < best.tpot and other.kl < best.kl
        assert not worse_nowhere


def test_where_choices_add_up_the_first_guess_is_what_trying_everything_finds(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    teacher = Measured("teacher", 100.0, 8.0, 0.0)
    kl = {name: 0.03 * (1 + at) for choices in space.choices for at, name in enumerate(choices)}
    fast = {name: 0.95**at for choices in space.choices for at, name in enumerate(choices)}

    def truth(trial: Trial) -> Measured:
        tpot, memory = teacher.tpot, 100.0
        for name in filter(None, trial.choices):
            tpot, memory = tpot * fast[name], memory * fast[name]
        return Measured(trial.name, memory, tpot, sum(kl[name] for name in filter(None, trial.choices)))

    every = space.combinations()
    alone = {one: truth(one) for one in singles(space, {one: round(1e6 * truth(one).memory) for one in every}, every)}
    guesses = [(one, predict(one, truth(one).memory, alone, teacher)) for one in every]
    for bound in (0.05, 0.1, 0.2, 0.4):
        wanted = Targets(max_kl=bound)
        first = order([(one, guess) for one, guess in guesses if guess], wanted)[0]
        allowed = [truth(one) for one in every if truth(one).kl <= bound]
        least = min(one.memory * one.tpot for one in allowed)
        assert truth(first).kl <= bound and truth(first).memory * truth(first).tpot == pytest.approx(least)


def test_choices_are_asked_for_in_the_order_of_the_largest_combinations_that_have_them(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    memory = {}
    for one in space.combinations():
        with suppress(ValueError):  # heads that groups of weights do not divide
            memory[one] = space.weight_bytes(one, tmp_path / "cache")
    assert len(singles(space, memory, list(memory))) == sum(map(len, space.choices))
    fitting = sorted((one for one in memory if all(one.choices)), key=lambda one: -memory[one])[5:]
    found = [replace(one, brief=False) for one in singles(space, memory, fitting)]
    assert len(found) == len(set(found))
    assert set(found) == {one.only(place) for one in fitting for place in (0, 1)}
    assert set(found[:2]) == {fitting[0].only(place) for place in (0, 1)}
    ranks = [
        min(at for at, one in enumerate(fitting) if set(filter(None, lone.choices)) <= set(one.choices))
        for lone in found
    ]
    assert ranks == sorted(ranks)


def test_behind_half_of_the_time_combinations_come_first(tmp_path: Path) -> None:
    """Else a search with many choices ends without one model that has them together."""
    recipe, budget = load_recipe(RECIPE, overrides(tmp_path)), 1000.0
    search = Search(recipe, RunFolder(tmp_path / "tuned"), Targets(), cache=tmp_path / "cache", processes=Processes())
    search.teacher = Measured("teacher", 1.0, 1.0, 0.0)
    first = search._next(time.monotonic() + 0.4 * budget, budget)
    assert first is not None and sum(map(bool, first.choices)) == 1, "nothing can be predicted yet"
    for one in singles(search.space, search.memory, search.fitting)[:2]:
        search.measured[one] = [Measured(one.name, 1.0, 1.0, 0.1)]
        search.records.append(Record([*one.choices], one.brief, "done"))
    early, late = (search._next(time.monotonic() + share * budget, budget) for share in (0.6, 0.4))
    assert early is not None and sum(map(bool, early.choices)) == 1
    assert late is not None and not late.brief and late in search.fitting
    assert all(any(choice in one.choices for one in search.measured) for choice in filter(None, late.choices))


# --- a whole search ---------------------------------------------------------------------------------------------------


def test_a_search_predicts_bytes_exactly_writes_a_recipe_that_runs_and_goes_on(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, overrides(tmp_path))
    folder = RunFolder(tmp_path / "tuned")
    made = _searched(recipe, folder, trials=3)
    for trial, (model, _) in made.measured.items():
        assert made.memory[Trial(trial.choices)] == model.memory
    sentence, path = made.write()
    assert made.best()[1].name in sentence
    page = made.page.read_text()
    assert "Pareto" not in page and "Quality against cost" in page and "teacher" in page
    assert all(one.name in page for found in made.measured.values() for one in found)
    winner = load_recipe(path)
    results = run_recipe(winner, RunFolder(tmp_path / "winner"), cache=tmp_path / "cache", processes=Processes())
    assert results[-1].models[1].weight_bytes == made.best()[1].memory or made.best()[1].verified

    before = {file: file.stat().st_mtime_ns for file in folder.path.glob("*/result.json")}
    again = _searched(recipe, folder, trials=4)
    assert len(again.measured) == 4 and again.measured.items() >= made.measured.items()
    assert all(file.stat().st_mtime_ns == when for file, when in before.items())


def _searched(recipe: Recipe, folder: RunFolder, *, trials: int) -> Search:
    """A search that is stopped, as time would stop it, after so many trials."""
    search = Search(recipe, folder, Targets(max_kl=0.5), cache=folder.path.parent / "cache", processes=Processes())
    choose = search._next
    search._next = lambda *when: choose(*when) if len(search.measured) < trials else None  # type: ignore[method-assign]
    search.execute(3600)
    return search


def test_a_killed_search_goes_on_with_the_trial_that_it_was_at(tmp_path: Path) -> None:
    given = overrides(tmp_path)
    where = ["--folder", str(tmp_path / "tuned"), "--cache", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "pipeline", "tune", str(RECIPE), *given, "--max-kl", "9", *where]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in process.stderr or ():
        if line.startswith("trial 2"):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    begun = json.loads((tmp_path / "tuned" / RECORD).read_text())
    assert begun[0]["state"] == "done"
    (folder,) = (tmp_path / "tuned").glob("01-*")
    first = (folder / "result.json").stat().st_mtime_ns
    search = _searched(load_recipe(RECIPE, given), RunFolder(tmp_path / "tuned"), trials=2)
    assert [record.choices for record in search.records][: len(begun)] == [one["choices"] for one in begun]
    assert (folder / "result.json").stat().st_mtime_ns == first and read_result(folder) is not None


# --- what a user can do wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Say what the result has to meet"),
        (["--memory", "64"], "--memory is '64'; write it like 64MB"),
        (["--tpot", "fast"], "--tpot is 'fast'; write it like 12ms"),
        (["--max-kl", "0"], "--max-kl is '0'; write it like 0.1"),
        (["--max-kl", "1", "--budget", "soon"], "--budget is 'soon'; write it like"),
        (["--memory", "1MB", "stages.2.evaluate.against=null"], "measures no model against its teacher"),
        (["--tpot", "12ms", "stages.2.evaluate.speed.batch_sizes=[2]"], "--tpot is of one request"),
        (["--memory", "0.001MB"], "but the smallest model that can be tried"),
        (["--max-kl", "1", "--budget", "1ms"], "The budget is over and no trial is finished"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--folder", str(tmp_path / "tuned"), "--cache", str(tmp_path / "cache")]
    assert main(["tune", str(RECIPE), *overrides(tmp_path), *arguments, *where]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and sentence in said[0]


def test_the_budget_ends_a_search_that_a_shell_started_in_the_background() -> None:
    """Such a process ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), alarm_after(0.05):
            time.sleep(5)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
