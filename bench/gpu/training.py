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
from model.config import ModelConfig
from model.cost import flops_per_token
from model.files.checkpoint import load_config

QLORA, QLORA_MEMORY = "QLoRA step 8B, 2 x 2048, rank 16", "QLoRA step 8B, peak"
DISTILL, DISTILL_MEMORY = "distillation step 1B, 2 x 2048", "distillation step 1B, peak above the models"


def qlora(task: Task) -> Iterator[Figure]:
    """Ours: its memory in the first steps beside what is planned, then its speed."""
    with tempfile.TemporaryDirectory() as scratch:
        case = adapters.prepare_inputs(Path(scratch), tiny=task.tiny)
        peak = run(adapters, adapters.check_side, "potstill", case)["peak_bytes"] / 1e9
        note = f"planned {adapters.planned(case)['peak'] / 1e9:.2f}"
        yield Figure(QLORA_MEMORY, "GB", peak, goals=(Goal("peft", 0.6),), less_is_better=True, note=note)
        speed = statistics.median(run(adapters, time_side, "potstill", case)["tokens_per_s"])
        limit = limit_of_qlora(task, load_config(case.scratch / "dense"), case.sequence_length)
    yield Figure(QLORA, "tokens/s", speed, roofline=limit, goals=(Goal("peft", 1.8),))


def limit_of_qlora(task: Task, config: ModelConfig, length: int) -> float | None:
    """Tokens a second by products alone: a frozen base has no gradients of weights, but layers are computed twice."""
    rate = task.measured("peaks").get(PRODUCT)
    operations = 3 * flops_per_token(config, length) + 2 * 2 * config.hidden_size * config.vocab_size
    return None if rate is None else 1e12 * rate / operations


def peft(task: Task) -> Iterator[Figure]:
    """transformers, peft and bitsandbytes, once the losses of the first step agree with ours."""
    with tempfile.TemporaryDirectory() as scratch:
        case = adapters.prepare_inputs(Path(scratch), tiny=task.tiny)
        yield Figure(QLORA_MEMORY, "GB", peers={"peft": adapters.check(case)["peft"]["peak_bytes"] / 1e9})
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
