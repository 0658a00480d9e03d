"""Gemma 2: as Gemma 3, but every other layer has a window, all rotate alike, heads have no norms, and a soft cap keeps
scores and logits in bounds."""

from typing import Any

from model.families.base import NORMS_AROUND, Family, Fields, Raw
from model.families.gemma import ACTIVATION, NORM_OFFSET, read_gemma, write_gemma

_HEAD_DIM, _SCORE_CAP, _LOGIT_CAP = 256, 50.0, 30.0
"""What files that leave them out mean; null is no cap."""


def _read(raw: Raw) -> dict[str, Any]:
    shared = read_gemma(raw, "gemma2", pattern=2, unsupported=("use_bidirectional_attention",))
    return shared | {
        "head_dim": raw.get("head_dim") or _HEAD_DIM,
        "attention_soft_cap": raw.get("attn_logit_softcapping", _SCORE_CAP),
        "logit_soft_cap": raw.get("final_logit_softcapping", _LOGIT_CAP),
    }


def _write(fields: Fields) -> dict[str, Any]:
    return write_gemma(fields) | {
        "attn_logit_softcapping": fields["attention_soft_cap"],
        "final_logit_softcapping": fields["logit_soft_cap"],
    }


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _read,
    _write,
    norms=NORMS_AROUND,
    norm_offset=NORM_OFFSET,
    activation=ACTIVATION,
)
