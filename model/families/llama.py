"""Llama: what all others are compared with. Llama 3 stretches its rope frequencies; some have biases everywhere."""

from typing import Any

from model.families.base import Family, Fields


def bias_fields(fields: Fields) -> dict[str, Any]:
    """`attention_bias` is of all four projections around attention, `mlp_bias` of all three of the MLP."""
    return {"attention_bias": fields["qkv_bias"], "mlp_bias": fields["mlp_bias"]}


LLAMA = Family("llama", "LlamaForCausalLM", write=bias_fields)
