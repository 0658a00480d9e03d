"""The shape of a model, read from and written to Hugging Face's `config.json`.

All decoder families share one transformer; what tells one from another stands in its file in model/families.

In any of them some layers may have a router that lets only part of the tokens through (mixture of depths). No other
tool computes such layers, so the file then names an architecture that no other tool knows: opening it there fails.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from model.config_fields import MOST_POSITIONS, ConfigError, check_fields, is_count, is_positive, shown
from model.experts_config import MixtureOfExperts
from model.families.base import Family
from model.families.registry import FAMILIES

ROUTED_ARCHITECTURE, ROUTED_MODEL_TYPE = "PotstillMixtureOfDepthsForCausalLM", "potstill_mixture_of_depths"
Route = Literal["attention", "mlp", "block"]


@dataclass(frozen=True)
class MixtureOfDepths:
    """Which layers have a router, and what its decision means; model/routed.py says what is computed."""

    route: Route
    """What a token that is not selected skips: a layer's attention (it then has no key there either), its MLP, or
    both."""
    layers: tuple[int, ...]
    """Indices of the layers with a router, ascending."""
    capacity: float
    """The part of the tokens that these layers are meant to select."""
    thresholds: tuple[float, ...] = ()
    """For each of `layers`: a token is selected where its score is above this. Given as nothing: zeros."""
    gate_range: float = 0.2
    """How far a selected token's gate may be from 1."""

    def __post_init__(self) -> None:
        if not self.thresholds:
            object.__setattr__(self, "thresholds", (0.0,) * len(self.layers))
        if self.route not in get_args(Route):
            raise ConfigError(f"mixture_of_depths.route is {self.route!r}; known are {', '.join(get_args(Route))}.")
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(f"mixture_of_depths.layers must be ascending layer numbers, not {list(self.layers)}.")
        if not 0 < self.capacity <= 1:
            raise ConfigError(f"mixture_of_depths.capacity must be above 0 and at most 1, not {self.capacity}.")
        if len(self.thresholds) != len(self.layers) or not all(map(math.isfinite, self.thresholds)):
            raise ConfigError("mixture_of_depths.thresholds must be one finite number for each of its layers.")

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "MixtureOfDepths":
        try:
            numbers = {name: float(raw[name]) for name in ("capacity", "gate_range")}
            layers, thresholds = (tuple(raw[name]) for name in ("layers", "thresholds"))
            return cls(raw["route"], tuple(map(int, layers)), thresholds=tuple(map(float, thresholds)), **numbers)
        except (KeyError, TypeError, ValueError) as reason:
            if isinstance(reason, ConfigError):
                raise
            raise ConfigError(f"config.json has no readable mixture_of_depths block: {reason!r}.") from None

    def keep_layers(self, keep: tuple[int, ...]) -> "MixtureOfDepths | None":
        """What is left when a model keeps only its layers `keep`; None without a router."""
        left = [(new, self.layers.index(old)) for new, old in enumerate(keep) if old in self.layers]
        if not left:
            return None
        layers, thresholds = tuple(new for new, _ in left), tuple(self.thresholds[at] for _, at in left)
        return replace(self, layers=layers, thresholds=thresholds)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that defines the function a checkpoint computes. Sizes are counts, angles are radians."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    """Of every layer; where layers differ, of the one with most."""
    head_dim: int
    windows: tuple[int | None, ...]
    """For each layer, how many keys a query sees, itself included; None is all of them."""
    rope_layers: tuple[bool, ...]
    """For each layer, whether queries and keys are rotated."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    local_rope_theta: float | None = None
    """That of layers with a window, whose frequencies are not scaled; None: as all others."""
    rotary_factor: float = 1.0
    """The part of each head, its first features, that is rotated."""
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    embedding_multiplier: float = 1.0
    """Of what the embeddings give to the first layer."""
    residual_multiplier: float = 1.0
    """Of what each block adds to the residual stream."""
    attention_scale: float | None = None
    """Of the scores; None: 1/√head_dim."""
    attention_soft_cap: float | None = None
    """That scores, scaled, tend to and never pass; None: there is none."""
    logit_divisor: float = 1.0
    logit_soft_cap: float | None = None
    """The same for logits."""
    layer_kv_heads: tuple[int, ...] = ()
    """For each layer its KV heads, where layers differ. Then config.json holds a list, which only potstill reads."""
    experts: MixtureOfExperts | None = None
    mixture_of_depths: MixtureOfDepths | None = None
    draft_vocabulary: tuple[int, ...] = field(default=(), repr=False)
    """The tokens, ascending, that the model says where it drafts for another; nothing: all. Alone it says all."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"Unknown model family {self.family!r}; known families are {', '.join(FAMILIES)}.")
        for heads in sorted(set(self.kv_heads)):
            if heads < 1 or self.num_query_heads % heads:
                raise ConfigError(
                    f"num_attention_heads ({self.num_query_heads}) must be a multiple of num_key_value_heads ({heads})."
                )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, not {self.head_dim}.")
        self._check_rotation()
        for name in ("windows", "rope_layers", "kv_heads"):
            if len(getattr(self, name)) != self.num_layers:
                raise ConfigError(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers.")
        if self.mixture_of_depths and self.mixture_of_depths.layers[-1] >= self.num_layers:
            raise ConfigError(
                f"mixture_of_depths names layer {self.mixture_of_depths.layers[-1]} of {self.num_layers} layers."
            )

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Reads the contents of a `config.json`; raises ConfigError naming what is unknown or missing."""
        mixture_of_depths = None
        if raw.get("model_type") == ROUTED_MODEL_TYPE or "mixture_of_depths" in raw:
            block = raw.get("mixture_of_depths") or {}
            mixture_of_depths = MixtureOfDepths.from_hf(block)
            raw = raw | {name: block.get(name) for name in ("architectures", "model_type")}
        family = _family(raw)
        if type(raw.get("sliding_window")) is int and raw["sliding_window"] == 0:  # transformers writes that for none
            raw = raw | {"sliding_window": None}
        check_fields(raw)
        fields = _shared_fields(raw, family.activation) | family.read(raw)
        config = cls(family=family.name, mixture_of_depths=mixture_of_depths, **fields)
        kv_heads = raw.get("num_key_value_heads")
        return config.with_kv_heads(kv_heads) if isinstance(kv_heads, list) else config

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` contents that transformers and vLLM read; with routers, that they refuse."""
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        raw: dict[str, Any] = {
            "architectures": [self.kind.architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_query_heads,
            "num_key_value_heads": list(self.layer_kv_heads) or self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rope_parameters": rope,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            "pad_token_id": self.pad_token_id,
            "initializer_range": self.initializer_range,
            "use_cache": True,
        }
        raw |= self.kind.write(vars(self))
        if self.draft_vocabulary:
            raw["draft_vocabulary"] = _ranges_of(self.draft_vocabulary)
        if self.mixture_of_depths is None:
            return raw
        names = {name: raw[name] for name in ("architectures", "model_type")}
        block = asdict(self.mixture_of_depths) | {
            "layers": list(self.mixture_of_depths.layers),
            "thresholds": list(self.mixture_of_depths.thresholds),
        }
        routed = {"architectures": [ROUTED_ARCHITECTURE], "model_type": ROUTED_MODEL_TYPE}
        return raw | routed | {"mixture_of_depths": block | names}

    def _check_rotation(self) -> None:
        if self.rotary_factor > 1 or self.rotary_dims < 2 or self.rotary_dims % 2:
            raise ConfigError(
                f"partial_rotary_factor is {self.rotary_factor}; it must leave an even part of the {self.head_dim} "
                "features of a head to be rotated."
            )
        if (scaling := self.rope_scaling) is None or scaling["rope_type"] != "longrope":
            return
        length, expected = scaling.get("original_max_position_embeddings"), self.rotary_dims // 2
        for name in ("short_factor", *({"long_factor"} & scaling.keys())):
            factors = scaling.get(name)
            if not isinstance(factors, list) or len(factors) != expected or not all(map(is_positive, factors)):
                raise ConfigError(f"longrope needs a {name} of {expected} positive numbers.")
        if not is_count(length, MOST_POSITIONS) or length == 1:
            raise ConfigError("longrope needs original_max_position_embeddings, a whole number from 2 on.")

    @property
    def rotary_dims(self) -> int:
        """Features of each head that are rotated."""
        return int(self.head_dim * self.rotary_factor)

    @property
    def num_positions(self) -> int:
        """The longest text that the model is computed faithfully for.

        LongRoPE turns all keys of a text otherwise once it is longer than in the first training, those that are in a
        cache included: longer texts are not served.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling["rope_type"] != "longrope":
            return self.max_position_embeddings
        return min(self.max_position_embeddings, int(scaling["original_max_position_embeddings"]))

    @property
    def kind(self) -> Family:
        """What all models of the family have in common."""
        return FAMILIES[self.family]

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        return self.layer_kv_heads or (self.num_kv_heads,) * self.num_layers

    @property
    def routed_attention(self) -> tuple[int, ...]:
        """The layers whose attention only selected tokens enter."""
        mixture = self.mixture_of_depths
        return () if mixture is None or mixture.route == "mlp" else mixture.layers

    @property
    def mlp_neurons(self) -> tuple[int, ...]:
        """That one token passes in each layer, of an MLP or of experts."""
        experts, layers = self.experts, range(self.num_layers)
        if experts is None:
            return (self.intermediate_size,) * self.num_layers
        sparse, dense = experts.neurons_per_token, self.intermediate_size
        return tuple(sparse if layer in experts.layers else dense for layer in layers)

    @property
    def opens_elsewhere(self) -> bool:
        """Whether transformers and vLLM read config.json and understand the same."""
        return not self.layer_kv_heads and self.mixture_of_depths is None

    def with_kv_heads(self, kv_heads: Sequence[int]) -> "ModelConfig":
        """The same with so many KV heads in each layer."""
        differ = len(set(kv_heads)) > 1
        return replace(self, num_kv_heads=max(kv_heads), layer_kv_heads=tuple(kv_heads) if differ else ())

    def keep_layers(self, keep: tuple[int, ...]) -> "ModelConfig":
        """The configuration of a model with only the layers `keep` (indices in ascending order) left."""
        kept = replace(
            self,
            num_layers=len(keep),
            layer_kv_heads=(),
            windows=tuple(self.windows[layer] for layer in keep),
            rope_layers=tuple(self.rope_layers[layer] for layer in keep),
            experts=self.experts and self.experts.keep_layers(keep),
            mixture_of_depths=self.mixture_of_depths and self.mixture_of_depths.keep_layers(keep),
        )
        return kept.with_kv_heads([self.kv_heads[layer] for layer in keep])

    def narrow(self, *, heads: int | None = None, mlp: int | None = None, hidden: int | None = None) -> "ModelConfig":
        """The same with so many query heads, MLP neurons and channels of the residual stream; None keeps them all.

        Every KV head keeps as many query heads as the others; where each query head has its own, that goes with it.
        transformers refuses a Llama whose heads do not divide its channels, though none else: such a one becomes a
        Mistral without a window, which is the same function. Raises ConfigError for what cannot be.
        """
        if not self.kind.has_norms_before_alone:
            raise ConfigError(f"{self.family} norms what its blocks add; only whole layers can leave such a model")
        if self.kind.joins_projections:
            raise ConfigError(f"{self.family} joins projections; only whole layers can leave such a model")
        if self.experts is not None:
            raise ConfigError(f"{self.family} has experts; only whole layers can leave such a model")
        heads = _part("heads", heads, self.num_query_heads)
        mlp = _part("mlp", mlp, self.intermediate_size)
        hidden = _part("hidden", hidden, self.hidden_size)
        kv_heads = [heads if own == self.num_query_heads else own for own in self.kv_heads]
        if (groups := next((own for own in kv_heads if heads % own), None)) is not None:
            raise ConfigError(f"heads is {heads}; it must be a multiple of the model's {groups} KV heads.")
        family = "mistral" if self.family == "llama" and hidden % heads else self.family
        if family != self.family and (self.qkv_bias or self.output_bias or self.mlp_bias):
            raise ConfigError(
                f"hidden is {hidden}; with biases it must be a multiple of the {heads} heads, or transformers would "
                "not open the model."
            )
        narrow = replace(
            self,
            family=family,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_query_heads=heads,
            num_kv_heads=max(kv_heads),
            layer_kv_heads=(),
        )
        return narrow.with_kv_heads(kv_heads)

    def num_parameters(self) -> int:
        """Parameters of the model; tied embeddings count once."""
        layers, query, kv = self.num_layers, self.num_query_heads * self.head_dim, sum(self.kv_heads) * self.head_dim
        attention = self.hidden_size * 2 * (layers * query + kv)
        attention += self.qkv_bias * (layers * query + 2 * kv) + self.output_bias * layers * self.hidden_size
        normed = layers * query + kv if self.kind.norms_whole_projections else layers * 2 * self.head_dim
        attention += self.qk_norm * normed
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        sparse = 0 if self.experts is None else len(self.experts.layers)
        experts = 0 if self.experts is None else sparse * self.experts.num_parameters(self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        routers = len(self.mixture_of_depths.layers) if self.mixture_of_depths else 0
        return (
            attention
            + (layers - sparse) * mlp
            + experts
            + layers * self.kind.num_norms * self.hidden_size
            + embeddings
            + self.hidden_size
            + routers * (self.hidden_size + 1)
        )


def _family(raw: dict[str, Any]) -> Family:
    named, kind = raw.get("architectures") or [], raw.get("model_type")
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise ConfigError(f"config.json has architectures {shown(named)}; it must be a list of names.")
    for family in FAMILIES.values():
        if family.architecture in named or (not named and kind == family.name):
            return family
    found = shown(", ".join(named) or kind or "nothing").strip("'")
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise ConfigError(f"config.json names the architecture {found}; supported are {known}.")


def _shared_fields(raw: dict[str, Any], activation: str) -> dict[str, Any]:
    """What all families write alike, and what most of them have; a family says what is otherwise."""
    try:
        hidden_size, num_query_heads = raw["hidden_size"], raw["num_attention_heads"]
        num_layers = raw["num_hidden_layers"]
        sizes = {name: raw[name] for name in ("vocab_size", "intermediate_size")}
    except KeyError as missing:
        raise ConfigError(f"config.json has no field {missing}.") from None
    if (asked := raw.get("hidden_activation") or raw.get("hidden_act") or activation) != activation:
        raise ConfigError(f"config.json asks for hidden_act {asked!r}; only {activation!r} is supported.")
    rope_theta, rope_scaling = _rope(raw)
    attention_bias, kv_heads = bool(raw.get("attention_bias", False)), raw.get("num_key_value_heads") or num_query_heads
    return sizes | {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_query_heads": num_query_heads,
        "num_kv_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        "head_dim": raw.get("head_dim") or hidden_size // num_query_heads,
        "windows": (None,) * num_layers,
        "rope_layers": (True,) * num_layers,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": _as_tuple(raw.get("eos_token_id")),
        "pad_token_id": raw.get("pad_token_id"),
        "initializer_range": raw.get("initializer_range", 0.02),
        "draft_vocabulary": _numbers_in(raw.get("draft_vocabulary", ""), below=sizes["vocab_size"]),
    }


def _rope(raw: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """transformers 5 keeps theta and scaling in `rope_parameters`, earlier releases in two fields."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    return float(theta), None if kind == "default" else {"rope_type": kind, **parameters}


def _part(name: str, wanted: int | None, have: int) -> int:
    """How many are kept of those there are; None is all."""
    if wanted is not None and not 1 <= wanted <= have:
        raise ConfigError(f"{name} is {wanted}, but the model has {have}.")
    return wanted or have


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _ranges_of(numbers: Sequence[int]) -> str:
    """Ascending numbers as "0-511,640,700-702"."""
    firsts = [0] + [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    runs = [(numbers[a], numbers[b - 1]) for a, b in zip(firsts, [*firsts[1:], len(numbers)], strict=True)]
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _numbers_in(ranges: Any, *, below: int) -> tuple[int, ...]:
    """The inverse of `_ranges_of`."""
    if ranges == "":
        return ()
    if not isinstance(ranges, str) or not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", ranges, re.ASCII):
        raise ConfigError('config.json has no readable draft_vocabulary: it must be text such as "0-511,640,700-702".')
    runs = [tuple(map(int, run.split("-"))) for run in ranges.split(",")]
    ends = [end for run in runs for end in (run[0], run[-1] + 1)]
    if any(after < before for before, after in pairwise(ends)) or any(run[-1] < run[0] for run in runs):
        raise ConfigError("config.json has no readable draft_vocabulary: its tokens do not ascend.")
    if ends[-1] > below:
        raise ConfigError(f"draft_vocabulary names token {ends[-1] - 1} of {below} tokens.")
    return tuple(number for run in runs for number in range(run[0], run[-1] + 1))
