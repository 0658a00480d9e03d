"""What llama.cpp calls each family, which fields of a file say what config.json says, and what it takes for granted.

Source: llama.cpp's converter from Hugging Face, and its graphs in src/models.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from model.config import ModelConfig
from model.experts_config import MixtureOfExperts
from model.text.gguf_tokenizer import GGUFError

ALL_BIASES = ("qkv_bias", "output_bias", "mlp_bias")


class Assumption(NamedTuple):
    """What llama.cpp computes in all models of a family, whatever the file says."""

    field: str
    """Of `ModelConfig`."""
    value: Callable[[ModelConfig], Any]
    sentence: str
    """What it does, as "gives every layer experts"."""
    otherwise: Callable[[ModelConfig], str]
    """What a model does that differs, and the key of config.json that says so, as "has head_dim 32"."""


@dataclass(frozen=True)
class Architecture:
    """One family in GGUF files."""

    family: str
    name: str
    """`general.architecture`, with which the names of fields begin."""
    rotates_pairs: bool = False
    """Whether rows of queries and keys are stored for rotation of neighbours, not of the two halves of a head."""
    biases: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that a file must have, and config.json's."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """The same of fields whose absence says what it says in config.json."""
    assumptions: tuple[Assumption, ...] = ()

    @property
    def has_experts(self) -> bool:
        return "expert_count" in self.fields

    def pair_size(self, config: ModelConfig) -> int | None:
        """As `as_stored` takes it."""
        return config.head_dim if self.rotates_pairs else None

    def as_computed(self, config: ModelConfig) -> ModelConfig:
        """The configuration that llama.cpp computes."""
        return replace(config, **{one.field: one.value(config) for one in self.assumptions})

    def own_fields(self, config: ModelConfig) -> dict[str, Any]:
        """What this family alone writes, by names without the architecture's."""
        raw = config.to_hf()
        return {name: raw[own] for name, own in {**self.fields, **self.optional}.items() if raw[own] is not None}


def architecture_of(family: str) -> Architecture:
    """That of a family of ours; GGUFError for one that has none."""
    for one in ARCHITECTURES:
        if one.family == family:
            return one
    known = ", ".join(one.family for one in ARCHITECTURES)
    raise GGUFError(f"{family} models cannot be written as GGUF; supported are {known}.")


def architecture_in(metadata: Mapping[str, Any]) -> Architecture:
    """That of a file; GGUFError for one that is not known."""
    name = metadata.get("general.architecture")
    has_experts = bool(metadata.get(f"{name}.expert_count"))
    for one in ARCHITECTURES:
        if one.name == name and one.has_experts == has_experts:
            return one
    known = ", ".join(dict.fromkeys(one.name for one in ARCHITECTURES))
    with_experts = " with experts" if has_experts else ""
    raise GGUFError(f"general.architecture is {name!r}{with_experts}; supported are {known}.")


def check_fits(config: ModelConfig) -> None:
    """GGUFError naming what llama.cpp would not compute, or would compute otherwise."""
    own = architecture_of(config.family)
    if config.mixture_of_depths is not None:
        raise GGUFError("GGUF holds no routers (mixture of depths); export a model of the recipe from before them.")
    if config.layer_kv_heads:
        raise GGUFError(
            f"llama.cpp reads as many KV heads in every layer, not {list(config.layer_kv_heads)}; group them alike."
        )
    for one in own.assumptions:
        if getattr(config, one.field) != one.value(config):
            raise GGUFError(
                f"llama.cpp {one.sentence}, but this model {one.otherwise(config)}; vLLM reads its folder as it is "
                "or, quantized, once it is exported to compressed-tensors."
            )
    if any(config.windows) and "windows" not in [one.field for one in own.assumptions]:
        raise GGUFError(
            "llama.cpp ignores this family's sliding window; if your texts fit into the window, copy the folder "
            "without potstill.json, set sliding_window to null in its config.json, and export the copy."
        )
    for bias in ALL_BIASES:
        if getattr(config, bias) and bias not in own.biases:
            raise GGUFError(f"llama.cpp knows no such biases in models of the family {config.family}: {bias}.")
    scaling = config.rope_scaling or {"rope_type": "default"}
    kind = scaling["rope_type"]
    if kind == "llama3" and own.name != "llama":
        raise GGUFError(f"llama.cpp reads no divisors of the rotary frequencies for the family {config.family}.")
    if kind == "longrope" and "long_factor" not in scaling:
        raise GGUFError("llama.cpp reads factors of long contexts too; give rope_scaling in config.json a long_factor.")


def _layers(chosen: Iterable[Any]) -> str:
    """Numbers of those layers for which `chosen` holds, as "layers 1, 3"."""
    numbers = [str(layer) for layer, is_chosen in enumerate(chosen) if is_chosen]
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else "no layer"


def _rotates_three_of_four(config: ModelConfig) -> tuple[bool, ...]:
    return tuple((layer + 1) % 4 != 0 for layer in range(config.num_layers))


def _rotates_otherwise(config: ModelConfig) -> str:
    without, expected = ((not one for one in layers) for layers in (config.rope_layers, _rotates_three_of_four(config)))
    return (
        f"leaves {_layers(without)} where llama.cpp expects {_layers(expected)} (no_rope_layers in config.json, "
        "counted from 0), which removing layers causes"
    )


