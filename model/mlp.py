"""What stands behind attention in a layer: an MLP, or several of which each token passes a few.

    p = softmax(x Rᵀ)                         of a token x, over the experts; in fp32
    y = Σ_e w_e · MLP_e(x)                    over the k experts with the largest p; w = p, or p / Σ p of these k
      + sigmoid(s · x) · MLP_shared(x)        where the family has an expert for everybody

(Shazeer et al., arXiv 1701.06538, as in Mixtral, arXiv 2401.04088, and Qwen2, arXiv 2407.10671.)

T tokens, D hidden size, E experts, k experts of a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.geglu import geglu
from kernels.swiglu import swiglu
from model.config import ModelConfig
from model.experts_config import MixtureOfExperts
from model.fused import FusedGate, FusedLinear
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

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights w `[T, k]` fp32 and numbers `[T, k]` int64 of each token's experts."""
        weights, chosen = F.softmax(self.gate(x), dim=-1).topk(self.per_token, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if self.normalizes else weights, chosen

    def _mixed(self, x: Tensor, weights: Tensor, chosen: Tensor, slots: Tensor | None) -> Tensor:
        """The rows of each expert lie together while it computes them."""
        order = chosen.flatten().argsort(stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        tokens = order // self.per_token
        rows = x.index_select(0, tokens).split(sizes)
        their_slots = [None] * len(sizes) if slots is None else slots.index_select(0, tokens).split(sizes)
        # While it trains, an expert without tokens has gradients of zero: all processes wait for the same ones.
        made = [
            expert(mine, mine_slots)
            for expert, mine, mine_slots in zip(self.experts, rows, their_slots, strict=True)
            if len(mine) or torch.is_grad_enabled()
        ]
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        mixed = torch.cat(made).index_select(0, back).view(*chosen.shape, -1)
        return torch.bmm(weights.to(mixed.dtype)[:, None], mixed)[:, 0]
