"""Gemma 3, text alone: Gemma's layers with norms of the heads; windowed layers have a rotary base of their own."""

from typing import Any

from model.families.base import NORMS_AROUND, Family, Fields, Raw
from model.families.gemma import ACTIVATION, NORM_OFFSET, read_gemma, write_gemma

_PATTERN, _GLOBAL_THETA, _LOCAL_THETA = 6, 1e6, 1e4
"""What files that leave them out mean: every sixth layer has no window."""
_UNKNOWN = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def _read(raw: Raw) -> dict[str, Any]:
    pattern = raw.get("sliding_window_pattern") or _PATTERN
    shared = read_gemma(raw, "gemma3_text", pattern=pattern, unsupported=_UNKNOWN)
    everywhere, local = _ropes(raw)
    kind = everywhere.pop("rope_type", None) or everywhere.pop("type", None) or "default"
    return shared | {
        "rope_theta": float(everywhere.pop("rope_theta", None) or raw.get("rope_theta") or _GLOBAL_THETA),
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **everywhere},
        "local_rope_theta": float(local.get("rope_theta") or raw.get("rope_local_base_freq") or _LOCAL_THETA),
        "qk_norm": True,
    }


def _ropes(raw: Raw) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of layers without and with a window; before transformers 5 the only block is of those without."""
    both = raw.get("rope_parameters") or {}
    everywhere = both.get("full_attention") or raw.get("rope_scaling") or {}
    return dict(everywhere), dict(both.get("sliding_attention") or {})


def _write(fields: Fields) -> dict[str, Any]:
    scaling = fields["rope_scaling"] or {}
    return write_gemma(fields) | {
        "rope_local_base_freq": fields["local_rope_theta"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **scaling, "rope_theta": fields["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": fields["local_rope_theta"]},
        },
    }


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read,
    _write,
    norms=NORMS_AROUND,
    norm_offset=NORM_OFFSET,
    activation=ACTIVATION,
)
