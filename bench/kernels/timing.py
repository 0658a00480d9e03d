"""How a kernel is timed and checked: beside its peers in one process, on inputs that no cache still holds.

Each candidate is compared with the case's reference first, and a wrong one gets no time. The right ones run by turns
(A B C, B C A, …), each time on the next of several sets of inputs that together are larger than twice the L2 cache. On
a GPU, one CUDA graph of each candidate and set is replayed between two events; calls of a few microseconds share a
graph, a set each, so that the events measure them and not the launch. Times are medians. The limits that they are
compared with, copy bandwidth and the rate of a bf16 matrix product, are measured in the same process. Where memory
counts, calls are not captured, and the most that one holds beside its inputs is kept beside its time.
"""

import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from timeit import timeit
from typing import Any

import torch
from torch import Tensor

from bench.common import gpu_peak_bytes
from bench.kernels.case import Call, Candidate, Case, NotItsTask, Outputs, Shape, tensors
from tests.compare import BOUNDS, relative_rms

FEWEST_ROUNDS, ROUNDS, MOST_ROUNDS = 20, 60, 240
MEASURED_S, LONGEST_S = 2.0, 10.0
"""How long a case is timed: in up to MOST_ROUNDS if they are short, and in less than ROUNDS if these are too long."""
WARM_UP_S = 0.1
ROUNDS_IN_FLIGHT = 10
SHORT_S, MOST_CALLS = 50e-6, 32
"""Calls whose floor is below this share a CUDA graph, at most so many."""
ONE_SET_BYTES = 4 * 2**30
"""Inputs of this size are far larger than any cache, alone."""
COMPILING_S = 8.0
"""What a case must be allowed to take for peers that torch.compile builds anew for each shape."""


@dataclass
class Program:
    """Something to replay: `calls` calls of one candidate, each on inputs of its own."""

    play: Callable[[], object]
    calls: int
    launch: str
    outputs: Outputs = ()
    """Where a replay writes what the first call returns; empty where nothing is replayed."""


def uncaptured(runs: Sequence[Call], launch: str = "call") -> Program:
    return Program(lambda: [run() for run in runs], len(runs), launch)


class Clock:
    """The host's: for --tiny on a CPU, where it shows that everything runs, and for what decodes there."""

    def program(self, runs: Sequence[Call]) -> Program:
        return uncaptured(runs)

    def seconds(self, programs: Sequence[Program]) -> list[float]:
        return [timeit(program.play, number=1) for program in programs]


class GpuClock(Clock):
    """CUDA graphs and events, on the current stream, which must not be the default one."""

    def program(self, runs: Sequence[Call]) -> Program:
        """Capture the calls in one graph; where that fails, launch them one by one and say why."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin()
            outputs = [run() for run in runs]
            graph.capture_end()
        except Exception as error:
            _abandon(graph)
            torch.cuda.synchronize()
            return uncaptured(runs, f"no graph: {one_line(error)}")
        return Program(graph.replay, len(runs), "graph", outputs[0])

    def seconds(self, programs: Sequence[Program]) -> list[float]:
        """Time each program, all launched while the GPU sleeps, so that it never waits for the host."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in programs]
        torch.cuda._sleep(40_000 * len(programs))
        for (start, stop), program in zip(events, programs, strict=True):
            start.record()
            program.play()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in events]


