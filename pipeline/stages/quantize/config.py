"""Settings of the stage `quantize`."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from compress.quantize.methods import METHODS
from model.formats.registry import DEFAULT_FINER, DEFAULT_WEIGHTS, FORMATS, NO_FORMAT
from pipeline.schema import Recipe
from pipeline.settings import COUNTS, redeclared, setting
from pipeline.stages.shared.config import Recovery
from pipeline.stages.shared.config import mistakes as training_mistakes

if TYPE_CHECKING:
    from model.config import ModelConfig

_STATIC = "-static"
_DEFAULTS = {"group": None, "symmetric": True, "activations": False}


@dataclass(frozen=True)
class Weights:
    """How the linear weights are stored."""

    format: str = setting(DEFAULT_WEIGHTS, choices=tuple(FORMATS))
    group: int | None = setting(None, range=(1, 1_000_000))
    """Neighbours of a row that share a scale; nothing is what the format has by itself: 32 in four bits, else a row."""
    symmetric: bool = True
    """Codes around zero; else each group has a zero of its own."""
    activations: bool = False
    """Round what these weights are multiplied with to 8 bits as well, for which CPUs have faster products: in four bits
    and in groups 32 neighbours by themselves (64 where they divide a group), in rows of eight bits (W8A8, as elsewhere)
    each token by itself."""

    def options(self) -> dict[str, Any]:
        """What differs from the format's own defaults."""
        chosen = {"group": self.group, "symmetric": self.symmetric, "activations": self.activations}
        return {name: chosen[name] for name, default in _DEFAULTS.items() if chosen[name] != default}


@dataclass(frozen=True)
class Quantize(Recovery):
    """Stage: round the weights to fewer bits, teach them by the model that they were made of, measure, publish."""

    model: str = setting(refers="model")
    method: str = setting("gptq", choices=tuple(METHODS))
    """How levels and scales are chosen, as in compress/quantize."""
    weights: Weights = field(default_factory=Weights)
    embeddings: str = setting(DEFAULT_FINER, choices=(*FORMATS, NO_FORMAT))
    """Of the embeddings and the head, a fifth of a small model. Only potstill reads quantized ones; `none` keeps the
    result open to transformers and vLLM."""
    layers: dict[str, str] = field(default_factory=dict)
    """Other formats by patterns of layers' names, such as `"*.down_proj": FORMAT`; `none` leaves a layer dense."""
    compare: tuple[str, ...] = setting((), weights=False, figures=True, choices=tuple(METHODS))
    """Methods to show beside each other, before recovery."""
    average_bits: float | None = setting(None, range=(1.0, 32.0))
    """Give `larger` to the layers that rounding would cost most, so that the weights of all layers take this many bits
    on average, scales included; nothing gives it to none."""
    larger: str = setting(DEFAULT_FINER, choices=tuple(FORMATS))
    kv_cache: Literal["auto", "int8", "fp8", "fp8-static"] = field(default="auto", metadata={"weights": False})
    """In what keys and values will be cached (`--kv-cache-dtype` of the server): gate and figures are those with it.
    Each token has scales of its own, but with `fp8-static`: one of a layer's keys and one of its values, found on the
    calibration text, go into the files, from which servers take them for `fp8`."""
    calibration_tokens: int = setting(32_768, count=True, range=COUNTS)
    """Training tokens whose inputs to each layer decide how its weights are rounded."""
    iterations: int = setting(200, range=(1, 100_000))
    """Steps of learned rounding for each layer, on one sequence of the calibration text each."""
    tokens: int = redeclared(Recovery, "tokens", 0, range=(0, 10**12))
    """Tokens of the recovery; 0 publishes what rounding gives."""
    train: Literal["scales", "low_rank", "all"] = "scales"
    """What recovery trains beside the norms: scales alone, levels staying as they are; scales and a low-rank update of
    the weights behind the levels; or these weights themselves."""
    batch_tokens: int = redeclared(Recovery, "batch_tokens", 1_024)
    """A quarter of what other stages take: a recovery has few tokens, of which more steps make more."""
    micro_batch_tokens: int = redeclared(Recovery, "micro_batch_tokens", 1_024)
    learning_rate: float = redeclared(Recovery, "learning_rate", 3e-4)
    """Of scales as factors of themselves, and of weights in units of their rounding. The more rounding has cost, the
    higher: on SmolLM2 this suits a KL of 0.03, twice as much one of 0.13. Times the steps it must reach 0.002 for the
    first scale to be another number in bf16, 0.01 for the first weight to change its level."""
    out: str = redeclared(Recovery, "out", "quantized")

    @property
    def kv_cache_dtype(self) -> str:
        """As the server's option."""
        return self.kv_cache.removesuffix(_STATIC)

    @property
    def has_static_cache(self) -> bool:
        """Whether the files bring the cache's scales."""
        return self.kv_cache.endswith(_STATIC)

    def short_name(self) -> str:
        """The format and what it departs in from its defaults, with the bits of a budget."""
        names = [name if value is True else f"{name} {value}" for name, value in self.weights.options().items()]
        bits = [] if self.average_bits is None else [f"{self.average_bits:g} bits"]
        return ", ".join([self.weights.format, *names, *bits])


def choices(config: Quantize, shape: "ModelConfig") -> dict[str, Quantize]:
    """The recipe's own weights, the formats to serve from, with rounded activations, and sizes in between."""
    found: dict[str, Quantize] = {}
    for weights in (config.weights, *(Weights(name) for name in (DEFAULT_FINER, DEFAULT_WEIGHTS))):
        for activations in dict.fromkeys((weights.activations, True)):
            bits = config.average_bits if weights is config.weights else None
            one = replace(config, weights=replace(weights, activations=activations), average_bits=bits)
            found.setdefault(one.short_name(), one)
    for average in (5.5, 6.5):
        one = replace(config, weights=Weights(DEFAULT_WEIGHTS), average_bits=average)
        found.setdefault(one.short_name(), one)
    return found


def mistakes(config: Quantize, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What is wrong with its batches, where it has any, and formats that do not exist."""
    if config.tokens:
        yield from training_mistakes(config, recipe)
    for pattern, name in config.layers.items():
        if name not in (*FORMATS, NO_FORMAT):
            yield f"layers.{pattern}", f"is {name!r}; it can be {', '.join((*FORMATS, NO_FORMAT))}"
