"""Low-rank adapters: what training adds to a layer whose own weight is frozen.

    LoRA      y = W x + b + s·B(A·dropout(x))                   s = alpha / r;  rsLoRA: s = alpha / √r
    DoRA      y = (m/n)·(W x + s·B A·dropout(x)) + b            n = row norms of W + s·B A, no gradient; m is trained
    embedding y[t] = W[t] + s·B A[:, t]                         the roles of A and B at the start are swapped

B is zero at the start, or A for embeddings, so that an adapter begins as nothing; m begins as the row norms of W. With
DoRA too dropout acts on the low-rank part only, so that this holds in training. Parameters are fp32 and called `a`, `b`
and `magnitude` below the adapted layer's name and `.lora`; nothing else of an adapted model is trained.

Sources: LoRA https://arxiv.org/abs/2106.09685, rsLoRA https://arxiv.org/abs/2312.03732, DoRA
https://arxiv.org/abs/2402.09353.

Legend: T tokens, N output features, K input features, r rank.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.linear.lora import LoraWeights, lora_add
from model.lora_config import LoraConfig, LoraError
from model.unmade import when_made

_TINIEST = 1e-30


class AdaptedLinear(Protocol):
    """What an adapter needs of its layer."""

    @property
    def bias(self) -> Tensor | None: ...

    def row_squares(self) -> Tensor:
        """Σ_k W[n, k]², fp32 [N]."""
        ...

    def times(self, x: Tensor) -> Tensor:
        """x Wᵀ, fp32 [T, N], of x fp32 [T, K]: without bias, adapter and gradient."""
        ...


class Lora(nn.Module):
    """The adapter of one linear layer."""

    def __init__(
        self, config: LoraConfig, in_features: int, out_features: int, *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.scale, self.dropout = config.scale, config.dropout
        self.a = nn.Parameter(torch.zeros(config.rank, in_features, device=device))
        self.b = nn.Parameter(torch.zeros(out_features, config.rank, device=device))
        self.magnitude = nn.Parameter(torch.ones(out_features, device=device)) if config.dora else None
        self._row_squares: Tensor | None = None

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """The start of training: A uniform in ±1/√K, B zero; m waits for `reset_magnitude`."""
        self.a.copy_(_uniform(self.a.shape, 1 / math.sqrt(self.a.shape[1]), generator))
        self.b.zero_()

    @torch.no_grad()
    def reset_magnitude(self, layer: AdaptedLinear) -> None:
        """Sets m to n, so that DoRA changes nothing beyond what A and B do; also after the layer's weight changed."""
        self._row_squares = None
        if self.magnitude is not None:
            self.magnitude.copy_(self._row_norms(layer))

    def forward(self, x: Tensor, y: Tensor, layer: AdaptedLinear) -> Tensor:
        """The adapted output [T, N], of the layer's input x [T, K] and its own output y [T, N]."""
        x = F.dropout(x.to(y.dtype), self.dropout, self.training)
        b: Tensor = self.b
        if self.magnitude is not None:
            factor = self.dora_factor(layer)
            b = factor[:, None] * b
            product = y if layer.bias is None else y - layer.bias.to(y.dtype)
            y = y + (factor - 1).to(y.dtype) * product
        scales = torch.full((1,), self.scale, device=x.device)
        return lora_add(y, x, LoraWeights(self.a.to(y.dtype)[None], b.to(y.dtype)[None], scales), None)

    def dora_factor(self, layer: AdaptedLinear) -> Tensor:
        """m/n, fp32 [N]; ones without DoRA."""
        if self.magnitude is None:
            return torch.ones(len(self.b), device=self.b.device)
        return self.magnitude / self._row_norms(layer)

    def merged(self, weight: Tensor) -> Tensor:
        """The weight [N, K] in fp32 that does alone what `weight` and the adapter do; differentiable in the adapter."""
        whole = weight.float() + self.scale * (self.b.float() @ self.a.float())
        if self.magnitude is None:
            return whole
        return whole * (self.magnitude / whole.detach().norm(dim=1))[:, None]

    @torch.no_grad()
    def _row_norms(self, layer: AdaptedLinear) -> Tensor:
        """Of W + s·B A, fp32 [N], from W Aᵀ and A Aᵀ: no matrix as large as W is made.

        ‖w + s·b A‖² = ‖w‖² + 2s·b·(A w) + s²·b (A Aᵀ) bᵀ
        """
        with torch.autocast(self.a.device.type, enabled=False):
            if self._row_squares is None or self._row_squares.device != self.a.device:
                self._row_squares = layer.row_squares()
            a, b = self.a.float(), self.b.float()
            crossed = (b * layer.times(a).t()).sum(1)
            own = (b @ (a @ a.t()) * b).sum(1)
            squares = self._row_squares + 2 * self.scale * crossed + self.scale**2 * own
        return squares.clamp(min=_TINIEST).sqrt()


