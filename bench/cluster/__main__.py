"""A simulated cluster of 1 to 64 replicas: what routers, autoscaling and failures do to latency. No GPU, no cluster.

    python -m bench.cluster [--gpu h100] [--seed 0]      # minutes; bench/results/cluster-simulation.json and .svg

Each replica is the engine's own Scheduler and KVCache; a step takes what model/cost.py has as its roofline on the named
GPU, so that real ones take longer. Requests are routed, and replicas counted, by serve/replicas.py itself beside two
simple routers. Every figure is simulated, none was measured; the same seed gives the same file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.cluster.replica import EngineShape
from bench.cluster.routers import ROUTERS
from bench.cluster.simulation import Autoscaler, Failure, Outcome, Simulation, summary
from bench.cluster.trace import Traffic
from bench.common import RESULTS, ROOT, write_json
from bench.models import LLAMA_8B, shaped
from model.cost import GPUS, Roofline, Served
from pipeline.files import write_atomically
from pipeline.plan_serving import placements
from pipeline.report.charts import Lines, Series, sheet
from serve.engine.kv_cache import PAGE_SIZE

NAME = "cluster-simulation"
STICKY = "prefix aware"
NOTE = (
    "Simulated, not measured: no GPU and no cluster was used. Steps take the roofline of the GPU's data sheet; hosts "
    "and networks take nothing."
)
AGENTS = {"systems": 256, "system_tokens": 3_072, "message_tokens": 192}
"""More system prompts than the pages of one replica hold."""


@dataclass(frozen=True)
class Scenarios:
    """What is simulated."""

    counts: Sequence[int]
    """Of replicas, for one trace."""
    scaling: Traffic
    autoscaling: Traffic
    autoscaler: Autoscaler
    failing: Traffic
    failing_replicas: int
    failure: Failure


SCENARIOS = Scenarios(
    counts=(1, 2, 4, 8, 16, 32, 64),
    scaling=Traffic(1_500, 5.0, bursts=((2.0, 3.0, 4.0),), pause_s=2.0, **AGENTS),
    autoscaling=Traffic(6_000, 600.0, bursts=((60.0, 260.0, 12.0),), **AGENTS),
    autoscaler=Autoscaler(minimum=1, maximum=16),
    failing=Traffic(1_500, 30.0, bursts=((10.0, 20.0, 4.0),), **AGENTS),
    failing_replicas=8,
    failure=Failure(15.0),
)


def engine_shape(gpu: str) -> EngineShape:
    """Llama-3.1-8B in bf16 on one of these, with the pages that `potstill plan` finds room for."""
    (place,) = placements(Served(shaped(LLAMA_8B)), None, gpus=1, budgets=[GPUS[gpu].memory])
    return EngineShape(Roofline(place.placed, GPUS[gpu]), place.num_tokens // PAGE_SIZE)


def simulate(shape: EngineShape, scenarios: Scenarios, seed: int) -> dict[str, Any]:
    """All scenarios' figures."""
    return {
        "scaling": scaling(shape, scenarios, seed),
        "autoscaling": autoscaling(shape, scenarios, seed),
        "failures": failures(shape, scenarios, seed),
    }


def scaling(shape: EngineShape, scenarios: Scenarios, seed: int) -> dict[str, list[dict[str, Any]]]:
    """By router, one trace on more and more replicas."""
    trace = scenarios.scaling.trace(seed)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ROUTERS}
    for name, count in ((name, count) for name in ROUTERS for count in scenarios.counts):
        figures = summary(Simulation(trace, shape, ROUTERS[name](), replicas=count).run())
        found[name].append({"replicas": count, **figures})
        say(f"{count} replicas, {name}", figures)
    return found


def autoscaling(shape: EngineShape, scenarios: Scenarios, seed: int) -> dict[str, Any]:
    """A burst, beside as many replicas as there are at most and at least."""
    trace, scaler = scenarios.autoscaling.trace(seed), scenarios.autoscaler
    run = Simulation(trace, shape, ROUTERS[STICKY](), replicas=scaler.minimum, autoscaler=scaler).run()
    found: dict[str, Any] = {"autoscaler": asdict(scaler), "scaled": summary(run)}
    for name, count in (("always_least", scaler.minimum), ("always_most", scaler.maximum)):
        found[name] = summary(Simulation(trace, shape, ROUTERS[STICKY](), replicas=count).run())
    for name in ("scaled", "always_least", "always_most"):
        say(f"a burst, {name}", found[name])
    return found | {"over_time": over_time(run)}


