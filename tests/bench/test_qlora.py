"""The benchmark of QLoRA steps end to end on a tiny model, and that nothing wrong is timed."""

from typing import Any

import pytest

from bench.train import qlora
from bench.train.sides import Benchmark, Case, Part, Recorder, Side, time_side
from pipeline.stages.qlora.config import Qlora
from train.config import TrainingConfig


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return qlora.prepare_inputs(tmp_path_factory.mktemp("qlora"), tiny=True)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Part, str]]:
    """The parts that ran, in this process instead of their own."""
    parts: list[tuple[Part, str]] = []

    def run_here(benchmark: Benchmark, part: Part, side: str, case: Case) -> dict[str, Any]:
        parts.append((part, side))
        return part(benchmark.sides[side], case)

    monkeypatch.setattr(Benchmark, "run", run_here)
    return parts


def test_both_sides_take_the_same_step_and_are_timed_by_turns(case: Case, ran: list[tuple[Part, str]]) -> None:
    result = qlora.compare(case, rounds=2)
    parts = (qlora.check_side, time_side, time_side)
    assert ran == [(part, side) for part in parts for side in ("potstill", "peft")]
    for side in result["sides"].values():
        assert len(side["all_tokens_per_s"]) == 2 * (case.steps - case.warm_up) and side["tokens_per_s"] > 0
        assert side["peak_bytes"] > side["weight_bytes"] and side.get("process_bytes", 0) >= 0
        assert len(side["losses"]) == case.steps
    ours, theirs = (result["sides"][name] for name in ("potstill", "peft"))
    assert result["ratio_speed"] == ours["tokens_per_s"] / theirs["tokens_per_s"]
    assert result["ratio_peak_memory"] == ours["peak_bytes"] / theirs["peak_bytes"]
    planned = result["planned_bytes"]
    assert planned["weights"] + planned["adapters"] == ours["weight_bytes"]
    assert result["planned_over_measured"] == planned["peak"] / ours["peak_bytes"]


def test_other_losses_are_never_timed(case: Case, ran: list[tuple[Part, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A side whose loss is two percent off."""

    def off(case: Case) -> Side:
        side = qlora.beside_peft(case)

        class Off(Recorder):
            def __init__(self, recorder: Recorder) -> None:
                self.recorder = recorder

            def log(self, step: int, metrics: dict[str, float], timings: dict[str, float]) -> None:
                self.recorder.log(step, {"loss": 1.02 * metrics["loss"]}, timings)

        return Side(lambda recorder: side.train(Off(recorder)), side.weight_bytes)

    monkeypatch.setitem(qlora.SIDES, "peft", off)
    with pytest.raises(RuntimeError, match=r"The first losses are \d+\.\d+ and \d+\.\d+: these are not the same step"):
        qlora.compare(case, rounds=1)
    assert {part for part, _ in ran} == {qlora.check_side}


def test_the_settings_are_those_of_the_stage(case: Case) -> None:
    stage = Qlora(model="base", data="text", **case.budget)
    differing = {
        name for name in vars(TrainingConfig(tokens=1)) if getattr(stage, name) != getattr(qlora.config_of(case), name)
    }
    assert differing == {"warmup_fraction"} and stage.quantization == "nf4"
