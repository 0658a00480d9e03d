"""Training steps beside their peers: those of `bench.train`, over random weights, each side in a process of its own."""

import statistics
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.gpu.checks import PRODUCT
from bench.gpu.figures import Figure, Goal
from bench.gpu.task import Task
from bench.train import distill as distillation
from bench.train import qlora as adapters
from bench.train.sides import Case, time_side
from model.cost import flops_per_token
from model.files.checkpoint import load_config

QLORA, QLORA_MEMORY = "QLoRA step 8B, 2 x 2048, rank 16", "QLoRA step 8B, peak"
DISTILL, DISTILL_MEMORY = "distillation step 1B, 2 x 2048", "distillation step 1B, peak above the models"


def qlora(task: Task) -> Iterator[Figure]:
    """Ours: checked against what is planned, then timed. The limit: the products of two passes and a recomputed one."""
    with tempfile.TemporaryDirectory() as scratch:
        case = adapters.prepare_inputs(Path(scratch), tiny=task.tiny)
        yield memory_of_qlora("potstill", case)
        found = run(adapters, time_side, "potstill", case)
        config = load_config(case.scratch / "dense")
    head = 2 * config.hidden_size * config.vocab_size
    # A frozen base has no gradient of weights: forward, again in backward, and the gradient of the inputs.
    operations = 3 * flops_per_token(config, case.sequence_length) + 2 * head
    rate = task.measured("peaks").get(PRODUCT)
    roofline = None if rate is None else 1e12 * rate / operations
    speed = statistics.median(found["tokens_per_s"])
    yield Figure(QLORA, "tokens/s", speed, roofline=roofline, goals=(Goal("peft", 1.8),))


def memory_of_qlora(side: str, case: Case) -> Figure:
    """Of the first steps, weights included."""
    peak = run(adapters, adapters.check_side, side, case)["peak_bytes"] / 1e9
    if side == "peft":
        return Figure(QLORA_MEMORY, "GB", peers={side: peak})
    planned = adapters.planned(case)["peak"] / 1e9
    goals, note = (Goal("peft", 0.6),), f"planned {planned:.2f}"
    return Figure(QLORA_MEMORY, "GB", peak, goals=goals, less_is_better=True, note=note)


def peft(task: Task) -> Iterator[Figure]:
    """transformers, peft and bitsandbytes."""
    with tempfile.TemporaryDirectory() as scratch:
        case = adapters.prepare_inputs(Path(scratch), tiny=task.tiny)
        yield memory_of_qlora("peft", case)
        found = run(adapters, time_side, "peft", case)
    yield Figure(QLORA, "tokens/s", peers={"peft": statistics.median(found["tokens_per_s"])})


def distill(task: Task) -> Iterator[Figure]:
    """Ours, then transformers where it is installed."""
    speeds: dict[str, float] = {}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        case = distillation.prepare_inputs(Path(scratch), tiny=task.tiny)
        for side in ("potstill", *(["transformers"] if find_spec("transformers") else [])):
            found = run(distillation, time_side, side, case)
            speeds[side] = statistics.median(found["tokens_per_s"])
            peaks[side] = found["peak_bytes_above_models"] / 1e9
            for name, unit, known in ((DISTILL, "tokens/s", speeds), (DISTILL_MEMORY, "GB", peaks)):
                peers = {peer: value for peer, value in known.items() if peer != "potstill"}
                yield Figure(name, unit, known["potstill"], peers, less_is_better=known is peaks)


def run(benchmark: ModuleType, part: Any, side: str, case: Case) -> dict[str, Any]:
    """A part of a side, in a process of its own."""
    found: dict[str, Any] = benchmark.BENCHMARK.run(part, side, case)
    return found
