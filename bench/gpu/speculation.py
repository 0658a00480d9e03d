"""Speculative decoding of an 8B model by a draft of its first layers, at several rates of acceptance.

With random weights no small model guesses what a large one says. So the layers that the draft lacks add only a part of
what they would: nothing (the draft is always right, up to rounding), a little, all of it (it is hardly ever right, and
speculation should switch itself off). They cost the same in any case. What the roofline allows is what plain decoding
reaches, times the tokens that a verification gained, over what it cost, k c + 1, at the k, c and gain measured.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bench.common import DEVICE, DTYPE
from bench.gpu.engine import Decoded, Sizes, decode_rounds, engine_of, room, sizes_of
from bench.gpu.figures import ROOFLINE, Figure, Goal
from bench.gpu.task import Task
from bench.models import random_model, shaped
from compress.prune.depth import prune_depth
from model.transformer import Transformer
from serve.engine.drafts.length import MAX_DRAFT_TOKENS

DRAFT_LAYERS = 2
ADDED = (0.0, 0.1, 1.0)
"""Of what the layers that the draft lacks add to the residual stream."""
PLAIN = "plain decoding"


@torch.no_grad()
def pair(sizes: Sizes, added: float) -> tuple[Transformer, Transformer]:
    """Target and draft, in their serving forms."""
    target = random_model(shaped(sizes.shape), DTYPE, torch.device(DEVICE))
    for layer in target.model.layers[DRAFT_LAYERS:]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight *= added
    draft = prune_depth(target, tuple(range(DRAFT_LAYERS)))
    return target.fuse(), draft.fuse()


@dataclass(frozen=True)
class Speculated:
    """Decoding with a draft."""

    tokens_per_s: float
    gained: float
    """Tokens of a sequence in a step."""
    drafted: float
    """Of them, how many had been proposed, right or wrong."""


def speculate(task: Task) -> Iterator[Figure]:
    sizes = sizes_of(task, "8B")
    batches = sizes.batches[-1:] if task.tiny else (1, 64)
    speeds: dict[int, tuple[float, float]] = {}  # of target and draft alone: not a matter of what layers add
    for added in (0.0, 1.0) if task.tiny else ADDED:
        target, draft = pair(sizes, added)
        for batch in batches:
            if batch not in speeds:
                speeds[batch] = plain_speed(target, batch, sizes), plain_speed(draft, batch, sizes)
            plain, alone = speeds[batch]
            found = speculated(target, draft, batch, sizes)
            bound = plain * found.gained / (found.drafted * plain / alone + 1)
            goals = (Goal(PLAIN, 0.98),) if batch > 1 or added == 1 else (Goal(ROOFLINE, 0.85), Goal(PLAIN, 0.98))
            note = f"{found.drafted:.2f} drafted and {found.gained:.2f} written a step; plain {plain:.0f}"
            name = f"speculation 8B, other layers x{added:g}, batch {batch}"
            yield Figure(name, "tokens/s", found.tokens_per_s, {}, bound, goals, references={PLAIN: plain}, note=note)
        del target, draft


def plain_speed(model: Transformer, batch: int, sizes: Sizes) -> float:
    engine = engine_of(model, tokens=room(batch, sizes), batch=batch)
    return median_speed(decode_rounds(engine, batch, sizes.prompt, sizes.steps))


def speculated(target: Transformer, draft: Transformer, batch: int, sizes: Sizes) -> Speculated:
    """After a run in which the length of drafts has found its level."""
    own = replace(sizes, prompt=min(sizes.prompt, 128))
    engine = engine_of(target, draft=draft, tokens=room(batch, own, 2 * (1 + MAX_DRAFT_TOKENS)), batch=batch)
    decode_rounds(engine, batch, own.prompt, own.steps)
    rounds = decode_rounds(engine, batch, own.prompt, own.steps)
    reports, tokens, drafted = (sum(getattr(one, name) for one in rounds) for name in ("reports", "tokens", "drafted"))
    return Speculated(median_speed(rounds), tokens / reports, drafted / reports)


def median_speed(rounds: list[Decoded]) -> float:
    return statistics.median(one.tokens_per_s for one in rounds)
