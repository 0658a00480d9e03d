"""What a draft is best trained on: `configs/drafts.yaml` with several seeds, and the acceptance of its students.

    python -m bench.train.drafts 0 1 2

A seed decides the order of the text, and what on-policy students write; the teacher's answers stay. Acceptance is that
on held-out conversations, at temperature 1. Each seed replaces the students of the one before in the run's folder.
"""

import argparse
from dataclasses import replace
from statistics import mean
from typing import Any

from bench.common import ROOT, write_result
from bench.recipe import results_of
from pipeline.recipe import load_recipe
from pipeline.results import Result
from pipeline.schema import Recipe

RECIPE = ROOT / "configs" / "drafts.yaml"
PLAIN = "plain"
"""The student that the others are compared with."""


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """All students trained by another seed, in the same run: the teacher and its answers are not made again."""
    stages = ((kind, replace(config, seed=seed) if kind == "distill" else config) for kind, config in recipe.stages)
    return replace(recipe, stages=tuple(stages))


def row(seed: int, results: list[Result[Any]]) -> dict[str, Any]:
    """Of each student on held-out conversations: acceptance, KL, and the speed of the pair beside the teacher's."""
    found: dict[str, Any] = {"seed": seed}
    for result in results:
        if result.kind != "evaluate":
            continue
        _, student, pair = result.models
        found[student.label] = {
            "acceptance": student.quality.acceptance.value,
            "kl": student.quality.kl.value,
            "pair_accepted": pair.speed[0].accepted,
            "pair_beside_teacher": pair.speed[0].beside,
        }
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each student's mean acceptance over the seeds, and that beside the plain one's."""
    names = [name for name in rows[0] if name != "seed"]
    means = {name: mean(one[name]["acceptance"] for one in rows) for name in names}
    return {name: {"acceptance": accepted, "beside_plain": accepted / means[PLAIN]} for name, accepted in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int, default=[0, 1, 2])
    rows: list[dict[str, Any]] = []
    for seed in parser.parse_args().seeds:
        recipe = with_seed(load_recipe(RECIPE), seed)
        rows.append(row(seed, results_of(recipe)))
        command = " ".join(["python -m bench.train.drafts", *(str(one["seed"]) for one in rows)])
        write_result("drafts-cpu", command, {"students": summary(rows), "seeds": rows})


if __name__ == "__main__":
    main()