class EmbeddingLora(Lora):
    """The adapter of an embedding [V, D]: a [r, V], b [D, r]."""

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """The start of training: A zero, B standard normal."""
        self.a.zero_()
        self.b.copy_(torch.randn(self.b.shape, generator=generator))

    def forward(self, tokens: Tensor, y: Tensor, layer: object = None) -> Tensor:
        """The adapted embeddings [T, D] of tokens [T] int64, y [T, D] being the layer's own."""
        return y + self.scale * F.linear(F.embedding(tokens, self.a.t()), self.b).to(y.dtype)

    def merged(self, weight: Tensor) -> Tensor:
        """The embedding [V, D] in fp32 that does alone what `weight` and the adapter do."""
        return weight.float() + self.scale * (self.b.float() @ self.a.float()).t()


def adaptable_layers(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """The layers that can carry an adapter (Linear, QuantizedLinear, Embedding), by name, in the model's order.

    `prefix` begins all names.
    """
    return {name: module for name, module in model.named_modules(prefix=prefix) if hasattr(module, "lora")}


def adapted_layers(model: nn.Module, prefix: str = "") -> dict[str, Any]:
    """The layers that carry an adapter, likewise."""
    return {name: layer for name, layer in adaptable_layers(model, prefix).items() if layer.lora is not None}


def matching_layers(model: nn.Module, targets: tuple[str, ...]) -> dict[str, Any]:
    """The layers that the patterns name, in the model's order; LoraError for a pattern that matches nothing."""
    layers = adaptable_layers(model)
    for pattern in targets:
        if not any(_matches(name, pattern) for name in layers):
            kinds = sorted({name.rpartition(".")[2] for name in layers})
            raise LoraError(f"The target {pattern!r} matches no layer; there are {', '.join(kinds)}.")
    return {name: layer for name, layer in layers.items() if any(_matches(name, pattern) for pattern in targets)}


def attach_lora(model: nn.Module, config: LoraConfig, *, seed: int = 0) -> list[str]:
    """Gives every layer that `config.targets` names a fresh adapter; returns their names, in the model's order.

    The same seed gives the same adapter on every machine. Raises LoraError where a pattern matches nothing, the model
    has an adapter, or DoRA is asked for of an embedding.
    """
    layers = matching_layers(model, config.targets)
    if adapted := adapted_layers(model):
        raise LoraError(f"The model already has an adapter, on {next(iter(adapted))} among others; merge it first.")
    generator = torch.Generator().manual_seed(seed)
    for name, layer in layers.items():
        layer.lora = new = _fresh(name, layer, config)
        new.reset(generator)
        new.train(model.training)
    when_made(model, _reset_magnitudes)
    return list(layers)


def _reset_magnitudes(part: nn.Module, name: str) -> None:
    for layer in adapted_layers(part).values():
        layer.lora.reset_magnitude(layer)


def detach_lora(model: nn.Module) -> None:
    """Takes the adapter off every layer; what remains is the base."""
    for layer in adapted_layers(model).values():
        layer.lora = None


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """The base alone, for as long as this lasts: no adapter and none of its dropout. Then the same ones are back."""
    carried = [(layer, layer.lora) for layer in adapted_layers(model).values()]
    detach_lora(model)
    try:
        yield
    finally:
        for layer, lora in carried:
            layer.lora = lora


def _fresh(name: str, layer: Any, config: LoraConfig) -> Lora:
    if not hasattr(layer, "num_embeddings"):
        return Lora(config, layer.in_features, layer.out_features, device=layer.device)
    if config.dora:
        raise LoraError(f"DoRA does not apply to an embedding; leave {name} out of the targets.")
    return EmbeddingLora(config, layer.num_embeddings, layer.embedding_dim, device=layer.device)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _uniform(shape: torch.Size, bound: float, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator) - 1) * bound
