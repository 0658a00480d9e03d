"""Mixtral: Mistral with experts in every layer; the weights of a token's experts sum to 1."""

from typing import Any

from model.experts_config import MOST_EXPERTS, MixtureOfExperts, count_in
from model.families.base import Family, Fields, Raw, all_layers, one_window


def _read(raw: Raw) -> dict[str, Any]:
    experts = MixtureOfExperts(
        layers=tuple(range(raw["num_hidden_layers"])),
        num_experts=count_in(raw, "num_local_experts", most=MOST_EXPERTS),
        experts_per_token=count_in(raw, "num_experts_per_tok", most=MOST_EXPERTS),
        intermediate_size=raw["intermediate_size"],
        normalizes=True,
    )
    return {"windows": all_layers(raw, raw.get("sliding_window")), "experts": experts}


def _write(fields: Fields) -> dict[str, Any]:
    experts: MixtureOfExperts = fields["experts"]
    return {
        "sliding_window": one_window(fields),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
    }


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _read,
    _write,
    names_in_files={
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".down_proj.": ".w2.",
        ".up_proj.": ".w3.",
    },
)