def clock_of(device: torch.device) -> Clock:
    return GpuClock() if device.type == "cuda" else Clock()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that failed. Its random generator would go on believing in it; one with a copy of its state not."""
    with suppress(Exception):
        graph.capture_end()
    with suppress(Exception):
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


@dataclass(frozen=True)
class Limits:
    """What the machine does at best, measured in the same run."""

    copy_bytes_per_s: float
    matmul_flop_per_s: float

    def floor(self, shape: Shape) -> tuple[float, str]:
        """Seconds, and what takes them."""
        memory_s, compute_s = shape.num_bytes / self.copy_bytes_per_s, shape.flops / self.matmul_flop_per_s
        return (compute_s, "compute") if compute_s > memory_s else (memory_s, "memory")


@dataclass(frozen=True)
class Lab:
    """Where cases run. Use it within its stream."""

    device: torch.device
    clock: Clock
    l2_bytes: int
    limits: Limits
    rounds: int | None = None

    @classmethod
    def open(cls, device: torch.device) -> "Lab":
        clock = clock_of(device)
        if device.type != "cuda":
            return cls(device, clock, 0, measure_limits(device, clock, 2**20, 128), rounds=2)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        return cls(device, clock, l2_bytes, measure_limits(device, clock, 2**29, 8192))


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Graphs can be captured on any stream but the default one."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def measure_limits(device: torch.device, clock: Clock, elements: int, n: int) -> Limits:
    """Copy `elements` fp32 numbers (bytes read and written both count); multiply two n × n bf16 matrices."""
    source, (a, b) = torch.randn(elements, device=device), torch.randn(2, n, n, device=device).bfloat16()
    target, result = torch.empty_like(source), torch.empty_like(a)
    calls = (partial(target.copy_, source), partial(torch.mm, a, b, out=result))
    programs = [Program(call, 1, "call") for call in calls]
    clock.seconds(programs * 5)
    times = clock.seconds(programs * 30)
    return Limits(8 * elements / statistics.median(times[::2]), 2 * n**3 / statistics.median(times[1::2]))


def run_case(case: Case, lab: Lab, budget_s: float) -> dict[str, Any]:
    """Check every candidate, time those that are right, and return all of it as JSON."""
    torch.compiler.reset()
    seed, shape, (floor_s, bound) = torch.seed(), case.shape, lab.limits.floor(case.shape)
    measurement = _Measurement(case, lab, budget_s)
    measurement.run()
    return {
        "name": shape.name, "shape": dict(shape.fields), "dtype": str(shape.dtype).removeprefix("torch."),
        "flops": shape.flops, "bytes": shape.num_bytes, "floor_s": floor_s, "bound": bound, "seed": seed,
        "input_sets": measurement.num_sets, "candidates": measurement.found,
    }  # fmt: skip


class _Measurement:
    """One case; `found` is what is known of each candidate."""

    def __init__(self, case: Case, lab: Lab, budget_s: float) -> None:
        self.case, self.lab, self.budget_s = case, lab, budget_s
        self.sets = [case.shape.inputs(lab.device)]
        self.expected = case.shape.reference(self.sets[0])
        self.found = {one.name: dict[str, Any](status="right", role=one.role) for one in case.candidates}
        self.programs: dict[str, list[Program]] = {}
        self.calls, self.num_sets = self._sizes()

    def run(self) -> None:
        self._take(self._check)
        self.sets += [self.case.shape.inputs(self.lab.device) for _ in range(self.num_sets - 1)]
        self._take(self._build)
        for name, samples in interleave(self.programs, self.lab.clock, self.lab.rounds).items():
            p10_s, *_, p90_s = statistics.quantiles(samples, n=10, method="inclusive")
            times = {"median_s": statistics.median(samples), "p10_s": p10_s, "p90_s": p90_s}
            launch = {"status": "measured", "launch": self.programs[name][0].launch, "rounds": len(samples)}
            self.found[name] |= launch | times
        add_rates(self.case.shape, self.lab.limits, self.found)

    def _take(self, step: Callable[[Candidate], dict[str, Any]]) -> None:
        """Note what a step finds out about every candidate that is right so far."""
        for candidate in self.case.candidates:
            found = self.found[candidate.name]
            if found["status"] != "right":
                continue
            try:
                found |= step(candidate)
            except NotItsTask as reason:
                found |= {"status": reason.status, "reason": str(reason)}
            except Exception as error:
                if candidate.role != "peer":
                    traceback.print_exc()
                found |= {"status": "failed", "reason": one_line(error)}

    def _check(self, candidate: Candidate) -> dict[str, Any]:
        if candidate.compiles and self.budget_s < COMPILING_S:
            raise NotItsTask(f"only {self.budget_s:.0f} s for this shape")
        run = candidate.prepare(self.sets[0])
        checked = self._compare(candidate, run())
        if self.case.measures_memory and torch.cuda.is_available():
            before = torch.cuda.memory_allocated()
            checked["peak_bytes"] = gpu_peak_bytes(run) - before
        return checked

    def _compare(self, candidate: Candidate, outputs: Outputs) -> dict[str, Any]:
        """Right if no output is off by more than the tests' bound for this dtype; integers must be equal."""
        errors, is_right = [], True
        for actual, wanted in zip(*candidate.compare(outputs, self.expected), strict=True):
            error = _error(actual.detach().reshape(wanted.shape), wanted)
            is_right &= error <= (BOUNDS[self.case.shape.dtype] if wanted.is_floating_point() else 0)
            errors.append(error)
        worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        return {"status": "right" if is_right else "red", "error": worst if math.isfinite(worst) else str(worst)}

    def _sizes(self) -> tuple[int, int]:
        """How many calls share a graph, and how many sets of inputs there are."""
        size = sum(x.nbytes for x in tensors(self.sets[0]))
        if size >= ONE_SET_BYTES:
            return 1, 1
        floor_s, _ = self.lab.limits.floor(self.case.shape)
        calls = 1 if self.lab.device.type == "cpu" else min(MOST_CALLS, math.ceil(SHORT_S / floor_s))
        return calls, calls * max(2, math.ceil(2 * self.lab.l2_bytes / (size * calls)))

    def _build(self, candidate: Candidate) -> dict[str, Any]:
        """A program for each group of sets. What a graph writes is filled with NaN, replayed and compared again."""
        calls_alone = self.case.measures_memory or candidate.reads_on_host
        launch = uncaptured if calls_alone else self.lab.clock.program
        runs = [candidate.prepare(inputs) for inputs in self.sets]
        programs = [launch(runs[first : first + self.calls]) for first in range(0, len(runs), self.calls)]
        if programs[0].outputs and not candidate.in_place:
            given = {x.untyped_storage().data_ptr() for x in tensors(self.sets[0])}
            for output in programs[0].outputs:
                if output.untyped_storage().data_ptr() not in given:
                    _poison(output.detach())
            programs[0].play()
            checked = self._compare(candidate, programs[0].outputs)
            if checked["status"] == "red":
                return checked | {"reason": "right when called, wrong when replayed from a graph"}
        self.programs[candidate.name] = programs
        return {}


