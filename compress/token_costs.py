"""What each token's absence from a layer would cost, and routers that predict it: where routing starts.

With m_t the part that token t takes in a layer's routed work (1: in full, 0: skipped), the distance to the model's own
distribution grows by ½ E[(∂ log p(y) / ∂m_t)²] to second order, y drawn from the model: the Fisher information. One
backward pass gives the derivative for every token and layer at once. m_t scales what t is given; where attention
is routed it also scales the weight of t's key for others, exp(score) → m_t exp(score): the first token of a text is
given little and yet missed most.

A router is then the ridge regression of the cost's logarithm on x / rms(x), which is all that a router sees.

Several processes, a `group`, may do the same, each with every n-th batch, of which it may have none:
they find the same routers as one with all of them.

Legend: T tokens, D hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.backward import draws, layers_backwards
from compress.prune.depth import PackedBatch, added_up
from kernels.attention._flash_cpu import attend_masked, visible_keys
from kernels.attention.rotary_write import qk_norm_rope
from model.attention import PackedAttention
from model.collectives import ALONE, Group
from model.config import ModelConfig, Route
from model.kv_format import NormRope
from model.layers import DecoderLayer
from model.tensor_parallel import LAYERS
from model.transformer import Transformer

_RIDGE = 1e-2
"""Added to the covariance, in parts of its mean diagonal."""
_SMALLEST_COST = 1e-3
"""Costs count as at least this part of their mean: the logarithm of a draw near 0 says nothing."""
_DEVIATION = 0.25
"""Of the scores of a fitted router: gates begin within a few percent of 1."""


class TokenCosts(NamedTuple):
    """One layer's tokens of the process's batches."""

    inputs: Tensor
    """x / rms(x) of the residual stream that the router sees, `[T, D]` bf16, on the CPU."""
    costs: Tensor
    """`[T]` fp32."""


def skipping_costs(
    model: Transformer, batches: Sequence[PackedBatch], route: Route, group: Group = ALONE, *, seed: int = 0
) -> list[TokenCosts]:
    """The cost of each token's absence from what `route` names, for every layer. Leaves the model frozen."""
    model.requires_grad_(False)
    nothing = TokenCosts(torch.empty(0, model.config.hidden_size, dtype=torch.bfloat16), torch.empty(0))
    found = [[nothing] for _ in range(model.config.num_layers)]
    for turn, batch in enumerate(batches):
        for layer, costs in zip(found, _batch_costs(model, batch, route, draws(model, turn, group, seed)), strict=True):
            layer.append(costs)
    return [TokenCosts(*(torch.cat(part) for part in zip(*layer, strict=True))) for layer in found]


def _batch_costs(model: Transformer, batch: PackedBatch, route: Route, generator: torch.Generator) -> list[TokenCosts]:
    cu_seqlens, costs = batch.cu_seqlens.to(model.device), []
    lowers = torch.autocast(model.device.type, torch.bfloat16, enabled=model.dtype == torch.float32)

    def surprise(hidden: Tensor) -> Tensor:
        logits = model.logits(hidden).float()
        drawn = torch.multinomial(torch.softmax(logits.detach(), dim=-1), 1, generator=generator)[:, 0]
        return F.cross_entropy(logits, drawn, reduction="sum")

    for layer, pass_back in layers_backwards(
        model, batch, _Parts(model.config, cu_seqlens, route), surprise, precision=lowers
    ):
        parts = _Parts(model.config, cu_seqlens, route)
        with parts.watch(layer):
            pass_back(parts)
        costs.append(parts.costs())
    return costs[::-1]


