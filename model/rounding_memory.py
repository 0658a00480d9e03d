"""What training through rounding (compress/quantize/qat.py) holds: fp32 weights or levels, and what they become."""

import math
from functools import cached_property

from model.cost import FULL
from model.formats.base import GridFormat
from model.linear import Embedding, Linear
from model.training_memory import Arithmetic, Setup

# fp32 numbers a weight that training through rounding makes of one layer at a time, in backward: what its steps are
# multiplied with, that product, what is rounded, its levels, and what comes out; of scales alone the last two.
_MADE_BY_ROUNDING = {"scales": 2, "low_rank": 5, "all": 5}


class ThroughRounding(Arithmetic):
    """Of layers that round an fp32 weight, or keep its levels, each time that they multiply."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if setup.rounding is None:
            raise ValueError("nothing is rounded")
        self.rounding = setup.rounding
        modules = {name: m for name, m in self.shape.named_modules() if isinstance(m, Linear | Embedding)}
        self.quantized = {name: tuple(modules[name].weight.shape) for name in self.rounding.formats}
        self.projections = {name: shape for name, shape in self.quantized.items() if name.endswith("_proj")}

    def _scales(self, name: str) -> int:
        format, shape = self.rounding.formats[name], self.projections[name]
        return format.num_scales(shape) if isinstance(format, GridFormat) else shape[0]

    @cached_property
    def trained(self) -> list[int]:
        kind, rank = self.rounding.trained, self.rounding.rank
        sizes = [self._scales(name) for name in self.projections]
        if kind == "low_rank":
            sizes += [rank * side for shape in self.projections.values() for side in shape]
        if kind == "all":
            sizes += [rows * columns for rows, columns in self.projections.values()]
        biases = ("_proj.bias",) if kind == "all" else ()
        return sizes + [size for name, size in self._others().items() if "norm" in name or name.endswith(biases)]

    def _others(self) -> dict[str, int]:
        """Elements of the tensors that no format holds, by name."""
        sizes = {name: parameter.numel() for name, parameter in self.shape.named_parameters()}
        return {name: size for name, size in sizes.items() if name.removesuffix(".weight") not in self.quantized}

    def _weights(self) -> int:
        kind, rank = self.rounding.trained, self.rounding.rank
        total = sum(self.taught.values()) + FULL * sum(self._others().values())
        for name, shape in self.quantized.items():
            if name not in self.projections:
                total += self.rounding.formats[name].num_bytes(shape)
                continue
            total += (1 if kind == "scales" else FULL) * math.prod(shape) + 2 * FULL * self._scales(name)
            total += FULL * rank * sum(shape) if kind == "low_rank" else 0
        return total

    def _copies(self) -> int:
        return 0

    def _work(self) -> int:
        return super()._work() + FULL * _MADE_BY_ROUNDING[self.rounding.trained] * self._widest()

    def _widest(self) -> int:
        """Weights of the largest projection."""
        return max(rows * columns for rows, columns in self.projections.values())

    def _loss(self) -> int:
        """A quantized head is expanded."""
        expanded = 0 if self._head_name not in self.quantized else FULL
        return super()._loss() + expanded * self.config.vocab_size * self.config.hidden_size

    def _head_gradient(self) -> int:
        return 0

    @property
    def _head_name(self) -> str:
        return "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
