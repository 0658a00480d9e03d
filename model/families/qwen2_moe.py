"""Qwen2 with experts, in the layers that the file names, and one that every token passes through a gate of its own."""

from typing import Any

from model.experts_config import MOST_EXPERTS, MixtureOfExperts, count_in, layers_with_experts, sparse_layer_fields
from model.families.base import Family, Fields, Raw, layer_type_fields, windows_of_layer_types

_FIRST_WITHOUT_WINDOW = 28


def qwen_experts(raw: Raw, *, shared: int | None = None) -> MixtureOfExperts | None:
    """Those of Qwen2 and Qwen3; None if the file leaves no layer any."""
    layers = layers_with_experts(raw)
    experts = MixtureOfExperts(
        layers=layers,
        num_experts=count_in(raw, "num_experts", "num_local_experts", most=MOST_EXPERTS),
        experts_per_token=count_in(raw, "num_experts_per_tok", most=MOST_EXPERTS),
        intermediate_size=count_in(raw, "moe_intermediate_size"),
        normalizes=bool(raw.get("norm_topk_prob", False)),
        shared_intermediate_size=shared,
    )
    return experts if layers else None


def qwen_expert_fields(fields: Fields) -> dict[str, Any]:
    """What `qwen_experts` reads."""
    experts: MixtureOfExperts | None = fields["experts"]
    sparse = sparse_layer_fields(experts, fields["num_layers"])
    if experts is None:
        return sparse | {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 1}
    return sparse | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalizes,
    }


def _read(raw: Raw) -> dict[str, Any]:
    layer_types = raw.get("layer_types") or _layer_types(raw)
    return {
        "windows": windows_of_layer_types(dict(raw) | {"layer_types": layer_types}),
        "qkv_bias": bool(raw.get("qkv_bias", True)),
        "output_bias": False,
        "experts": qwen_experts(raw, shared=count_in(raw, "shared_expert_intermediate_size")),
    }


def _layer_types(raw: Raw) -> list[str]:
    """Those of files that name none: with windows, every second layer of the first ones."""
    last = raw.get("max_window_layers", _FIRST_WITHOUT_WINDOW) if raw.get("use_sliding_window") else 0
    layers = range(raw["num_hidden_layers"])
    return ["sliding_attention" if layer % 2 == 0 and layer < last else "full_attention" for layer in layers]


def _write(fields: Fields) -> dict[str, Any]:
    experts: MixtureOfExperts | None = fields["experts"]
    shared = {"shared_expert_intermediate_size": 1 if experts is None else experts.shared_intermediate_size}
    return layer_type_fields(fields) | qwen_expert_fields(fields) | shared | {"qkv_bias": fields["qkv_bias"]}


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _read, _write)
