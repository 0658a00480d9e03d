"""Is what `potstill tune` finds as good as what people write by hand? Twelve recipes beside one search, settings alike.

    python -m bench.train.tune                   # SmolLM2-135M and configs/tune.yaml: hours on two cores
    python -m bench.train.tune --small           # the same on a model of 3 M parameters, made from nothing: minutes

Written by hand is what one would try first: all layers, 5/6 and 2/3 of them, and 2/3 of the MLP, each in 8 bits, in
4, and between. Their front is that of memory, time a token and KL to the teacher. The search is asked for the least KL
within the memory of the median recipe on the front, and has found something on or above it where no recipe is at least
as good in memory and KL, and better in one; of time, which is noisy, where none is better by `TIME_NOISE`, too.
Both go on where they stopped, until the folders are removed.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.common import ROOT, write_result
from bench.recipe import results_of
from model.files.safe_io import default_cache
from pipeline.files import write_atomically
from pipeline.processes import Processes
from pipeline.recipe import load_recipe
from pipeline.report.charts import Point, Points
from pipeline.report.front import front_of
from pipeline.run_folder import RunFolder
from pipeline.schema import Recipe, Serve
from pipeline.tune.search import Search
from pipeline.tune.targets import Measured, Targets, seconds_of
from pipeline.tune.trials import Space, Trial

RUNS = ROOT / "runs"
TIME_NOISE = 1.05
TEXT = "data.text={source: python-stdlib, sequence_length: 256, held_out: 0.05, max_documents: 300}"
SMALL = (
    "stages.0.distill.tokens=24k", "stages.0.distill.student.layers=5",
    "stages.2.evaluate.speed={batch_sizes: [1], prompt_tokens: 32, new_tokens: 32}",
)  # fmt: skip
SHAPE = {
    "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "layers": 6, "query_heads": 6, "kv_heads": 2,
}  # fmt: skip


def small_recipe() -> Recipe:
    """configs/tune.yaml with a teacher that is made first, and shorter training."""
    made = load_recipe(ROOT / "configs" / "mha-gqa.yaml", [TEXT])
    kind, config = made.stages[0]
    config = replace(
        config, architecture=replace(config.architecture, **SHAPE), tokens=160_000, evaluate_every_tokens=160_000,
        held_out_tokens=2048,
    )  # fmt: skip
    results_of(replace(made, name="tune-teacher", stages=((kind, config),), serve=Serve(model=config.out)))
    teacher = RunFolder(RUNS / "tune-teacher").path / "01-pretrain" / "model"
    return load_recipe(
        ROOT / "configs" / "tune.yaml", [f"models.teacher={{from: {teacher}, sha256: null}}", TEXT, *SMALL]
    )


def by_hand(space: Space) -> list[Trial]:
    """Four shapes in three sizes of weights."""
    shapes, bits = ([name for name in names if name] for names in space.choices)
    *_, deep, shallow, _ = [name for name in shapes if name.startswith("layers") and "," not in name]
    _, narrow, _ = [name for name in shapes if name.startswith("mlp")]
    between = bits[1]  # the recipe's own
    return [
        Trial((shape, size))
        for shape in (None, deep, shallow, narrow)
        for size in ("int8, activations", between, "int4, activations")
    ]


def searched(recipe: Recipe, name: str, targets: Targets, *, budget_s: float | None, trials: Sequence[Trial]) -> Search:
    """A search that was executed, or tried `trials` alone."""
    processes = Processes()
    search = Search(recipe, RunFolder(RUNS / name), targets, cache=default_cache(), processes=processes)
    for trial in trials:
        search.attempt(trial)
    if budget_s is not None:
        search.execute(budget_s)
    processes.close()
    return search


def beats(one: Measured, other: Measured) -> bool:
    """Whether it is at least as good everywhere, and better somewhere by more than noise."""
    no_worse = one.memory <= other.memory and one.kl <= other.kl and one.tpot <= other.tpot
    better = one.memory < other.memory or one.kl < other.kl or one.tpot * TIME_NOISE < other.tpot
    return no_worse and better


def chart(hand: Sequence[Measured], best: Measured) -> Points:
    """KL by memory; what was written by hand is joined."""
    points = [Point(one.name, one.memory / 1e6, one.kl) for one in hand]
    found = Point(f"tune: {best.name}", best.memory / 1e6, best.kl, color=2)
    title = "Recipes by hand (joined where best) and what tune found"
    return Points(title, [*points, found], "MB of weights", "KL to the teacher, nats a token", front_of(points))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of 3 M parameters in place of SmolLM2")
    parser.add_argument("--budget", default="45m", help="of the search (default: 45m)")
    options = parser.parse_args()
    name = "tune-small" if options.small else "tune"
    recipe = small_recipe() if options.small else load_recipe(ROOT / "configs" / "tune.yaml", [])
    recipe = replace(recipe, name=name)
    written = by_hand(Space.of(recipe, default_cache()))
    hand_search = searched(recipe, f"{name}-by-hand", Targets(max_kl=math.inf), budget_s=None, trials=written)
    hand = [hand_search.measured[trial][0] for trial in written]
    on_front = [one for one in hand if not any(beats(other, one) for other in hand)]
    bound = sorted(one.memory for one in on_front)[len(on_front) // 2]
    search = searched(recipe, f"{name}-search", Targets(memory=bound), budget_s=seconds_of("--budget", options.budget),
                      trials=())  # fmt: skip
    _, best = min(
        ((trial, found[0]) for trial, found in search.measured.items() if not trial.brief),
        key=lambda pair: search.targets.rank(pair[1]),
    )
    beaten = [one.name for one in hand if beats(one, best)]
    figures: dict[str, Any] = {
        "teacher": asdict(hand_search.teacher),
        "by_hand": [asdict(one) | {"on_front": one in on_front} for one in hand],
        "memory_bound_bytes": bound,
        "budget": options.budget,
        "tried": [asdict(found[0]) for found in search.measured.values()],
        "best": asdict(best),
        "beaten_by": beaten,
        "beats": [one.name for one in hand if beats(best, one)],
        "on_or_above_the_front": not beaten,
    }
    command = f"python -m bench.train.tune{' --small' if options.small else ''} --budget {options.budget}"
    kept: Path = write_result(f"{name}-cpu", command, figures)
    write_atomically(kept.with_suffix(".svg"), chart(hand, best).html(alone=True).encode())
    print(f"the search found {best.name}, {'beaten by ' + ', '.join(beaten) if beaten else 'on or above the front'}")


if __name__ == "__main__":
    main()
