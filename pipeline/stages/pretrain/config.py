"""Settings of the stage `pretrain`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.schema import Recipe
from pipeline.settings import COUNTS, POSITIVE, setting
from pipeline.stages.shared import config as shared


@dataclass(frozen=True)
class FreshRouters:
    """Mixture of depths in a model that is made from nothing; model/routed.py says what is computed."""

    every: int | None = setting(None, range=(1, 10_000))
    """Every n-th layer has a router, counted so that the first layers stay dense; nothing: no layer has."""
    route: str = setting("block", choices=("attention", "mlp", "block"))
    """What a token that is not selected skips."""
    capacity: float = setting(0.125, range=(0.01, 1.0))
    """The part of the tokens that such a layer selects."""


@dataclass(frozen=True)
class Architecture:
    """The shape of a model that is made from nothing."""

    family: str = setting("llama", choices=("llama", "mistral", "qwen2", "qwen3", "smollm3"))
    vocab_size: int | None = setting(None, count=True, range=COUNTS)
    """Use only so many of the tokenizer's tokens, the most common ones; nothing uses them all."""
    hidden_size: int = setting(range=COUNTS)
    intermediate_size: int = setting(range=COUNTS)
    layers: int = setting(range=(1, 10_000))
    query_heads: int = setting(range=(1, 10_000))
    kv_heads: int = setting(range=(1, 10_000))
    head_dim: int | None = setting(None, range=(2, 1024))
    """Nothing divides the hidden size by the query heads."""
    max_position_embeddings: int = setting(2048, count=True, range=COUNTS)
    """Longest context that the published model claims, tokens."""
    rope_theta: float = setting(10_000.0, range=POSITIVE)
    tie_word_embeddings: bool = True
    initializer_range: float = setting(0.02, range=(1e-6, 10.0))
    """Standard deviation of the fresh weights."""
    mixture_of_depths: FreshRouters = field(default_factory=FreshRouters)


@dataclass(frozen=True)
class Pretrain(shared.Training):
    """Stage: a new model, trained on text from fresh weights that `seed` decides."""

    tokenizer: str = setting(refers="model")
    """Name of the model whose tokenizer it uses."""
    architecture: Architecture = setting()


def mistakes(config: Pretrain, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Of its batches, and bounds of its gate that compare with another model."""
    yield from shared.mistakes(config, recipe)
    missing = dict.fromkeys(shared.REFERENCE_BOUNDS, "it has no teacher")
    yield from shared.nothing_to_bound(config.gate, missing | shared.NO_FALL)
