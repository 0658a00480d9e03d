"""What stands behind attention in a layer: an MLP, or several of which each token passes a few.

    p = softmax(x Rᵀ)                         of a token x, over the experts; in fp32
    y = Σ_e w_e · MLP_e(x)                    over the k experts with the largest p; w = p, or p / Σ p of these k
      + sigmoid(s · x) · MLP_shared(x)        where the family has an expert for everybody

(Shazeer et al., arXiv 1701.06538, as in Mixtral, arXiv 2401.04088, and Qwen2, arXiv 2407.10671.)

T tokens, D hidden size, E experts, k experts of a token.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.geglu import geglu
from kernels.linear.c_product import CProduct
from kernels.linear.experts import ExpertWeights, arrange_rows, expert_products, sort_by_expert, stack_experts
from kernels.linear.experts_on_cpu import ExpertsOnCpu, can_pass_experts
from kernels.swiglu import swiglu
from model.config import ModelConfig
from model.experts_config import MixtureOfExperts
from model.fused import Fused, FusedGate, FusedLinear
from model.fused_adapters import AdapterChoices
from model.linear import Linear


def make_mlp(config: ModelConfig, layer: int) -> "MLP | Experts":
    """That of a layer."""
    if config.experts is not None and layer in config.experts.layers:
        return Experts(config, config.experts)
    return MLP(config, config.intermediate_size)


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, each a Linear or a QuantizedLinear.

    In some families gelu stands for silu; some have one `gate_up_proj`.
    """

    gate_proj: Linear
    up_proj: Linear

    def __init__(self, config: ModelConfig, size: int) -> None:
        """`size`: its neurons."""
        super().__init__()
        sizes = {"gate_up_proj": 2 * size} if config.kind.joins_projections else {"gate_proj": size, "up_proj": size}
        self.parts = tuple(sizes)
        """The names of what makes gate and up."""
        for name, outputs in sizes.items():
            self.add_module(name, Linear(config.hidden_size, outputs, bias=config.mlp_bias))
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.uses_gelu = config.kind.activation != "silu"
        self.gate_up: FusedGate | None = None
        self.down: FusedLinear | None = None

    def forward(self, x: Tensor, slots: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        """`x [T, D] -> [T, D]`; `slots` and `count` as in `FusedLinear`."""
        if (gate_up := self.gate_up) is not None and (down := self.down) is not None:
            return down.outputs(gate_up(x, slots, count), slots, count)[0]
        made = [getattr(self, name)(x) for name in self.parts]
        gate, up = made if len(made) > 1 else made[0].chunk(2, dim=-1)
        return self.down_proj(geglu(gate, up) if self.uses_gelu else swiglu(gate, up))

    @property
    def is_fused(self) -> bool:
        """Whether it is in the serving form."""
        return self.gate_up is not None

    def fuse(self, choices: AdapterChoices, dtype: torch.dtype) -> None:
        """Turns it into the serving form, with adapters as `Transformer.fuse` takes them."""
        self.gate_up = FusedGate({name: getattr(self, name) for name in self.parts}, choices, dtype)
        self.gate_up.uses_gelu = self.uses_gelu
        self.down = FusedLinear({"down_proj": self.down_proj}, choices, dtype)
        for name in (*self.parts, "down_proj"):
            delattr(self, name)


class Scores(nn.Module):
    """`x Wᵀ` in fp32, of a few outputs: no layer to be rounded or adapted."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """`x [T, D] -> [T, N]` fp32, under autocast too."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class Experts(nn.Module):
    """MLPs, of which a router chooses a few for each token."""

    def __init__(self, config: ModelConfig, experts: MixtureOfExperts) -> None:
        super().__init__()
        self.per_token, self.normalizes = experts.experts_per_token, experts.normalizes
        self.gate = Scores(config.hidden_size, experts.num_experts)
        self.experts = nn.ModuleList(MLP(config, experts.intermediate_size) for _ in range(experts.num_experts))
        shared = experts.shared_intermediate_size
        self.shared_expert = None if shared is None else MLP(config, shared)
        self.shared_expert_gate = None if shared is None else Scores(config.hidden_size, 1)
        self.grouped: GroupedExperts | GroupedOnCpu | None = None

    @property
    def is_fused(self) -> bool:
        """As `MLP.is_fused`."""
        return all(expert.is_fused for expert in self.experts)

    def forward(self, x: Tensor, slots: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        """`x [T, D] -> [T, D]`; `slots` as in `FusedLinear`. All rows are computed, whatever `count` says."""
        weights, chosen = self.choose(x)
        y = self._mixed(x, weights, chosen, slots)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return y
        return y + torch.sigmoid(self.shared_expert_gate(x)).to(y.dtype) * self.shared_expert(x, slots)

    def group(self, dtype: torch.dtype) -> None:
        """Of fused experts: have all computed at once for tokens in this dtype, where their weights allow that."""
        experts = [expert for expert in self.experts if isinstance(expert, MLP)]
        self.grouped = GroupedExperts.of(experts) or GroupedOnCpu.of(experts, dtype)

    def group_again(self, dtype: torch.dtype) -> None:
        """After weights were replaced, which gives them new memory on the CPU."""
        if isinstance(self.grouped, GroupedOnCpu):
            self.group(dtype)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights w `[T, k]` fp32 and numbers `[T, k]` int64 of each token's experts."""
        weights, chosen = F.softmax(self.gate(x), dim=-1).topk(self.per_token, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if self.normalizes else weights, chosen

    def _mixed(self, x: Tensor, weights: Tensor, chosen: Tensor, slots: Tensor | None) -> Tensor:
        """The rows of each expert lie together while it computes them."""
        if self.grouped is not None and self.grouped.takes(x):
            return _weighted(self.grouped(x, chosen), weights)
        tokens, back, counts = sort_by_expert(chosen, len(self.experts))
        sizes = counts.tolist()
        rows = x.index_select(0, tokens).split(sizes)
        their_slots = [None] * len(sizes) if slots is None else slots.index_select(0, tokens).split(sizes)
        # While it trains, an expert without tokens has gradients of zero: all processes wait for the same ones.
        made = [
            expert(mine, mine_slots)
            for expert, mine, mine_slots in zip(self.experts, rows, their_slots, strict=True)
            if len(mine) or torch.is_grad_enabled()
        ]
        return _weighted(torch.cat(made).index_select(0, back.flatten()).view(*chosen.shape, -1), weights)


def _weighted(y: Tensor, weights: Tensor) -> Tensor:
    """Σ_e w_e y_e of `y [T, k, D]` and w `[T, k]`: `[T, D]`."""
    return torch.bmm(weights.to(y.dtype)[:, None], y)[:, 0]


class GroupedExperts:
    """The serving form of all experts of a layer: one launch for each product, and no wait for what was chosen."""

    def __init__(
        self, gate_up: Sequence[ExpertWeights], down: ExpertWeights, num_experts: int, *, uses_gelu: bool
    ) -> None:
        """`gate_up`: one that makes both, or one each."""
        self._gate_up, self._down = gate_up, down
        self._num_experts, self._uses_gelu = num_experts, uses_gelu
        self.total: Callable[[Tensor], Tensor] = lambda y: y
        """The sum over all ranks, where each has a part of every expert's neurons."""

    @classmethod
    def of(cls, experts: Sequence[MLP]) -> "GroupedExperts | None":
        """Of fused MLPs, whose weights then lie in the memory of these; None where one launch cannot hold them."""
        gate_up = _stacked([expert.gate_up for expert in experts])
        down = _stacked([expert.down for expert in experts])
        if not gate_up or not down:
            return None
        for number, expert in enumerate(experts):
            _share_memory(expert.gate_up, gate_up, number)
            _share_memory(expert.down, down, number)
        return cls(gate_up, down[0], len(experts), uses_gelu=experts[0].uses_gelu)

    def takes(self, x: Tensor) -> bool:
        """Whether `x [T, D]` is computed so."""
        return True

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """`x [T, D]` and the experts chosen for each token, int64 `[T, k]` -> `[T, k, D]`."""
        rows = arrange_rows(chosen, self._num_experts, x.dtype)
        made = [expert_products(x, weights, rows) for weights in self._gate_up]
        gate, up = made if len(made) > 1 else made[0].chunk(2, dim=-1)
        gated = geglu(gate, up) if self._uses_gelu else swiglu(gate, up)
        return self.total(expert_products(gated, self._down, rows))[rows.back]


class GroupedOnCpu:
    """The serving form of all experts of a layer on the CPU: one call, whatever few tokens have chosen."""

    def __init__(self, experts: Sequence[MLP], products: Sequence[list[CProduct]], dtype: torch.dtype) -> None:
        """`of` makes it. `experts` hold the weights of the products."""
        self._experts, self._dtype = experts, dtype
        self._in_c = ExpertsOnCpu(products, dtype, uses_gelu=experts[0].uses_gelu)
        self.total: Callable[[Tensor], Tensor] = lambda y: y
        """As `GroupedExperts.total`."""

    @classmethod
    def of(cls, experts: Sequence[MLP], dtype: torch.dtype) -> "GroupedOnCpu | None":
        """Of fused MLPs, for tokens in this dtype; None where C has no products with their weights."""
        products = [_c_products(expert, dtype) for expert in experts]
        return cls(experts, products, dtype) if all(products) and can_pass_experts() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupedOnCpu":
        experts = deepcopy(self._experts, memo)
        copy = GroupedOnCpu(experts, [_c_products(expert, self._dtype) for expert in experts], self._dtype)
        copy.total = self.total
        return copy

    def takes(self, x: Tensor) -> bool:
        """Whether `x [T, D]` has so few rows."""
        return self._in_c.takes(x)

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As `GroupedExperts`."""
        return self.total(self._in_c(x, chosen).flatten(0, 1)).view(*chosen.shape, -1)


def _c_products(expert: MLP, dtype: torch.dtype) -> list[CProduct]:
    """Of a fused MLP, in their order; none where one is not in C, or something is added to it."""
    products = [product for layer in (expert.gate_up, expert.down) if layer is not None for product in layer.products]
    in_c = [product.form.c_product(product.weight, dtype) for product in products if product.is_plain]
    found = [product for product in in_c if product is not None]
    return found if len(found) == len(products) else []


def _stacked(layers: Sequence[Fused | None]) -> list[ExpertWeights] | None:
    """The weights of each product of a layer, of all experts; None where more than that makes it, or they differ."""
    found = []
    for products in zip(*[() if layer is None else layer.products for layer in layers], strict=True):
        is_plain = all(product.is_plain and not product.form.rounds_activations for product in products)
        weights = stack_experts([product.weight for product in products]) if is_plain else None
        if weights is None:
            return None
        found.append(weights)
    return found


def _share_memory(layer: Fused | None, weights: Sequence[ExpertWeights], number: int) -> None:
    """Have an expert's own products read what is stacked, so that nothing is held twice."""
    if layer is not None:
        mine = zip(layer.products, weights, strict=True)
        layer.products = [replace(product, weight=of_all[number]) for product, of_all in mine]
