"""Scales for keys and values in FP8 that a checkpoint brings: calibrated once, for all tokens.

    config.json      `kv_cache_scheme` of `quantization_config`: 8 bits, float
    safetensors      model.layers.N.self_attn.k_scale and v_scale, one or a head's: x ≈ e4m3(x / scale) · scale

Keys are rotated before they are scaled. Source: compressed-tensors; vLLM reads the same. What makes them from a text is
`compress/quantize/cache.py`.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.files.safe_io import CheckpointError
from model.kv_format import FixedScales

log = logging.getLogger(__name__)
CACHE_SCALES = (".self_attn.k_scale", ".self_attn.v_scale")
"""How the names of these tensors end."""
SCHEME = "kv_cache_scheme"
"""What `quantization_config` of config.json calls their kind."""


def read_cache_scales(
    config: ModelConfig, quantization: dict[str, Any], names: Collection[str], read: Callable[[str], Tensor]
) -> tuple[FixedScales, ...]:
    """Of each layer, by a checkpoint's `quantization_config` and the names of its tensors; () where it has none.

    Those of another scheme are not used: the log says so. CheckpointError naming the tensor that is missing or wrong.
    """
    if not any(name.endswith(CACHE_SCALES) for name in names):
        return ()
    scheme = quantization.get(SCHEME) or {}
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        log.info("Scales for keys and values that are not of FP8 are not used: caches here scale each token.")
        return ()

    def scales(layer: int, kind: str) -> Tensor:
        name = f"model.layers.{layer}{kind}"
        if name not in names:
            raise CheckpointError(f"The model's files lack {name}, though they have scales of other layers' caches.")
        return _checked(name, read(name), config.kv_heads[layer])

    keys, values = CACHE_SCALES
    return tuple((scales(layer, keys), scales(layer, values)) for layer in range(config.num_layers))


def cache_scale_tensors(scales: Sequence[FixedScales]) -> dict[str, Tensor]:
    """What files hold of the scales of each layer, by name, fp32: one number where its heads share one."""
    return {
        f"model.layers.{layer}{kind}": one[:1].clone() if _shared(scales) else one.view(-1, 1, 1).clone()
        for layer, both in enumerate(scales)
        for kind, one in zip(CACHE_SCALES, both, strict=True)
    }


def with_cache_scheme(entry: dict[str, Any], scales: Sequence[FixedScales]) -> dict[str, Any]:
    """A `quantization_config` that says of what kind these scales are; CheckpointError where it has no place for it."""
    if not scales:
        return entry
    if SCHEME not in entry:
        method = entry.get("quant_method", "dense weights")
        raise CheckpointError(f"Scales of keys and values stand beside weights of compressed-tensors, not {method}.")
    strategy = "tensor" if _shared(scales) else "attn_head"
    return entry | {SCHEME: {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}}


def _shared(scales: Sequence[FixedScales]) -> bool:
    """Whether all heads of a layer have one scale, in every layer."""
    return all(bool((one == one[0]).all()) for both in scales for one in both)


def _checked(name: str, stored: Tensor, heads: int) -> Tensor:
    scales = stored.flatten().float()
    if len(scales) not in (1, heads) or not (torch.isfinite(scales) & (scales > 0)).all():
        raise CheckpointError(f"{name} must hold one positive number, or one for each of {heads} heads.")
    return scales.expand(heads).contiguous()
