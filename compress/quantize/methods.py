"""The methods of calibrated quantization by name. The list alone needs no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Method:
    """How weights are quantized."""

    scaling: Literal["none", "awq", "smoothquant"] = "none"
    grid: Literal["min_max", "searched"] = "searched"
    """Of groups: what covers them, or what costs least in products with the inputs seen."""
    propagation: bool = False
    """First move weights to make up for the rounded layers before; not with scaling."""
    rounding: Literal["nearest", "gptq", "learned"] = "nearest"
    iterations: int = 200
    """Steps of learned rounding, a text each, for every layer."""
    scale_dtype: "torch.dtype | None" = None
    """In which files will hold scales; None is the model's."""

    @property
    def needs_parent(self) -> bool:
        """Whether it also looks at what the model made of the text before rounding."""
        return self.propagation or self.rounding == "learned"

    @property
    def needs_levels(self) -> bool:
        """Whether it chooses levels and scales itself, which only formats of integers leave to it."""
        return self.grid == "searched" or self.rounding != "nearest"


METHODS = {
    "round": Method(grid="min_max"),
    "weighted": Method(),
    "gptq": Method(rounding="gptq"),
    "qep+gptq": Method(propagation=True, rounding="gptq"),
    "awq": Method(scaling="awq"),
    "awq+gptq": Method(scaling="awq", rounding="gptq"),
    "autoround": Method(rounding="learned"),
    "smoothquant": Method(scaling="smoothquant", grid="min_max"),
}
"""By the names that recipes use."""
