"""The benchmark of kernels, on the CPU: every part end to end, and that nothing wrong ever gets a time."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels import __main__ as driver
from bench.kernels import cases as table
from bench.kernels import goals, timing
from bench.kernels.case import Candidate, Case, Shape, by_name, needs
from bench.kernels.families.attention import documents, last_rows, paged
from bench.kernels.plot import draw
from bench.kernels.timing import Clock, GpuClock, Lab, Limits, Program, run_case
from kernels.attention import rotary_write
from kernels.attention.flash import flash_attention_reference
from kernels.attention.paged import paged_attention_reference
from kernels.swiglu import swiglu
from tests.compare import check_all_close, check_close

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LAB = Lab(CPU, Clock(), l2_bytes=0, limits=Limits(1e10, 1e11), rounds=4)


def small_case(**candidates: Any) -> Case:
    """x + 1, by `ours` and by the peers named; each a function of x."""

    def adapter(function: Any) -> Any:
        return lambda inputs: lambda: function(inputs.x)

    listed = [Candidate("ours", adapter(candidates.pop("ours", lambda x: x + 1)), role="ours")]
    listed += [Candidate(name, adapter(function)) for name, function in candidates.items()]
    return Case(SUM, listed)


def numbers() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(64, dtype=torch.bfloat16)}


SUM = Shape("sum", {"n": 64}, numbers, lambda inputs: (inputs.x.double() + 1,), num_bytes=256.0, flops=64.0)


def run_tiny(out: Path, *arguments: str) -> int:
    return driver.main(["--tiny", "--out", str(out), *arguments])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.slow
def test_every_part_runs_through_the_interpreter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, (out, err) = run_tiny(tmp_path), capsys.readouterr()
    assert code == 0, out + err
    assert "µs" not in out and "/s" not in out, "a tiny run has no speeds to show"
    joined = read(tmp_path / "kernels-tiny.json")
    assert {part["part"] for part in joined["parts"]} == set(table.PARTS)
    for part in joined["parts"]:
        names = [case.shape.name for case in table.PARTS[part["part"]].cases(tiny=True)]
        assert [case["name"] for case in part["cases"]] == names
        for case in part["cases"]:
            assert case["candidates"]["potstill"]["status"] == "measured", case
            assert not [found for found in case["candidates"].values() if found["status"] == "red"], case
    ElementTree.parse(tmp_path / "kernels-tiny.svg")


def test_the_command_turns_the_interpreter_on_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.kernels", "--tiny", "--out", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = ["--parts", "fused", "--only", "swiglu 32x80"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "potstill right" in done.stdout, done.stdout + done.stderr


def test_there_are_parts_for_everything_the_goals_name() -> None:
    expected = {"flash_forward", "flash_backward", "decode", "verify", "prefill_paged", "fused"}
    assert expected <= set(table.PARTS)
    for part in table.PARTS.values():
        names = [case.shape.name for case in part.cases(tiny=False)]
        assert len(names) == len(set(names)), "cases are found again by their names"
        assert part.text


def test_without_a_gpu_it_says_how_to_try_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert driver.main(["--out", str(tmp_path)]) == 2
    assert "--tiny" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_tiny(tmp_path, "--parts", "fused,flesh") == 2
    assert "'flesh'" in capsys.readouterr().err


def test_a_wrong_kernel_gets_no_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scaled = lambda gate, up: (1.01 * swiglu(gate.float(), up.float())).to(gate.dtype)  # noqa: E731
    [gates] = [group for group in table.PARTS["fused"].groups if group.candidates is table.GATE]
    wrong = replace(gates, candidates=[replace(table.GATE[0], adapt=by_name(scaled)), *table.GATE[1:]])
    monkeypatch.setitem(table.PARTS, "fused", table.Part("", wrong))
    assert run_tiny(tmp_path, "--parts", "fused", "--only", "swiglu") == 1
    out, err = capsys.readouterr()
    assert "potstill: red error 0.01" in err
    assert "potstill RED" in out and "NOT RIGHT: fused swiglu" in err
    for case in read(tmp_path / "kernels" / "fused.json")["cases"]:
        ours = case["candidates"]["potstill"]
        assert ours["status"] == "red" and ours["error"] > 8e-3
        assert not {"median_s", "gb_per_s", "roofline_fraction"} & set(ours)
        assert not any("times_ours" in found for found in case["candidates"].values())
    monkeypatch.undo()
    assert run_tiny(tmp_path, "--parts", "fused", "--only", "swiglu") == 0, "what was wrong is measured again"


def test_a_tiny_run_goes_through_the_triton_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen: list[bool] = []
    runs_triton = rotary_write.runs_triton
    monkeypatch.setattr(rotary_write, "runs_triton", lambda x: chosen.append(runs_triton(x)) or chosen[-1])
    assert run_tiny(tmp_path, "--parts", "fused", "--only", "rotary") == 0
    assert any(chosen)


def test_what_is_measured_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "kernels" / "fused.json"

    def seeds(*arguments: str) -> list[int]:
        assert run_tiny(tmp_path, "--parts", "fused", *arguments) == 0
        return [case["seed"] for case in read(path)["cases"]]

    first = seeds("--only", "swiglu 32x80")
    assert len(first) == 2
    assert seeds("--only", "swiglu 32x80") == first
    assert "already measured" in capsys.readouterr().out
    longer = seeds("--only", "x80")
    assert longer == first
    forward, both = seeds("--only", "forward+backward", "--again")[:2]
    assert forward not in first or both not in first
    # Another state of the sources is another measurement.
    monkeypatch.setattr(driver, "identify", lambda *, tiny: {"gpu": None, "tiny": tiny, "sources": "others"})
    assert not set(seeds("--only", "swiglu 32x80")) & set(first)


def test_a_part_that_goes_on_says_first_what_it_knows(tmp_path: Path) -> None:
    cases, path = table.PARTS["fused"].cases(tiny=True), tmp_path / "fused.json"
    assert [len(part["cases"]) for part in driver.run_part("fused", cases, path, tiny=True, only="swiglu")] == [1, 2]
    assert len(next(driver.run_part("fused", cases, path, tiny=True))["cases"]) == 2
    assert not list(driver.run_part("fused", cases, path, tiny=True, again=True, seconds=0.0)), "none of it is kept"


def test_peers_that_are_wrong_absent_or_broken_are_listed_with_the_reason() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image\nand more")

    case = small_case(
        right=lambda x: x + 1,
        scaled=lambda x: 1.01 * (x + 1),
        unwritten=lambda x: torch.full_like(x, torch.nan),
        broken=broken,
    )
    missing = Candidate("missing", needs("no_such_package")(lambda package, inputs: package))
    case = replace(case, candidates=[*case.candidates, missing])
    found = run_case(case, LAB, 60.0)["candidates"]
    assert {name: one["status"] for name, one in found.items()} == {
        "ours": "measured",
        "right": "measured",
        "scaled": "red",
        "unwritten": "red",
        "broken": "failed",
        "missing": "absent",
    }
    assert found["broken"]["reason"] == "RuntimeError: no kernel image"
    assert found["missing"]["reason"] == "not installed"
    assert [name for name, one in found.items() if "median_s" in one] == ["ours", "right"]
    json.dumps(found)


def test_rates_and_ratios_follow_from_the_times() -> None:
    class FixedClock(Clock):
        """The first two programs, which are ours, take 2 µs, all others 3."""

        made = 0

        def program(self, runs: Any) -> Any:
            self.made += 1
            return replace(super().program(runs), launch="ours" if self.made <= 2 else "peer")

        def seconds(self, programs: Any) -> list[float]:
            return [2e-6 if program.launch == "ours" else 3e-6 for program in programs]

    case = small_case(peer=lambda x: x + 1)
    lab = Lab(CPU, FixedClock(), l2_bytes=0, limits=Limits(1e9, 1e12), rounds=4)
    result = run_case(case, lab, 60.0)
    ours, peer = result["candidates"]["ours"], result["candidates"]["peer"]
    assert result["bound"] == "memory" and result["floor_s"] == pytest.approx(256e-9)
    assert ours["median_s"] == ours["p10_s"] == ours["p90_s"] == 2e-6
    assert ours["gb_per_s"] == pytest.approx(0.128) and ours["tflop_per_s"] == pytest.approx(32e-6)
    assert ours["roofline_fraction"] == pytest.approx(0.128)
    assert peer["times_ours"] == pytest.approx(1.5) and "times_ours" not in ours


def test_inputs_outgrow_the_cache_and_short_calls_share_a_graph() -> None:
    made: list[torch.Tensor] = []

    class Recorder(Clock):
        calls: tuple[int, ...] = ()

        def program(self, runs: Any) -> Any:
            self.calls = (*self.calls, len(runs))
            return super().program(runs)

    def make() -> dict[str, torch.Tensor]:
        with CPU:
            made.append(numbers()["x"])
        return {"x": made[-1]}

    clock = Recorder()
    # A device that is no CPU, so that calls are grouped as they are on a GPU: 128 bytes a set, 10 µs a call.
    lab = Lab(torch.device("meta"), clock, l2_bytes=6400, limits=Limits(25.6e6, 1e12), rounds=4)
    result = run_case(Case(replace(SUM, make=make), small_case().candidates), lab, 60.0)
    assert clock.calls == (5,) * 20
    assert len(made) == result["input_sets"] == 100 >= 2 * 6400 / 128
    assert len({tuple(x.tolist()) for x in made}) == 100, "every set has its own random numbers"


def test_who_overwrites_inputs_works_on_copies() -> None:
    def spoil(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    case = small_case(spoiler=spoil, after=lambda x: x + 1)
    case = replace(case, candidates=[replace(one, in_place=one.name == "spoiler") for one in case.candidates])
    found = run_case(case, LAB, 60.0)["candidates"]
    assert {one["status"] for one in found.values()} == {"measured"}


class Recording(Clock):
    """Replays as a graph does: into the tensors of the recorded call. A `dead` one writes nothing."""

    def __init__(self, dead: bool) -> None:
        self.dead = dead

    def program(self, runs: Any) -> Program:
        outputs = runs[0]()

        def play() -> None:
            for output, fresh in zip(outputs, runs[0](), strict=True):
                if not self.dead:
                    output.copy_(fresh)

        return Program(play, len(runs), "graph", outputs)


@pytest.mark.parametrize("dead", [False, True])
def test_what_is_replayed_is_checked_too(dead: bool) -> None:
    lab = Lab(CPU, Recording(dead), l2_bytes=0, limits=Limits(1e10, 1e11), rounds=4)
    ours = run_case(small_case(), lab, 60.0)["candidates"]["ours"]
    assert ours["status"] == ("red" if dead else "measured")
    assert ("median_s" in ours) != dead


def test_where_no_graph_can_be_captured_calls_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoGraph:
        def capture_begin(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    played: list[int] = []
    program = GpuClock().program([lambda: played.append(1) or (), lambda: played.append(2) or ()])
    program.play()
    assert played == [1, 2] and program.calls == 2 and not program.outputs
    assert program.launch == "no graph: RuntimeError: operation not permitted when stream is capturing"


def test_who_reads_results_or_is_weighed_is_not_captured() -> None:
    captured: list[int] = []

    class Capturing(Clock):
        def program(self, runs: Any) -> Program:
            captured.append(len(runs))
            return super().program(runs)

    lab = Lab(CPU, Capturing(), l2_bytes=0, limits=Limits(1e10, 1e11), rounds=4)
    case = small_case(peer=lambda x: x + 1)
    reader = replace(case, candidates=[case.candidates[0], replace(case.candidates[1], reads_on_host=True)])
    for one, programs in ((case, 4), (reader, 2), (replace(case, measures_memory=True), 0)):
        captured.clear()
        assert {found["status"] for found in run_case(one, lab, 60.0)["candidates"].values()} == {"measured"}
        assert len(captured) == programs


def test_integers_must_be_equal() -> None:
    def outputs(last: int) -> Any:
        return lambda inputs: lambda: (torch.tensor([1000, 2000, last]),)

    listed = [Candidate("ours", outputs(3000), role="ours"), Candidate("near", outputs(3001))]
    case = Case(replace(SUM, reference=lambda inputs: (torch.tensor([1000, 2000, 3000]),)), listed)
    found = run_case(case, LAB, 60.0)["candidates"]
    assert found["ours"]["status"] == "measured" and found["near"]["status"] == "red"
    assert found["near"]["error"] == pytest.approx(1 / 3)


def test_long_rounds_are_fewer() -> None:
    rounds = [timing.number_of_rounds(seconds) for seconds in (1e-3, 1 / 60, 0.1, 0.25, 2.0)]
    assert rounds == [240, 120, 60, 40, 20]


def test_a_family_of_parts_has_a_name() -> None:
    assert table.parts_named("decode") == ["decode"]
    assert table.parts_named("losses") == ["losses_cross_entropy", "losses_distillation"]
    assert len(table.parts_named("quantized")) == 6 and not table.parts_named("quant")


def test_memory_is_compared_and_shown() -> None:
    found = {
        "potstill": measured("ours", 10, peak_bytes=2e9, roofline_fraction=0.5, tflop_per_s=1.0),
        "dense": measured("peer", 30, peak_bytes=14e9),
    }
    timing.add_rates(SUM, LAB.limits, found)
    assert found["dense"]["times_our_peak"] == 7.0 and "times_our_peak" not in found["potstill"]
    line, _ = driver.describe({"name": "x", "bound": "compute", "candidates": found}, speeds=True)
    assert "2.00 GB" in line and "dense 3.00x, 7.0x the memory" in line


def test_slow_compilers_are_left_out_when_time_runs_out() -> None:
    case = small_case()
    slow = Candidate("slow", case.candidates[0].adapt, compiles=True)
    case = replace(case, candidates=[*case.candidates, slow])
    assert run_case(case, LAB, 60.0)["candidates"]["slow"]["status"] == "measured"
    assert run_case(case, LAB, 1.0)["candidates"]["slow"]["status"] == "left out"


def test_references_in_pieces_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kernels.families.attention.BAND", 7)
    inputs = documents(2, 30, 4, 2, 8, "forward+backward").inputs(CPU)
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = flash_attention_reference(*leaves, inputs.cu_seqlens_q)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, inputs.grad.double()))
    check_all_close(inputs.shape.reference(inputs), expected)
    alone = documents(2, 30, 4, 2, 8, "backward")
    check_all_close(alone.reference(inputs.replace(shape=alone)), expected[1:])


def test_paged_inputs_are_what_they_say() -> None:
    shape = paged(3, 2, 40, 4, 2, 8, ragged=True)
    inputs = shape.inputs(CPU)
    assert inputs.lengths == [16, 28, 40] and inputs.kv_lengths.tolist() == [16, 28, 40]
    used = [inputs.block_tables[row, : -(-length // 16)].tolist() for row, length in enumerate(inputs.lengths)]
    assert sorted(page for pages in used for page in pages) == list(range(6)), "every page belongs to one sequence"
    wide = [x.double() for x in (inputs.q, inputs.k_pages, inputs.v_pages)]
    whole = paged_attention_reference(*wide, inputs.block_tables, inputs.cu_seqlens_q, inputs.kv_lengths)
    check_close(shape.reference(inputs)[0], whole)
    check_close(shape.reference(last_rows(inputs))[0], whole[1::2])


def test_costs_are_the_textbook_ones() -> None:
    shape = documents(1, 16_384, 16, 16, 128)
    assert shape.flops == 4 * 16_384**2 * 2048 / 2
    assert shape.num_bytes == 4 * 16_384 * 2048 * 2
    decode = paged(8, 1, 8192, 32, 8, 128)
    assert decode.num_bytes == 8 * (8192 * 8 * 128 * 2 * 2 + 2 * 32 * 128 * 2 + 512 * 4)
    assert decode.flops == 8 * 4 * 8192 * 32 * 128
    assert paged(1, 4, 10, 1, 1, 1).flops == 4 * (7 + 8 + 9 + 10)


LIMITS = {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 7e14}


def measured(role: str, microseconds: float, **more: float) -> dict[str, Any]:
    return {"status": "measured", "role": role, "median_s": microseconds / 1e6, **more}


def test_the_plot_has_a_row_for_each_shape_and_says_what_is_wrong() -> None:
    good = {
        "potstill": measured("ours", 10, roofline_fraction=0.8),
        "sdpa_flash": measured("peer", 12, roofline_fraction=0.6, times_ours=1.2),
        "far<away>": measured("peer", 990, roofline_fraction=0.01, times_ours=99.0),
    }
    bad = {"potstill": {"status": "red", "role": "ours", "error": 0.1}}
    cases = [{"name": "a & b", "candidates": good}, {"name": "c", "candidates": bad}, {"name": "d", "candidates": {}}]
    svg = draw({"gpu": "NVIDIA <H200>", "tiny": False, "parts": [{"part": "decode", "limits": LIMITS, "cases": cases}]})
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "c", "d", "RED", "FAILED", "potstill, kernels on NVIDIA <H200>", "far<away>"} <= set(texts)
    assert len(list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polygon"))) == 1, "99 is off the axis"


def test_merging_keeps_to_one_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def part(name: str, gpu: str, written: float) -> None:
        candidates = {"potstill": measured("ours", 10, roofline_fraction=0.8)}
        content = {
            "part": name,
            "identity": {"gpu": gpu, "tiny": False},
            "limits": LIMITS,
            "written": written,
            "cases": [{"name": "x", "bytes": 1.0, "shape": {"batch": 1}, "candidates": candidates}],
        }
        (tmp_path / "kernels").mkdir(exist_ok=True)
        (tmp_path / "kernels" / f"{name}.json").write_text(json.dumps(content))

    assert driver.main(["--merge", "--out", str(tmp_path)]) == 2
    part("decode", "NVIDIA A100", 1.0)
    part("fused", "NVIDIA H200", 2.0)
    part("verify", "NVIDIA H200", 3.0)
    assert driver.main(["--merge", "--out", str(tmp_path)]) == 0
    joined = read(tmp_path / "kernels-nvidia-h200.json")
    assert [part["part"] for part in joined["parts"]] == ["fused", "verify"]
    assert "decode" in capsys.readouterr().err


def test_goals_are_compared_by_the_worst_shape() -> None:
    def case(name: str, head_dim: int, length: int, flash: float | None) -> dict[str, Any]:
        found = {"status": "failed"} if flash is None else {"times_ours": flash}
        return {"name": name, "shape": {"head_dim": head_dim, "length": length}, "candidates": {"sdpa_flash": found}}

    cases = [case("a", 128, 4096, 1.9), case("b", 128, 8192, 1.5), case("c", 128, 2048, 1.0), case("d", 64, 8192, 1.1)]
    forward = {"part": "flash_forward", "cases": [*cases, case("e", 128, 4096, None)]}
    first, second, *_ = goals.compare([forward])
    assert (first["worst"], first["worst_shape"], first["shapes"], first["reached"]) == (1.5, "b", 2, False)
    assert second["reached"] is None and "not measured" in goals.describe(second)
    cases[1] = case("b", 128, 8192, 1.7)
    assert next(goals.compare([{"part": "flash_forward", "cases": cases}]))["reached"]


def test_goals_name_parts_and_candidates_that_exist() -> None:
    for goal in goals.GOALS:
        cases = table.PARTS[goal.part].cases(tiny=False)
        shown = [({"shape": case.shape.fields, "bytes": case.shape.num_bytes}, case) for case in cases]
        concerned = [case for result, case in shown if goal.concerns(result)]
        assert concerned, goal.text
        assert all(goal.candidate in {one.name for one in case.candidates} for case in concerned), goal.text
