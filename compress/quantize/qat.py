"""Training through rounding: a model learns with the weights that it will be exported with.

    ŵ = s · (clamp(round(w / s) + z, 0, L − 1) − z)            in the forward pass, as `GridFormat` stores it

    dw = dŵ where w / s lies between the lowest level and the highest, else 0    rounding counts as the identity
    ds = Σ dŵ · (level − z − w / s) there, Σ dŵ · (level − z) elsewhere          of each group, over √(g (L − 1))

The forward product is that of the exported weight itself, so what is trained is served, bit for bit. What is trained:

    scales      s alone; the levels stay
    low_rank    s, and A and B of w + B A around a frozen w; merged before the last rounding
    all         s and w

and the norms each time, with "all" biases too; embeddings and head stay. Scales are trained as factors of what they
were and weights in units of what the scales were, so that one learning rate suits both and any number of bits.
Sources: straight-through gradients https://arxiv.org/abs/1308.3432; those of scales LSQ,
https://arxiv.org/abs/1902.08153.

Legend: T tokens, N output features, K input features, G groups of a row, g elements of a group, L levels, r rank.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn

from compress.quantize.grid import Grid
from compress.quantize.round_to_nearest import QuantizationError
from model.formats.base import GridFormat, QuantizedMatrix
from model.layers import RMSNorm
from model.lazy import unmade
from model.quantized import QuantizedLinear, quantized_layers, set_quantized
from model.tensor_parallel import LAYERS
from model.transformer import Transformer

M = TypeVar("M", bound=nn.Module)
Trained = Literal["scales", "low_rank", "all"]
RANK = 16
_SMALLEST_SCALE = 1e-8


class FakeQuantizedLinear(nn.Module):
    """`x [T, K] -> [T, N]` with a weight on a grid whose scales are trained; the levels stay."""

    needs_whole_weight = True
    """Ranks cannot divide it."""

    def __init__(self, layer: QuantizedLinear, format: GridFormat[Any], scale_dtype: torch.dtype) -> None:
        """`scale_dtype`: in which files will keep the scales. Numbers of it are used; what is trained is fp32."""
        super().__init__()
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.format, self.bias, self.scale_dtype = format, layer.bias, scale_dtype
        weight: Any = layer.weight
        levels, scales, zeros = format.unpack(weight)
        # Frozen parameters, not buffers: what trains in shards cuts those too.
        self.levels = nn.Parameter(levels, requires_grad=False)
        self.zeros = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self.start = nn.Parameter(scales, requires_grad=False)
        self.factors = nn.Parameter(torch.ones_like(scales))

    @property
    def scales(self) -> Tensor:
        """fp32 [N, G]; differentiable."""
        return self.start * self.factors

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return _ExportedProduct.apply(x, self.bias, self, *self._trained())

    def _trained(self) -> list[Tensor]:
        """What ŵ depends on."""
        return [one for name, one in self.named_parameters() if one.requires_grad and name != "bias"]

    def used_scales(self) -> Tensor:
        """Positive numbers that files hold; to the gradient these are the scales themselves."""
        return _Stored.apply(self.scales, self.format, self.scale_dtype)

    def values(self, scales: Tensor) -> Tensor:
        """ŵ [N, K] fp32, of the scales in use [N, G]; differentiable."""
        steps = self.levels.view(*scales.shape, -1).float() - self._zeros()
        return (steps * scales[..., None]).view_as(self.levels)

    @torch.no_grad()
    def levels_of(self, scales: Tensor) -> Tensor:
        """Levels u8 [N, K] with these scales."""
        return self.levels

    @torch.no_grad()
    def exported(self) -> QuantizedMatrix:
        """The weight that the forward pass multiplies with."""
        scales = self.used_scales()
        return self.format.pack(self.levels_of(scales), scales, self.zeros)

    def grid(self, scales: Tensor) -> Grid:
        return Grid(scales, self.zeros, self.format.num_levels, self.in_features // scales.shape[1])

    def _zeros(self) -> Tensor:
        """fp32 [N, G, 1]."""
        if self.zeros is not None:
            return self.zeros.float()[..., None]
        return torch.full_like(self.start, self.format.num_levels // 2)[..., None]


class RoundedLinear(FakeQuantizedLinear):
    """One whose weight is trained too."""

    def __init__(
        self, layer: QuantizedLinear, format: GridFormat[Any], scale_dtype: torch.dtype, dense: Tensor | None = None
    ) -> None:
        """`dense` [N, K]: the weight before it was rounded; without it each starts in the middle of its level."""
        super().__init__(layer, format, scale_dtype)
        rounded = self.grid(self.start).values(self.levels)
        weight = rounded if dense is None else self._within_reach(dense.float(), rounded)
        self.steps = nn.Parameter(weight / self._elements)
        del self.levels

    def _within_reach(self, dense: Tensor, rounded: Tensor) -> Tensor:
        """What is nearest to the dense weight among all that rounds to the levels found: a method chose them."""
        reach = 0.49 * self._elements
        return torch.clamp(dense, rounded - reach, rounded + reach)

    @property
    def _elements(self) -> Tensor:
        """The scale of each element before training, [N, K]."""
        return self.grid(self.start).columns(slice(self.in_features))[0]

    def before_rounding(self) -> Tensor:
        """w, fp32 [N, K]."""
        return self.steps * self._elements

    def values(self, scales: Tensor) -> Tensor:
        factor = 1 / math.sqrt(self.steps.numel() // scales.numel() * (self.format.num_levels - 1))
        groups = self.before_rounding().view(*scales.shape, -1)
        scales = _GradientScale.apply(scales, factor)[..., None]
        return fake_quantize(groups, scales, self._zeros(), self.format.num_levels).view_as(self.steps)

    @torch.no_grad()
    def levels_of(self, scales: Tensor) -> Tensor:
        return self.grid(scales).levels(self.before_rounding())


class LowRankRoundedLinear(RoundedLinear):
    """One whose weight stays, with A and B trained beside it."""

    def __init__(
        self,
        layer: QuantizedLinear,
        format: GridFormat[Any],
        scale_dtype: torch.dtype,
        dense: Tensor | None = None,
        rank: int = RANK,
        generator: torch.Generator | None = None,
    ) -> None:
        """`generator`: on the CPU, draws A."""
        super().__init__(layer, format, scale_dtype, dense)
        self.steps.requires_grad_(False)
        bound, device = 1 / math.sqrt(self.in_features), self.steps.device
        drawn = torch.empty(rank, self.in_features).uniform_(-bound, bound, generator=generator)
        self.a = nn.Parameter(drawn.to(device))
        self.b = nn.Parameter(torch.zeros(self.out_features, rank, device=device))

    def before_rounding(self) -> Tensor:
        return (self.steps + self.b @ self.a) * self._elements


def fake_quantize(weight: Tensor, scales: Tensor, zeros: Tensor, num_levels: int) -> Tensor:
    """ŵ fp32 of groups [N, G, g], scales and zeros [N, G, 1]; differentiable."""
    steps = (weight / scales).clamp(-zeros, num_levels - 1 - zeros)
    return _Round.apply(steps) * scales


def train_through_rounding(
    model: Transformer,
    trained: Trained,
    *,
    dense: Callable[[str], Tensor] | None = None,
    rank: int = RANK,
    scale_dtype: torch.dtype | None = None,
    seed: int = 0,
    load_layer: Callable[[int], None] | None = None,
) -> Transformer:
    """Puts a layer that can be trained in place of each quantized one; what is not trained is frozen.

    `dense` gives the weight of a name before it was quantized (with scales folded as in `model`), where those before
    rounding start. `scale_dtype`: that of the files to come; None is the model's. `load_layer` gives a layer what it
    holds before training, whatever it is by then; with it the model is made to be trained in shards (model/unmade.py).
    Raises QuantizationError for a model without quantized layers, or with some whose levels are not integers.
    """
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)

    def make(number: int) -> None:
        if load_layer is not None:
            load_layer(number)
        layer = model.model.layers[number].requires_grad_(False)
        for name, projection in decoder_projections(layer).items():
            whole_name = f"{LAYERS}{number}.{name}"
            if not isinstance(projection.format, GridFormat):
                title = projection.format.title
                raise QuantizationError(f"{whole_name} is {title}; only integers can be trained through rounding.")
            start = None if dense is None else dense(f"{whole_name}.weight").detach().to(projection.device)
            draws = torch.Generator().manual_seed(seed + crc32(whole_name.encode()))
            layer.set_submodule(name, _trainable(projection, trained, scale_dtype or model.dtype, start, rank, draws))
            if trained == "all" and projection.bias is not None:
                projection.bias.requires_grad_(True)
        for part in layer.modules():
            if isinstance(part, RMSNorm):
                part.requires_grad_(True)

    if load_layer is not None:
        model = unmade(model, make, reads_shapes=True)
    else:
        for number in range(model.config.num_layers):
            make(number)
    if not any(isinstance(part, FakeQuantizedLinear) for part in model.modules()):
        raise QuantizationError("The model has no quantized layers; there is no rounding to train through.")
    return model


def _trainable(
    layer: QuantizedLinear,
    trained: Trained,
    scale_dtype: torch.dtype,
    dense: Tensor | None,
    rank: int,
    generator: torch.Generator,
) -> FakeQuantizedLinear:
    format: Any = layer.format
    if trained == "scales":
        return FakeQuantizedLinear(layer, format, scale_dtype)
    if trained == "low_rank":
        return LowRankRoundedLinear(layer, format, scale_dtype, dense, rank, generator)
    return RoundedLinear(layer, format, scale_dtype, dense)


def decoder_projections(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized ones; embedding and head stay as they are."""
    layers = quantized_layers(model).items()
    return {name: one for name, one in layers if isinstance(one, QuantizedLinear) and name.endswith("_proj")}


