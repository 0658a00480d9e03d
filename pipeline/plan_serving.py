"""`potstill plan`, of what a recipe serves: how GPUs can divide it, the pages that are left, and what latency may be.

Memory is that of an engine with its default options on GPUs. TTFT and TPOT are rooflines (model/cost.py): the least
that they can be. Nothing here is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model.cost import Gpu, OnGpus, Roofline, Served
from model.kv_format import choose_kv_format
from model.mesh import MeshError
from pipeline.errors import UserError
from pipeline.report.section import Table
from pipeline.schema import Recipe
from pipeline.stages.base import kind_of
from serve.config import EngineConfig
from serve.engine.drafts.length import MAX_DRAFT_TOKENS
from serve.engine.kv_cache import PAGE_SIZE
from serve.engine.loading import bytes_for_pages, num_distributions

GIB = 2**30
DTYPE = torch.bfloat16
PROMPT, SEQUENCE = 1_024, 2_048
"""Tokens: of the prompt whose TTFT is told, and of the sequences that decode meanwhile."""
OPTIONS = EngineConfig("")
HEAD = ("weights", "a step", "pages", "tokens in flight")
LATENCY = ("TTFT, ms", "TPOT, ms", "TPOT full, ms", "tokens/s")


@dataclass(frozen=True)
class Placement:
    """A model on `tensor × pipeline` GPUs, as often as there are so many."""

    placed: OnGpus
    memory: int
    """Bytes of each GPU."""
    replicas: int
    weights: int
    """Bytes of the GPU that holds most, the draft's among them."""
    temporaries: int
    """Bytes of a step."""
    page_bytes: int

    @property
    def num_gpus(self) -> int:
        """Of one replica."""
        return self.placed.tensor * self.placed.pipeline

    @property
    def num_tokens(self) -> int:
        """That the pages of one replica hold, as the engine would count them."""
        room = bytes_for_pages(OPTIONS, self.memory, self.weights, self.temporaries)
        return max(0, room // self.page_bytes) * PAGE_SIZE

    @property
    def fits(self) -> bool:
        """Whether there is room for one sequence, at least."""
        return self.num_tokens >= self.sequence

    @property
    def sequence(self) -> int:
        """Tokens of one."""
        return min(SEQUENCE, self.placed.served.config.num_positions)

    @property
    def at_once(self) -> int:
        """Sequences that one replica decodes beside each other."""
        return min(OPTIONS.max_num_seqs, self.num_tokens // self.sequence)


def serving_plan(recipe: Recipe, cache: Path, *, gpus: int, budgets: Sequence[int], gpu: Gpu | None) -> Table:
    """A row for each memory and each way to divide so many GPUs; with `gpu` what latency may be there.

    Raises UserError for a recipe that serves nothing, or a number of GPUs that no division has.
    """
    if recipe.serve is None:
        raise UserError(f"The recipe {recipe.name} serves nothing.")
    if gpus < 1:
        raise UserError(f"--gpus is {gpus}; it must be at least 1.")
    models = served_models(recipe, cache)
    model, target = recipe.serve.model, recipe.serve.verify
    draft = models[model] if target is not None else None
    found = placements(models[target or model], draft, gpus=gpus, budgets=budgets)
    head = [f"serving {target or model}, tensor × pipeline", "replicas", *HEAD, *(LATENCY if gpu else ())]
    return Table([_row(one, gpu) for one in found], head, note=note(found, target or model, gpu))


def served_models(recipe: Recipe, cache: Path) -> dict[str, Served]:
    """Every model of the recipe, by its name. Raises as `stage_plans` does."""
    if recipe.serve is None:
        return {}
    kv_dtype = choose_kv_format(recipe.serve.kv_cache_dtype, DTYPE).dtype
    models: dict[str, Served] = {}
    for stage in recipe.plan():
        shapes, kind = {name: one.config for name, one in models.items()}, kind_of(stage.kind)
        shape = kind.shape(stage.config, shapes, cache)
        if stage.out is not None and shape is not None:
            models[stage.out] = Served(shape, kind.formats(stage.config, shapes, cache), DTYPE, kv_dtype)
    return models


def placements(target: Served, draft: Served | None, *, gpus: int, budgets: Sequence[int]) -> list[Placement]:
    """All that divide the model, for each memory, few GPUs a replica first. A draft lies whole on the first of them."""
    beside = None if draft is None else OnGpus(draft)
    rows = num_distributions(OPTIONS, 0 if draft is None else MAX_DRAFT_TOKENS)
    found = []
    for tensor, pipeline in divisions(gpus):
        try:
            placed = OnGpus(target, tensor, pipeline)
        except MeshError:
            continue
        weights, kv_bytes = placed.weights, placed.kv_bytes_per_token
        if beside is not None:
            weights, kv_bytes = weights + beside.weights, kv_bytes + beside.kv_bytes_per_token
        temporaries = placed.step_bytes(tokens=OPTIONS.max_num_batched_tokens, rows=rows)
        replicas = gpus // (tensor * pipeline)
        found += [Placement(placed, one, replicas, weights, temporaries, PAGE_SIZE * kv_bytes) for one in budgets]
    return sorted(found, key=lambda one: budgets.index(one.memory))


def divisions(gpus: int) -> list[tuple[int, int]]:
    """(tensor, pipeline) that divide so many, few GPUs first, and of as many those with the larger tensor."""
    counts = [count for count in range(1, gpus + 1) if gpus % count == 0]
    pairs = [(tensor, count // tensor) for count in counts for tensor in range(count, 0, -1) if count % tensor == 0]
    return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))


# --- showing ----------------------------------------------------------------------------------------------------------


def _row(one: Placement, gpu: Gpu | None) -> list[str]:
    name = f"{one.memory / GIB:.4g} GiB, {one.placed.tensor} × {one.placed.pipeline}"
    page_bytes = max(0, bytes_for_pages(OPTIONS, one.memory, one.weights, one.temporaries))
    sizes = [f"{size / GIB:,.2f}" for size in (one.weights, one.temporaries, page_bytes)]
    tokens = f"{one.num_tokens:,}" if one.fits else "does not fit"
    cells = [name, f"{one.replicas}", *sizes, tokens]
    if gpu is None:
        return cells
    if not one.fits:
        return [*cells, *[""] * len(LATENCY)]
    roofline = Roofline(one.placed, gpu)
    ttft = roofline.ttft_s(min(PROMPT, one.sequence), budget=OPTIONS.max_num_batched_tokens)
    alone, full = (roofline.tpot_s(count, one.sequence) for count in (1, one.at_once))
    shown = [f"{1e3 * seconds:.1f}" for seconds in (ttft, alone)]
    return [*cells, *shown, f"{1e3 * full:.1f} of {one.at_once}", f"{one.replicas * one.at_once / full:,.0f}"]


def note(found: Sequence[Placement], name: str, gpu: Gpu | None) -> str:
    """What the figures mean, and which options serve the model on the fewest GPUs that hold it."""
    text = (
        "Estimates by arithmetic, in GiB of the GPU that holds most, for an engine with default options in bf16: pages "
        f"are what {OPTIONS.gpu_memory_utilization:g} of the memory leaves beside weights, a step and its graphs; "
        f"what has no room for a sequence of {found[0].sequence:,} tokens does not fit"
    )
    if gpu is not None:
        prompt, sequence = min(PROMPT, found[0].sequence), found[0].sequence
        text += (
            f". Latency is a roofline of the {gpu.title} by its data sheet: nothing was measured, no engine reaches it "
            f"and waiting is left out. TTFT is that of {prompt:,} tokens alone, TPOT that of one sequence of "
            f"{sequence:,}; full is as many of these as fit, at most {OPTIONS.max_num_seqs}, and tokens/s what all "
            "replicas then say"
        )
    sentences = [f"{text}."]
    for memory in dict.fromkeys(one.memory for one in found if one.num_gpus * one.replicas > 1):
        fitting = [one for one in found if one.fits and one.memory == memory]
        sentences.append(_advice(fitting[0], name) if fitting else f"{name} does not fit so many GPUs.")
    return " ".join(sentences)


def _advice(best: Placement, name: str) -> str:
    sizes = {"tensor": best.placed.tensor, "pipeline": best.placed.pipeline}
    options = " ".join(f"--{kind}-parallel-size {size}" for kind, size in sizes.items() if size > 1)
    gpus, copies = f"{best.num_gpus} GPU{'s' * (best.num_gpus > 1)}", f"{best.replicas} replica"
    how = f"with {options}" if options else "without options"
    return f"The fewest that hold {name}: {gpus} {how}, in {copies}{'s' * (best.replicas > 1)}."
