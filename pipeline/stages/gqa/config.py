"""Settings of the stage `gqa`."""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.settings import COUNTS, setting
from pipeline.stages.shared.config import Decoding, Recovery

if TYPE_CHECKING:
    from model.config import ModelConfig

GROUPINGS = ("mean", "first", "aligned", "subspace")
METHODS = (*GROUPINGS, *(f"{grouping}+refit" for grouping in GROUPINGS))


@dataclass(frozen=True)
class LongContext(Decoding):
    """The same where the bytes of keys and values decide."""

    cache_gib: float = setting(8.0, range=(1e-3, 1e6))
    """Memory for which the largest number of sequences of that length is reported."""


@dataclass(frozen=True)
class Gqa(Recovery):
    """Stage: fewer KV heads, converted on calibration text, recovered by training towards the unconverted parent."""

    model: str = setting(refers="model")
    kv_heads: tuple[int, ...] = setting(required=True, single=True, range=(1, 10_000))
    """KV heads afterwards, divisors of the query heads: one number for every layer, or a list with one for each. Where
    layers differ, only potstill reads the result: Llama's config.json has one number."""
    method: str = setting("subspace", choices=METHODS)
    """How heads become one, as in compress/gqa.py; with `+refit` the output projections are fitted again after it, as
    in compress/refit.py: for models that are hardly trained afterwards."""
    compare: tuple[str, ...] = setting((), weights=False, figures=True, choices=METHODS)
    """Methods to show beside each other, right after conversion and after `compare_tokens` of the same training."""
    train: str = setting("full", choices=("adapters", "full"))
    """What is trained after conversion: adapters that are merged in the end, or everything."""
    adapter_rank: int = setting(64, range=(1, 10_000))
    """Of those adapters, which are on all projections."""
    compare_tokens: int = setting(8_192, weights=False, figures=True, count=True, range=COUNTS)
    calibration_tokens: int = setting(16_384, count=True, range=COUNTS)
    """Training tokens on which heads are compared and projections are fitted."""
    long_context: LongContext = field(default_factory=LongContext, metadata={"weights": False})

    @property
    def held_out_passes(self) -> int:
        """Of each method before training, of those that are compared after a little of it, of the result after all."""
        return len({self.method, *self.compare}) + len(self.compare) + 1

    @property
    def compared_steps(self) -> int:
        return len(self.compare) * math.ceil(self.compare_tokens / self.batch_tokens)

    def layer_kv_heads(self, num_layers: int) -> tuple[int, ...]:
        """KV heads for each layer; one number stands for all of them."""
        return self.kv_heads * num_layers if len(self.kv_heads) == 1 else self.kv_heads


def choices(config: Gqa, whole: "ModelConfig") -> dict[str, Gqa]:
    """The recipe's own KV heads, and all smaller numbers of them that divide what the model has."""
    smaller = [(heads,) for heads in range(whole.num_kv_heads - 1, 0, -1) if whole.num_kv_heads % heads == 0]
    chosen = dict.fromkeys([config.kv_heads, *smaller])
    return {f"kv {' '.join(map(str, heads))}": replace(config, kv_heads=heads) for heads in chosen}