def to_quantized(model: Transformer) -> Transformer:
    """Puts its exported weight in place of each layer that was trained through rounding; outputs stay, to the bit."""
    trained = {name: part for name, part in model.named_modules() if isinstance(part, FakeQuantizedLinear)}
    for name, layer in trained.items():
        set_quantized(model, name, layer.exported(), layer.format)
    return model.requires_grad_(True).eval()


def quantized_copy(model: M) -> M:
    """What `to_quantized` would make of the model, which goes on being trained: no weight before rounding is copied."""
    replaced = {
        id(part): QuantizedLinear(part.exported(), part.format, copy.deepcopy(part.bias))
        for part in model.modules()
        if isinstance(part, FakeQuantizedLinear)
    }
    return copy.deepcopy(model, replaced).requires_grad_(True).eval()


class _Round(torch.autograd.Function):
    """Half to even; the identity for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scales: Tensor, format: GridFormat[Any], dtype: torch.dtype) -> Tensor:
        return format.nearest_scales(scales.clamp(min=_SMALLEST_SCALE), dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _GradientScale(torch.autograd.Function):
    """x, whose gradient is multiplied with a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class _ExportedProduct(torch.autograd.Function):
    """x ŵᵀ + b by the product that serves the exported weight; gradients by ŵ [N, K], made anew when they are due.

    Kept until then, what ŵ is made of would take five times the weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: FakeQuantizedLinear, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(x, *trained)  # an error where one is changed before backward
        ctx.layer = layer
        return layer.format.product(x, layer.format.prepare(layer.exported()), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, *trained) = grads, ctx.saved_tensors
        with torch.enable_grad():
            values = ctx.layer.values(ctx.layer.used_scales())
        to_x = grad @ values.detach().to(grad.dtype) if ctx.needs_input_grad[0] else None
        to_trained = torch.autograd.grad(values, trained, (grad.T @ x).float()) if trained else ()
        return to_x, grad.sum(0) if ctx.needs_input_grad[1] else None, None, *to_trained
