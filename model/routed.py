"""A layer that only selected tokens pass (mixture of depths, arXiv 2404.02258), and the rules of selection.

    r = w · x / rms(x) + b                      the router's score of a token whose residual stream is x, in fp32
    y = x + g · attention(x)                    of a selected token, with the gate g = 1 + range · tanh(r);
    z = y + g · MLP(y)                          one not selected keeps its x, to the bit

`route` says which of the two additions are routed. Where attention is, a layer attends over a shorter sequence: only
selected tokens have queries, keys and values there, in their order and at their positions. They are gathered, computed
densely, and added back, so that a skipped token costs nothing. How many they are, a GPU keeps to itself while it
serves: rows for all tokens are launched there, and products leave out those that nobody uses.

With w = 0 and b = 0 every gate is 1, and the layer with all tokens selected is the dense one, bit for bit. The division
by rms(x) keeps the few tokens with massive activations from deciding where w goes.

Who is selected: in training the best-scored part of each document (`ExpertChoice`), whose learned imitation, a
threshold on the token's own score, is the rule by which a model is served (`routing=None`): it needs no other token,
so prefill, chunks, decoding and verification agree.

Legend: T tokens, C places for selected tokens, B documents, D hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.token_routing import gather_rows, scatter_add_rows, selected_rows
from model.attention import AttentionOverBatch
from model.config import ModelConfig
from model.layers import DecoderLayer, Rotary, Routing


class Router(nn.Module):
    """`x [T, D] -> scores [T]` fp32, whatever the precision around it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float()
            mean_square = torch.linalg.vector_norm(wide, dim=-1).square() / x.shape[-1]
            return (wide @ self.weight[0].float()) * torch.rsqrt(mean_square + self.eps) + self.bias.float()


class RoutedLayer(DecoderLayer):
    """A decoder layer with a router before its attention or, where only the MLP is routed, before that."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        mixture = config.mixture_of_depths
        if mixture is None:
            raise ValueError("a routed layer needs a configuration with mixture_of_depths")
        self.layer, self.route, self.gate_range = layer, mixture.route, mixture.gate_range
        self.threshold = mixture.thresholds[mixture.layers.index(layer)]
        self.router = Router(config)

    def forward(
        self,
        delta: Tensor,
        residual: Tensor | None,
        *,
        rotary: Rotary,
        attention: AttentionOverBatch,
        routing: Routing | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `DecoderLayer.forward`."""
        if self.route == "mlp":
            normed, residual = self.before_attention(delta, residual)
            delta = self.attend(normed, rotary, attention, slots)
        x = delta if residual is None else delta + residual
        # A sum of our own may be written to; what we were given, and what backward needs, may not.
        in_place = residual is not None and not torch.is_grad_enabled()
        scores = self.router(x)
        selected = self._select(x, scores, routing)
        # Products of the serving form leave unused rows out; others are of training and measuring, which may wait.
        index, count = selected_rows(selected, may_wait=not self.mlp.is_fused)
        chosen = None if slots is None else F.pad(slots, (0, 1), value=-1).index_select(0, index)  # no row: no adapter
        if self.route != "mlp":
            attention = attention.routed(self.layer, selected, index)
        gate = 1 + self.gate_range * torch.tanh(gather_rows(scores[:, None], index)[:, 0])
        if len(index) and self.route != "mlp":
            normed, _ = self.before_attention(gather_rows(x, index), None)
            added = self.attend(normed, _rows_of(rotary, index), attention, chosen, count)
            x = scatter_add_rows(x, index, added, gate, in_place=in_place)
        if self.route == "attention":
            normed, x = self.before_mlp(x, None)
            return self.feed(normed, slots), x
        if len(index):
            normed, _ = self.before_mlp(gather_rows(x, index), None)
            x = scatter_add_rows(x, index, self.feed(normed, chosen, count), gate, in_place=in_place)
        return x, None

    def _select(self, x: Tensor, scores: Tensor, routing: Routing | None) -> Tensor:
        """Who is selected, `[T]` bool. What a rule makes of the scores trains the router, never the stream."""
        if routing is None:
            return scores > self.threshold
        return routing(self.layer, self.router(x.detach()) if torch.is_grad_enabled() else scores)


def routed_layers(model: nn.Module) -> list[RoutedLayer]:
    """In the order of the model."""
    return [layer for layer in model.modules() if isinstance(layer, RoutedLayer)]


def _rows_of(rotary: Rotary, index: Tensor) -> Rotary:
    return tuple(gather_rows(table.flatten(1), index).unflatten(1, table.shape[1:]) for table in rotary)


class ExpertChoice:
    """The rule of training: of each document the ⌈capacity · length⌉ tokens with the highest scores; for one forward.

    A selection is made once: a layer that is recomputed in the backward pass finds it again. Of equal scores the
    earlier token goes first, so that the result is the same on every device.
    """

    def __init__(self, cu_seqlens: Tensor, num_tokens: int, capacity: float) -> None:
        """`cu_seqlens [B+1]` int32: where the documents of the batch start, and the number of tokens, `num_tokens`."""
        lengths = cu_seqlens.diff().long()
        # What rounding adds to 0.1 · 30 must not make it 4.
        self._wanted = torch.ceil(capacity * lengths.double() - 1e-9).long()
        self._starts = cu_seqlens[:-1].long()
        self._document = torch.repeat_interleave(lengths, output_size=num_tokens)
        self.logits: dict[int, Tensor] = {}
        """Scores by layer, `[T]`, differentiable with respect to the routers alone."""
        self.selected: dict[int, Tensor] = {}
        """Decisions by layer, `[T]` bool."""

    def __call__(self, layer: int, scores: Tensor) -> Tensor:
        if layer not in self.selected:
            self.logits[layer], self.selected[layer] = scores, self._best(scores.detach())
        return self.selected[layer]

    def _best(self, scores: Tensor) -> Tensor:
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(self._document[order], stable=True)]
        document = self._document[order]
        rank = torch.arange(len(order), device=order.device) - self._starts[document]
        return torch.zeros_like(order, dtype=torch.bool).scatter_(0, order, rank < self._wanted[document])

    def auxiliary_loss(self) -> Tensor:
        """How badly `score > 0` predicts the selection: binary cross-entropy, the sum over tokens, mean of layers."""
        losses = [
            F.binary_cross_entropy_with_logits(logits, self.selected[layer].float(), reduction="sum")
            for layer, logits in self.logits.items()
        ]
        return torch.stack(losses).mean()

    def accuracy(self) -> Tensor:
        """The part of all decisions that `score > 0` predicts."""
        hits = [(logits > 0) == self.selected[layer] for layer, logits in self.logits.items()]
        return torch.stack(hits).float().mean()