class _Parts(PackedAttention):
    """Packed attention, and hooks around it, by which each token's part in a layer can be varied."""

    inputs: Tensor
    """Of the layer that was watched."""

    def __init__(self, config: ModelConfig, cu_seqlens: Tensor, route: Route) -> None:
        super().__init__(config, cu_seqlens)
        self.route = route
        self.parts: list[Tensor] = []
        """The variables of its tokens, `[T]`: their derivatives add up."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor:
        if self.route == "mlp":
            return super().__call__(layer, q, k, v, norm_rope)
        q, k = qk_norm_rope(q, k, rotary=norm_rope.rotary, norms=norm_rope.norms)
        given, seen = self._variable(q), self._variable(q) - 1  # 1 and ln 1
        group, mixed = q.shape[1] // k.shape[1], []
        for start, stop in pairwise(self.cu_seqlens.tolist()):
            hidden = ~visible_keys(stop - start, stop - start, True, self.windows[layer], q.device)
            mask = seen[start:stop].to(v.dtype).expand(stop - start, -1).masked_fill(hidden, -torch.inf)
            rows = (x[start:stop].to(v.dtype).transpose(0, 1) for x in (q, k, v))
            heads, keys, values = (x.repeat_interleave(1 if n == 0 else group, dim=0) for n, x in enumerate(rows))
            found = attend_masked(heads, keys, values, mask, scale=self.scale, soft_cap=self.soft_cap)
            mixed.append(found.transpose(0, 1))
        return torch.cat(mixed) * given.to(v.dtype)[:, None, None]

    def _variable(self, like: Tensor) -> Tensor:
        self.parts.append(torch.ones(len(like), device=like.device, requires_grad=True))
        return self.parts[-1]

    @contextmanager
    def watch(self, layer: DecoderLayer) -> Iterator[None]:
        """Within it, keeps what a router would see, and varies the tokens' parts in an MLP that is routed."""
        hooks = [layer.register_forward_hook(self._keep_input)]
        if self.route != "attention":
            hooks.append(layer.mlp.register_forward_hook(self._vary))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _keep_input(self, _: nn.Module, given: tuple[Tensor, Tensor | None], made: tuple[Tensor, Tensor]) -> None:
        delta, residual = given
        stream = made[1] if self.route == "mlp" else delta if residual is None else delta + residual
        self.inputs = F.rms_norm(stream.detach().float(), stream.shape[-1:]).bfloat16().cpu()

    def _vary(self, _: nn.Module, __: Any, added: Tensor) -> Tensor:
        return added * self._variable(added)[:, None].to(added.dtype)

    def costs(self) -> TokenCosts:
        """After backward."""
        slopes = torch.stack([variable.grad for variable in self.parts if variable.grad is not None])
        return TokenCosts(self.inputs, slopes.sum(0).square().float().cpu() / 2)


def mean_costs(costs: Sequence[TokenCosts], device: torch.device, group: Group = ALONE) -> list[float]:
    """Of each layer, over the tokens of all processes, which compute on this device of theirs."""
    totals = torch.stack([layer.costs.double().sum() for layer in costs])
    tokens = torch.tensor([len(layer.costs) for layer in costs], dtype=torch.float64)
    totals, tokens = added_up(group, device, totals, tokens)
    return (totals / tokens).tolist()


@torch.no_grad()
def fit_routers(
    layers: Sequence[int], costs: Sequence[TokenCosts], device: torch.device, group: Group = ALONE
) -> dict[str, Tensor]:
    """The weights, by name, of routers of these layers that predict `costs`, given for all layers; on the CPU, fp64.

    The processes of the group compute on this device of theirs.
    """
    means, weights = mean_costs(costs, device, group), dict[str, Tensor]()
    for number in layers:
        weight, bias = _fit(costs[number], means[number], device, group)
        router = f"{LAYERS}{number}.router."
        weights |= {f"{router}weight": weight[None], f"{router}bias": torch.tensor([bias], dtype=torch.float64)}
    return weights


def _fit(costs: TokenCosts, mean_cost: float, device: torch.device, group: Group) -> tuple[Tensor, float]:
    """Weight `[D]` and bias of a router whose scores on all tokens have the mean 0."""
    inputs, paid = costs.inputs.double(), costs.costs.double()
    wanted = (paid + _SMALLEST_COST * mean_cost + torch.finfo(torch.float32).tiny).log()
    tokens = torch.tensor(len(inputs), dtype=torch.float64)
    tokens, center, middle = added_up(group, device, tokens, inputs.sum(0), wanted.sum())
    center, middle = center / tokens, middle / tokens
    inputs, wanted = inputs - center, wanted - middle
    covariance, products = (x / tokens for x in added_up(group, device, inputs.mT @ inputs, inputs.mT @ wanted))
    ridge = _RIDGE * covariance.diagonal().mean()
    weight = torch.linalg.solve(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64), products)
    deviation = (weight @ covariance @ weight * tokens / (tokens - 1)).sqrt()
    weight *= _DEVIATION / deviation.clamp_min(1e-12)
    return weight, -float(center @ weight)
