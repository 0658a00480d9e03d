"""The target's own first layers as a draft: no second model, and keys and values that are the target's.

After layer n the target's final norm and head say what it would say if it ended there. What these layers have cached of
a sequence is what the target has cached of it, so the draft reads the target's pages, lacks nothing, ever, and what it
writes for its own guesses the target's verification writes over with the same numbers. How often an untrained exit is
right is the model's own matter; where it does not pay the length of drafts becomes 0. Sources: LayerSkip,
https://arxiv.org/abs/2404.16710; Draft & Verify, https://arxiv.org/abs/2309.08168.

L layers, T tokens, D hidden size, V vocabulary.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from model.adapter_slots import AdapterSlots
from model.attention import PackedAttention, PagedAttention
from model.transformer import Transformer
from serve.engine.drafts.base import DraftContext
from serve.engine.drafts.length import MAX_DRAFT_TOKENS, expected_tokens
from serve.engine.drafts.model import ModelDraft

_NUM_TEXTS, _TEXT_TOKENS = 4, 16
"""What the model writes itself, to be seen where its layers agree with its end."""
log = logging.getLogger("potstill.engine")


class FirstLayers:
    """A model that ends after its first layers; it holds no tensor of its own."""

    adapter_slots: AdapterSlots | None = None
    """A draft has no adapter."""

    def __init__(self, model: Transformer, num_layers: int) -> None:
        self.model, self.num_layers = model, num_layers
        self.config, self.can_be_captured = model.config, model.can_be_captured

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: PagedAttention, *, adapters: Tensor | None = None
    ) -> Tensor:
        hidden: Tensor = self.model(tokens, positions, attention, adapters=adapters, num_layers=self.num_layers)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, D] -> [R, V]`."""
        return self.model.logits(hidden)

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """They are the model's, which is given them."""


class EarlyExitDraft(ModelDraft):
    """Guesses by `DraftContext.num_layers` layers of the target, or as many as promise the most tokens a second."""

    model_use: ClassVar[Literal["target"]] = "target"  # type: ignore[assignment]

    def __init__(self, context: DraftContext) -> None:
        """ValueError for a target that has routers, or fewer layers than that."""
        target, num_layers = context.target, context.num_layers
        if not isinstance(target, Transformer) or target.config.mixture_of_depths:
            raise ValueError("a model with routers has keys of some tokens only; early_exit cannot draft for it")
        most = target.config.num_layers - 1
        if most < 1 or not 1 <= (num_layers or 1) <= most:
            raise ValueError(
                f"early_exit needs num_layers from 1 to {most}, not {num_layers}: the model has {most + 1}"
            )
        self.num_layers = num_layers or choose_num_layers(target)
        log.info("drafts exit after %d of %d layers", self.num_layers, most + 1)
        super().__init__(replace(context, model=FirstLayers(target, self.num_layers), pages=context.target_pages))


@torch.inference_mode()
def choose_num_layers(model: Transformer) -> int:
    """Where to exit: most expected tokens for the layers they take, by how often an exit agrees with the model's end.

    Looked at in text that the model writes itself, at eighths of its depth. Takes some 30 passes over few tokens.
    """
    starts = torch.arange(_NUM_TEXTS, device=model.device) * 7919 % model.config.vocab_size
    text = starts[:, None]
    while text.shape[1] < _TEXT_TOKENS:
        text = torch.cat([text, _best_tokens(model, text, model.config.num_layers)[:, -1:]], dim=1)
    said, depth = _best_tokens(model, text, model.config.num_layers), model.config.num_layers

    def rate(num_layers: int) -> float:
        hits = int((_best_tokens(model, text, num_layers) == said).sum())
        acceptance = (hits + 1) / (said.numel() + 2)
        lengths = range(1, MAX_DRAFT_TOKENS + 1)
        return max(expected_tokens(acceptance, k) / (1 + k * num_layers / depth) for k in lengths)

    return max(sorted({max(1, depth * eighths // 8) for eighths in range(1, 8)}), key=rate)


def _best_tokens(model: Transformer, text: Tensor, num_layers: int) -> Tensor:
    """The likeliest token behind each of `text [B, N]`, `[B, N]`."""
    (count, length), device = text.shape, text.device
    ends = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)
    positions = torch.arange(length, device=device).repeat(count)
    hidden = model(text.flatten(), positions, PackedAttention(model.config, ends), num_layers=num_layers)
    return model.logits(hidden).argmax(dim=-1).view(count, length)
