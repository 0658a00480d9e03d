"""Granite 3: Llama with four constants, on the embeddings, on what blocks add, on scores and under the logits."""

from typing import Any

from model.families.base import Family, Fields, Raw
from model.families.llama import bias_fields


def _read(raw: Raw) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(raw.get("embedding_multiplier") or 1.0),
        "residual_multiplier": float(raw.get("residual_multiplier") or 1.0),
        "attention_scale": float(raw.get("attention_multiplier") or 1.0),
        "logit_divisor": float(raw.get("logits_scaling") or 1.0),
    }


def _write(fields: Fields) -> dict[str, Any]:
    return bias_fields(fields) | {
        "embedding_multiplier": fields["embedding_multiplier"],
        "residual_multiplier": fields["residual_multiplier"],
        "attention_multiplier": fields["attention_scale"],
        "logits_scaling": fields["logit_divisor"],
    }


GRANITE = Family("granite", "GraniteForCausalLM", _read, _write)