def _error(actual: Tensor, wanted: Tensor) -> float:
    """The relative RMS error; of integers the share that differs."""
    if wanted.is_floating_point():
        return relative_rms(actual.double(), wanted.double())
    return (actual != wanted).double().mean().item() if wanted.numel() else 0.0


def _poison(output: Tensor) -> None:
    """NaN; for integers the least, which is no token and no count."""
    if output.is_floating_point():
        output.fill_(torch.nan)
    elif output.dtype != torch.bool:
        output.fill_(torch.iinfo(output.dtype).min)


def interleave(programs: Mapping[str, Sequence[Program]], clock: Clock, rounds: int | None) -> dict[str, list[float]]:
    """Seconds of one call of each candidate, a sample a round; without `rounds` as many as there is time for."""
    names = list(programs)
    if not names:
        return {}
    rounds = number_of_rounds(warm_up([programs[name][0] for name in names], clock)) if rounds is None else rounds
    samples: dict[str, list[float]] = {name: [] for name in names}
    for first in range(0, rounds, ROUNDS_IN_FLIGHT):
        played = []
        for number in range(first, min(first + ROUNDS_IN_FLIGHT, rounds)):
            turn = number % len(names)
            played += [(name, programs[name][number % len(programs[name])]) for name in names[turn:] + names[:turn]]
        for (name, program), elapsed_s in zip(played, clock.seconds([p for _, p in played]), strict=True):
            samples[name].append(elapsed_s / program.calls)
    return samples


def warm_up(programs: Sequence[Program], clock: Clock) -> float:
    """Seconds of the last round."""
    ends, round_s = time.monotonic() + WARM_UP_S, sum(clock.seconds(programs))
    while time.monotonic() < ends:
        round_s = sum(clock.seconds(programs))
    return round_s


def number_of_rounds(round_s: float) -> int:
    fewest = max(FEWEST_ROUNDS, min(ROUNDS, int(LONGEST_S / round_s)))
    return max(fewest, min(MOST_ROUNDS, int(MEASURED_S / round_s)))


def add_rates(shape: Shape, limits: Limits, found: dict[str, dict[str, Any]]) -> None:
    """Rates, the fraction of the floor, and how many times as long as ours each takes; as much memory likewise."""
    measured = [one for one in found.values() if "median_s" in one]
    ours = next((one for one in measured if one["role"] == "ours"), {})
    for one in measured:
        if one["role"] != "baseline":
            one["tflop_per_s"] = shape.flops / one["median_s"] / 1e12
            one["gb_per_s"] = shape.num_bytes / one["median_s"] / 1e9
            one["roofline_fraction"] = limits.floor(shape)[0] / one["median_s"]
        for ratio, figure in (("times_ours", "median_s"), ("times_our_peak", "peak_bytes")):
            if one["role"] != "ours" and figure in one and figure in ours:
                one[ratio] = one[figure] / ours[figure]


def one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}".rstrip(": ")
