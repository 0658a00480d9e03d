"""Whether a draft may read the keys and values of its target.

L layers, Hkv KV heads, d head dim, T tokens.
"""

import torch
from torch import Tensor

from model.config import ModelConfig
from model.kv_format import KV_FORMATS
from model.passes import Pass, PassRunner
from serve.engine.kv_cache import PAGE_SIZE
from serve.engine.runner import LanguageModel

MOST_DIFFERENCE = 0.5
"""Of keys, and of values, in any layer, relative to their size. SmolLM2 in four bits differs by 0.01 to 0.28, models
that were trained apart by more than 1."""
_PROBE_TOKENS = 3 * PAGE_SIZE


@torch.inference_mode()
def can_share_cache(target: LanguageModel, draft: LanguageModel, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether both have the same shapes, and nearly the same keys and values of a few tokens, in `dtype`.

    It decides how often the draft is right, and what a sequence costs; what the target says is its own either way.
    """
    if not _same_shapes(target.config, draft.config):
        return False
    num_tokens = min(model.config.vocab_size for model in (target, draft))
    tokens = torch.arange(_PROBE_TOKENS, device=device) * 7919 % num_tokens
    pairs = zip(_cached(target, tokens, dtype), _cached(draft, tokens, dtype), strict=True)
    return all(bool((ours - theirs).norm() <= MOST_DIFFERENCE * ours.norm()) for ours, theirs in pairs)


def _same_shapes(one: ModelConfig, other: ModelConfig) -> bool:
    """Of what is cached; routed layers have no keys of some tokens, each model of others."""
    routed = one.mixture_of_depths or other.mixture_of_depths
    return not routed and (one.kv_heads, one.head_dim) == (other.kv_heads, other.head_dim)


def _cached(model: LanguageModel, tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values of all layers, each `[T, Hkv, d]` in fp32."""
    device, count = tokens.device, len(tokens)
    positions = torch.arange(count, device=device)
    num_pages = count // PAGE_SIZE
    pages = KV_FORMATS[dtype].allocate(model.config, num_pages, PAGE_SIZE, device)
    tables = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
    ends = torch.tensor([0, count], dtype=torch.int32, device=device)
    PassRunner(model, pages).hidden(Pass(tokens, positions, positions, tables, ends, ends[1:], None))
    return [part.float() for part in pages.tensors()]