def _heads_share_channels(title: str) -> Assumption:
    def head_dim(config: ModelConfig) -> int:
        return config.hidden_size // config.num_query_heads

    def otherwise(config: ModelConfig) -> str:
        return f"has head_dim {config.head_dim} in config.json, not hidden_size / heads = {head_dim(config)}"

    return Assumption("head_dim", head_dim, f"shares the channels of {title} out among its heads", otherwise)


def _untied(title: str) -> Assumption:
    return _tying(False, f"reads a head of its own of {title}")


def _tying(ties: bool, sentence: str) -> Assumption:
    def otherwise(config: ModelConfig) -> str:
        return f"has tie_word_embeddings {_spelled(not ties)} in config.json"

    return Assumption("tie_word_embeddings", lambda config: ties, sentence, otherwise)


def _spelled(value: bool) -> str:
    return "true" if value else "false"


def _experts_everywhere(title: str, *, normalizes: bool) -> Assumption:
    def experts(config: ModelConfig) -> MixtureOfExperts | None:
        layers = tuple(range(config.num_layers))
        return config.experts and replace(config.experts, layers=layers, normalizes=normalizes)

    def otherwise(config: ModelConfig) -> str:
        own, found = config.experts, []
        if own is not None and own.normalizes != normalizes:
            by_default = "" if own.normalizes else " (its default)"
            found.append(f"norm_topk_prob {_spelled(own.normalizes)}{by_default} in config.json")
        if own is not None and len(own.layers) < config.num_layers:
            dense = _layers(layer not in own.layers for layer in range(config.num_layers))
            found.append(f"no experts in {dense} (decoder_sparse_step, mlp_only_layers, counted from 0)")
        return f"has {' and '.join(found)}"

    weights = "weights that sum to 1" if normalizes else "weights as the router has them"
    return Assumption("experts", experts, f"gives every layer of {title} experts, with {weights}", otherwise)


def _gemma(title: str, *, period: int, layers: str, of_27b: int) -> tuple[Assumption, ...]:
    """`period`: one layer in so many has no window, `layers` are the others; `of_27b`: how many its largest has."""

    def windows(config: ModelConfig) -> tuple[int | None, ...]:
        window = next((own for own in config.windows if own is not None), 0)
        return tuple(window if (layer + 1) % period else None for layer in range(config.num_layers))

    def scale(config: ModelConfig) -> float:
        is_largest = config.num_layers == of_27b
        return (config.hidden_size // config.num_query_heads if is_largest else config.head_dim) ** -0.5

    def windows_otherwise(config: ModelConfig) -> str:
        here, expected = ((one is not None for one in each) for each in (config.windows, windows(config)))
        return (
            f"gives {_layers(here)} one where llama.cpp expects {_layers(expected)} (layer_types in config.json, "
            "counted from 0), which removing layers causes"
        )

    def scale_otherwise(config: ModelConfig) -> str:
        here, expected = (round(one**-2) for one in (config.attention_scale or config.head_dim**-0.5, scale(config)))
        return f"has query_pre_attn_scalar {here} in config.json, not {expected}"

    scaled = f"scales scores of {title} by 1/√head_dim, with {of_27b} layers by 1/√(hidden_size / heads)"
    return (
        Assumption("windows", windows, f"gives {layers} of {title} a sliding window", windows_otherwise),
        Assumption("attention_scale", scale, scaled, scale_otherwise),
        _tying(True, f"makes logits of {title} with the embeddings"),
    )


ARCHITECTURES = (
    Architecture("llama", "llama", rotates_pairs=True, biases=ALL_BIASES),
    Architecture("mistral", "llama", rotates_pairs=True),
    Architecture(
        "smollm3",
        "smollm3",
        rotates_pairs=True,
        assumptions=(
            Assumption(
                "rope_layers",
                _rotates_three_of_four,
                "leaves every fourth layer of SmolLM3 without rotation",
                _rotates_otherwise,
            ),
        ),
    ),
    Architecture("qwen2", "qwen2", biases=("qkv_bias",)),
    Architecture("qwen3", "qwen3"),
    Architecture(
        "gemma3_text",
        "gemma3",
        fields={"attention.sliding_window": "sliding_window"},
        optional={"rope.freq_base_swa": "rope_local_base_freq"},
        assumptions=_gemma("Gemma 3", period=6, layers="all but every sixth layer", of_27b=62),
    ),
    Architecture(
        "gemma2",
        "gemma2",
        optional={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        assumptions=_gemma("Gemma 2", period=2, layers="every other layer", of_27b=46),
    ),
    Architecture(
        "granite",
        "granite",
        rotates_pairs=True,
        biases=ALL_BIASES,
        fields={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    Architecture("olmo2", "olmo2", assumptions=(_heads_share_channels("OLMo 2"), _untied("OLMo 2"))),
    Architecture(
        "phi3",
        "phi3",
        optional={"attention.sliding_window": "sliding_window"},
        assumptions=(_heads_share_channels("Phi-3"),),
    ),
    Architecture(
        "qwen3_moe",
        "qwen3moe",
        fields={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        assumptions=(_experts_everywhere("Qwen3-MoE", normalizes=True),),
    ),
    Architecture(
        "mixtral",
        "llama",
        rotates_pairs=True,
        fields={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    Architecture(
        "qwen2_moe",
        "qwen2moe",
        biases=("qkv_bias",),
        fields={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        assumptions=(
            _heads_share_channels("Qwen2-MoE"),
            _untied("Qwen2-MoE"),
            _experts_everywhere("Qwen2-MoE", normalizes=False),
        ),
    ),
)
