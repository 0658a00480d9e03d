"""How much a quantization depends on its text: `configs/quantize-demo.yaml` again with other seeds of the data.

    python -m bench.quantize.seeds 0 1 2

A seed decides what is held out, and so what is calibrated and trained on too. Of each: plain rounding, GPTQ and AWQ in
INT4, the best 4-bit result, and 8 bits. Quality alone counts, so the machine may be busy; what is finished is not run
again.
"""

import argparse
from dataclasses import replace
from typing import Any

from bench.common import ROOT, write_result
from bench.recipe import results_of
from pipeline.recipe import load_recipe
from pipeline.results import Result
from pipeline.schema import Recipe

RECIPE = ROOT / "configs" / "quantize-demo.yaml"
PLAIN, BEST, AWQ = "four-bits-plain", "four-bits", "four-bits-awq"
EIGHTS = {"eight-bits": "int8", "eight-by-eight": "int8, activations too"}
"""What the stages publish that are run, and what the figures of some are called."""


def with_seed(recipe: Recipe, seed: int, held_out_tokens: int | None) -> Recipe:
    """Plain rounding, GPTQ, AWQ and the better results of the recipe, on text drawn by another seed."""
    stages = {config.out: config for kind, config in recipe.stages if kind == "quantize"}
    if held_out_tokens is not None:
        stages = {out: replace(config, held_out_tokens=held_out_tokens) for out, config in stages.items()}
    plain = replace(stages[PLAIN], compare=("round",), tokens=0)
    awq = replace(plain, method="awq", compare=(), out=AWQ)
    wanted = plain, stages[BEST], awq, *(stages[out] for out in EIGHTS)
    return replace(
        recipe,
        name=f"quantize-seed-{seed}",
        data={name: replace(source, seed=seed) for name, source in recipe.data.items()},
        stages=tuple(("quantize", config) for config in wanted),
    )


def row(seed: int, results: list[Result[Any]]) -> dict[str, Any]:
    """The figures of one seed."""
    plain, best, *others = results[1:]
    rounded: dict[str, Any] = {one.method: one.quality for one in plain.details.compared}
    parent, before, after = best.models
    found = rounded | {"best, before recovery": before.quality, "best": after.quality}
    found |= {name: one.models[-1].quality for name, one in zip(("awq", *EIGHTS.values()), others, strict=True)}
    return {
        "seed": seed,
        "held_out_tokens": parent.quality.tokens,
        **{name: _against(quality, parent.quality, rounded["round"]) for name, quality in found.items()},
        "bits_per_weight": best.details.bits_per_weight,
        "weights_beside_parent": after.weight_bytes / parent.weight_bytes,
    }


def _against(quality: Any, parent: Any, rounded: Any) -> dict[str, float]:
    return {
        "kl": quality.kl.value,
        "kl_beside_rounding": quality.kl.value / rounded.kl.value,
        "perplexity": quality.perplexity,
        "perplexity_beside_parent": quality.perplexity / parent.perplexity,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="+", type=int)
    parser.add_argument("--held-out-tokens", type=int, help="instead of the recipe's, which are few for 3 %% of loss")
    options, rows = parser.parse_args(), []
    more = [] if options.held_out_tokens is None else [f"--held-out-tokens {options.held_out_tokens}"]
    for seed in options.seeds:
        recipe = with_seed(load_recipe(RECIPE), seed, options.held_out_tokens)
        rows.append(row(seed, results_of(recipe)))
        command = " ".join(["python -m bench.quantize.seeds", *(str(one["seed"]) for one in rows), *more])
        write_result("quantize-seeds-cpu", command, {"seeds": rows})


if __name__ == "__main__":
    main()
