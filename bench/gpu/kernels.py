"""The parts of `bench.kernels` as parts of the hour: right on tiny shapes first, then beside their peers."""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.figures import ITSELF, ROOFLINE, Figure, Goal
from bench.gpu.task import NotDone, Task, Unfinished
from bench.kernels import goals
from bench.kernels.__main__ import interpret_without_gpu, merge, ours_right, run_part
from bench.kernels.case import Case

MARGIN_S = 30.0
"""For the last shape, which may take longer than its share."""
WEIGHED = "times_our_peak"


class Wrong(NotDone):
    """A kernel of ours gives other numbers than its reference."""


def correct(task: Task, parts: Iterable[str]) -> Iterator[Figure]:
    """How many tiny shapes are right on this device; raises Wrong, once all are tried, where one is not."""
    interpret_without_gpu()
    from bench.kernels.cases import PARTS, parts_named

    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in (name for family in parts for name in parts_named(family)):
            cases = [of_ours(case) for case in PARTS[name].cases(tiny=True)]
            for found in run_part(name, cases, Path(scratch, f"{name}.json"), tiny=True):
                right = sum(map(ours_right, found["cases"]))
                yield Figure(f"{name}: right", "tiny shapes", right, goals=(Goal(ITSELF, len(cases)),))
            wrong += [f"{name} {case['name']}" for case in found["cases"] if not ours_right(case)]
    if wrong:
        raise Wrong(f"not right: {', '.join(wrong)}")


def of_ours(case: Case) -> Case:
    """Without its peers."""
    return replace(case, candidates=[one for one in case.candidates if one.role != "peer"])


def beside_peers(task: Task, part: str) -> Iterator[Figure]:
    """The worst shape of a part, and the worst for each of its goals; all shapes are in results/kernels-GPU.json."""
    interpret_without_gpu()
    from bench.kernels.cases import PARTS

    cases, path = PARTS[part].cases(tiny=task.tiny), task.folder / "kernels" / f"{part}.json"
    found: dict[str, Any] = {"cases": []}
    for found in run_part(part, cases, path, tiny=task.tiny, again=task.again, seconds=task.seconds - MARGIN_S):
        yield from figures_of(found)
    merge(task.folder, tiny=task.tiny)
    if wrong := [case["name"] for case in found["cases"] if not ours_right(case)]:
        raise Wrong(f"not right: {', '.join(wrong)}")
    if left := len(cases) - len(found["cases"]):
        raise Unfinished(f"{left} of {len(cases)} shapes are left")


def figures_of(part: dict[str, Any]) -> Iterator[Figure]:
    """Of what has been measured of a part so far."""
    measured = [case for case in part["cases"] if ours_right(case)]
    everywhere = [figure_of(case) for case in measured]
    if everywhere:
        yield replace(min(everywhere, key=_closeness), name=f"{part['part']}, worst shape")
    for goal in goals.GOALS:
        concerned = [case for case in measured if goal.part == part["part"] and goal.concerns(case)]
        reaching = [case for case in concerned if goal.figure in case["candidates"].get(goal.candidate, ())]
        if reaching:
            worst = min(reaching, key=lambda case: case["candidates"][goal.candidate][goal.figure])
            yield replace(figure_of(worst, goal), name=goal.text)


def figure_of(case: dict[str, Any], goal: goals.Goal | None = None) -> Figure:
    """A shape: what its bound is counted in, or memory, in which less is better."""
    [(name, ours)] = [(name, one) for name, one in case["candidates"].items() if one["role"] == "ours"]
    others = {other: one for other, one in case["candidates"].items() if "median_s" in one and other != name}
    if goal is not None and goal.figure == WEIGHED:
        peaks = {other: one["peak_bytes"] / 1e9 for other, one in others.items()}
        aims = (Goal(goal.candidate, 1 / goal.at_least),)
        return Figure("", "GB", ours["peak_bytes"] / 1e9, peaks, goals=aims, less_is_better=True, note=case["name"])
    figure, unit = ("tflop_per_s", "TFLOP/s") if case["bound"] == "compute" else ("gb_per_s", "GB/s")
    rate = ours[figure]
    rates = {other: rate / one["times_ours"] for other, one in others.items()}
    peers = {other: value for other, value in rates.items() if others[other]["role"] == "peer"}
    baselines = {other: value for other, value in rates.items() if other not in peers}
    aims = () if goal is None else (Goal(ROOFLINE if goal.candidate == name else goal.candidate, goal.at_least),)
    limit = rate / ours["roofline_fraction"]
    return Figure("", unit, rate, peers, limit, aims, references=baselines, note=case["name"])


def _closeness(figure: Figure) -> float:
    """To the best peer; without one, to the limit."""
    ratio = figure.ratio()
    return (figure.ours or 0.0) / (figure.roofline or torch.inf) if ratio is None else ratio
