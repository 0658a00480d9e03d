"""What training through rounding (compress/quantize/qat.py) holds: fp32 weights or levels, and what they become."""

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

from model.cost import FULL
from model.formats.base import GridFormat, WeightFormat
from model.linear import Embedding, Linear
from model.sharded_memory import InShards
from model.tensor_parallel import LAYERS
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
        weights = {name: modules[name].weight for name in self.rounding.formats}
        self.quantized = {name: (len(weight), weight.shape[1]) for name, weight in weights.items()}
        self.projections = {name: shape for name, shape in self.quantized.items() if name.endswith("_proj")}

    def _scales(self, name: str) -> tuple[int, int]:
        """Their shape."""
        format, (rows, columns) = self.rounding.formats[name], self.projections[name]
        count = format.num_scales((rows, columns)) if isinstance(format, GridFormat) else rows
        return (rows, count // rows) if count >= rows else (1, count)

    @cached_property
    def trained_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for name, weight in self.projections.items():
            shapes += [(name, shape) for shape in (self._scales(name), *self._updates(weight))]
        biases = ("_proj.bias",) if self.rounding.trained == "all" else ()
        return shapes + [one for one in self._others().items() if "norm" in one[0] or one[0].endswith(biases)]

    def _updates(self, weight: tuple[int, int]) -> list[tuple[int, int]]:
        """Shapes of what is trained of a weight beside its scales."""
        (rows, columns), rank = weight, self.rounding.rank
        return {"scales": [], "low_rank": [(rank, columns), (rows, rank)], "all": [weight]}[self.rounding.trained]

    def _others(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that no format holds, by name."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.shape.named_parameters()}
        return {name: shape for name, shape in shapes.items() if name.removesuffix(".weight") not in self.quantized}

    def _weights(self) -> int:
        total = self._of_teacher() + sum(FULL * self._held(name, shape) for name, shape in self._others().items())
        for name, shape in self.quantized.items():
            is_trained = name in self.projections
            total += self._of_projection(name) if is_trained else self._of_quantized(self.rounding.formats[name], shape)
        return total

    def _of_projection(self, name: str) -> int:
        """Bytes: its levels or what is rounded, scales as they were and by what they are multiplied, and updates."""
        kind, weight = self.rounding.trained, self.projections[name]
        levels = (1 if kind == "scales" else FULL) * self._held(name, weight)
        updates = self._updates(weight) if kind == "low_rank" else []
        return levels + FULL * sum(self._held(name, one) for one in (*[self._scales(name)] * 2, *updates))

    def _of_quantized(self, format: WeightFormat[Any], shape: tuple[int, int]) -> int:
        """Bytes of one that stays as it is."""
        return format.num_bytes(shape)

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


class RoundingInShards(ThroughRounding, InShards):
    """The same where several processes have a share of each layer. A layer is gathered as it is held, in fp32."""

    def _of_quantized(self, format: WeightFormat[Any], shape: tuple[int, int]) -> int:
        return -(-self._packed(format, shape) // self.setup.shards)

    @property
    def _gathered_item(self) -> int:
        return FULL

    @cached_property
    def _layer_weights(self) -> int:
        whole = ThroughRounding(replace(self.undivided, shards=1))
        held = sum(whole._of_projection(name) for name in self.projections)
        others = sum(math.prod(shape) for name, shape in self._others().items() if name.startswith(LAYERS))
        return (held + FULL * others) // self.config.num_layers

    @cached_property
    def _layer_trained(self) -> int:
        trained = sum(math.prod(shape) for name, shape in self.trained_shapes if name.startswith(LAYERS))
        return trained // self.config.num_layers

    @property
    def _head_weights(self) -> int:
        format = self.rounding.formats.get(self._head_name)
        return super()._head_weights if format is None else self._packed(format, self.quantized[self._head_name])
