"""OLMo 2: norms of what the blocks add instead of what they read; queries and keys normalised over all their heads."""

from typing import Any

from model.families.base import NORMS_BEHIND, Family, Fields, Raw

_EPS = 1e-5


def _read(raw: Raw) -> dict[str, Any]:
    return {"qk_norm": True, "rms_norm_eps": raw.get("rms_norm_eps") or _EPS}


def _write(fields: Fields) -> dict[str, Any]:
    return {"attention_bias": fields["qkv_bias"]}


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read, _write, norms=NORMS_BEHIND, norms_whole_projections=True)