def over_time(run: Outcome) -> dict[str, list[float]]:
    """Columns of what the autoscaler saw, and what had been paid for until then."""
    samples = [asdict(sample) for sample in run.samples]
    paid = [run.replica_seconds_until(sample.at_s) for sample in run.samples]
    return {key: [sample[key] for sample in samples] for key in samples[0]} | {"replica_seconds": paid}


def failures(shape: EngineShape, scenarios: Scenarios, seed: int) -> dict[str, Any]:
    """A replica dies in a burst: its running answers are lost, or asked for again; those that wait go elsewhere."""
    trace, count = scenarios.failing.trace(seed), scenarios.failing_replicas
    found: dict[str, Any] = {"replicas": count, "died_at_s": scenarios.failure.at_s}
    for name, dead in (("none", ()), ("lost", (scenarios.failure,)), ("retried", (scenarios.failure,))):
        run = Simulation(trace, shape, ROUTERS[STICKY](), replicas=count, failures=dead, retries=name != "lost").run()
        found[name] = summary(run) | {"turns_not_asked": run.num_unasked}
        say(f"a death, {name}", found[name])
    return found


def say(what: str, figures: dict[str, Any]) -> None:
    ttft, hits = figures["ttft_s"]["p99"], figures["prefix_hit_rate"]
    print(f"{what}: simulated TTFT p99 {ttft:.3f} s, {hits:.0%} of prompts found, {figures['lost']} lost", flush=True)


def drawn(result: dict[str, Any]) -> str:
    """The plot, as an SVG document."""
    routers, gpu = result["scaling"], result["gpu"]["title"]

    def by_router(title: str, unit: str, figure: Any) -> Lines:
        series = [
            Series(name, [(row["replicas"], figure(row)) for row in rows], marked=True)
            for name, rows in routers.items()
        ]
        return Lines(f"Simulated: {title}", series, f"replicas, each {gpu}", unit, doubling=True)

    charts = [
        by_router("99th percentile of TTFT, one trace", "seconds", lambda row: row["ttft_s"]["p99"]),
        by_router("prompt tokens found in the cache", "part of all", lambda row: row["prefix_hit_rate"]),
        by_router("output, one trace", "tokens/s", lambda row: row["output_tokens_per_s"]),
        scaled(result["autoscaling"]["over_time"]),
    ]
    return sheet(charts)


def scaled(columns: dict[str, Sequence[float]]) -> Lines:
    """Replicas through a burst."""
    paid = [sum(counts) for counts in zip(*(columns[name] for name in ("ready", "starting", "draining")), strict=True)]
    busy = [(running + waiting) / 100 for running, waiting in zip(columns["running"], columns["waiting"], strict=True)]
    lines = {
        "replicas that take requests": columns["ready"],
        "replicas paid for": paid,
        "requests at once, hundreds": busy,
    }
    series = [Series(name, list(zip(columns["at_s"], values, strict=True))) for name, values in lines.items()]
    return Lines("Simulated: a burst, autoscaled", series, "seconds", "number", from_zero=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=list(GPUS), default="h100", help="whose roofline steps take (default: h100)")
    parser.add_argument("--seed", type=int, default=0, help="of the traces")
    options = parser.parse_args()
    shape, scenarios = engine_shape(options.gpu), SCENARIOS
    result = {
        "command": f"python -m bench.cluster --gpu {options.gpu} --seed {options.seed}",
        "note": NOTE,
        "model": "Llama-3.1-8B, bf16, one GPU a replica",
        "gpu": asdict(GPUS[options.gpu]),
        "pages_of_a_replica": shape.num_pages,
        "traffic": {name: asdict(getattr(scenarios, name)) for name in ("scaling", "autoscaling", "failing")},
        **simulate(shape, scenarios, options.seed),
    }
    path = RESULTS / f"{NAME}.json"
    write_json(path, result)
    write_atomically(path.with_suffix(".svg"), drawn(result).encode())
    print(f"written to {path.relative_to(ROOT)} and drawn beside it")


if __name__ == "__main__":
    main()
