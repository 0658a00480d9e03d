"""What training in shards (train/sharding.py) holds in each of the processes that have a copy of the models together.

    what lasts      a share of every matrix with its gradient and moments, of quantized ones their bytes; vectors, and a
                    teacher's embeddings and head whole
    gathered        the head from forward to the end of backward, and layers one after another: in forward one, what it
                    came in, and what the next comes in; in backward one and the next; in the dtype of products, or as
                    they are where the model has an adapter
    on their way    a layer's gradients, whole, and once more in fp32 as they are reduced; at the end the head's

A process counts that has as many rows as any.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from model.cost import FULL
from model.formats.base import WeightFormat
from model.training_memory import Arithmetic, Memory, quantized, shapes_of


class InShards(Arithmetic):
    """A setup with `shards`."""

    def _held(self, shape: Sequence[int]) -> int:
        """Elements of a tensor that the process has."""
        count = self.setup.shards
        is_cut = len(shape) > 1 and shape[0] >= count
        return math.prod((-(-shape[0] // count), *shape[1:])) if is_cut else math.prod(shape)

    @cached_property
    def trained(self) -> list[int]:
        return [self._held(shape) for shape in self.trained_shapes]

    def _weights(self) -> int:
        formats, total = self._formats(), self._of_teacher()
        for name, parameter in self.shape.named_parameters():
            format = formats.get(name.removesuffix(".weight"))
            held = self._held(parameter.shape) * self.stream
            total += held if format is None else self._share(self._packed(format, parameter.shape))
        return total

    def _packed(self, format: WeightFormat[Any], shape: Sequence[int]) -> int:
        """Bytes of a quantized weight, as files hold it and as products read it."""
        return format.num_bytes(shape) + format.prepared_bytes(shape, on_gpu=self.setup.on_gpu)

    def _share(self, size: int) -> int:
        return -(-size // self.setup.shards)

    def _of_teacher(self) -> int:
        """What the process has of it."""
        teacher, total = self.setup.teacher, 0
        for name, shape in shapes_of(teacher).items() if teacher is not None else ():
            whole = self._taught_packed[name]
            if not name.startswith("model.layers."):
                total += whole
            elif name.removesuffix(".weight") in self.setup.teacher_formats:
                total += self._share(whole)
            else:
                total += self.teacher_item * self._held(shape)
        return total

    def _teacher_layer(self) -> int:
        """Of one that is whole."""
        return sum(size for name, size in self._taught_packed.items() if name.startswith("model.layers.0."))

    @cached_property
    def _taught_packed(self) -> dict[str, int]:
        """Bytes of each of its weights, by name, with what products read."""
        teacher, formats = self.setup.teacher, self.setup.teacher_formats
        packed = {f"{name}.weight": self._packed(one, shape) for name, one, shape in quantized(teacher, formats)}
        return self.taught | packed

    # What is gathered

    @property
    def _gathered_item(self) -> int:
        """Bytes of a layer's element: cast before it travels, but beside an adapter."""
        exact = self.setup.adapter is not None or self.config.experts is not None
        return self.stream if exact else min(self.stream, self.item)

    def _layer_weights(self) -> int:
        """Of one layer that is whole."""
        if self.frozen and (formats := self._formats()):
            layers = zip(formats.values(), self._layers(), strict=True)
            stored = sum(self._packed(format, layer.weight.shape) for format, layer in layers)
            return stored // self.config.num_layers + FULL * self._layer_trained()
        matrices = sum(layer.weight.numel() for layer in self._layers()) // self.config.num_layers
        return self._gathered_item * matrices + FULL * self._layer_trained() * (self.setup.adapter is not None)

    def _layer_trained(self) -> int:
        """Elements of a layer's gradients."""
        if self.frozen and self.setup.adapter is None:
            return 0
        matrices = sum(layer.weight.numel() for layer in self._layers())
        return (sum(map(math.prod, self.trained_shapes)) if self.frozen else matrices) // self.config.num_layers

    def memory(self) -> Memory:
        weights, adapters = self._weights(), FULL * sum(self.trained) * self.frozen
        gradients, (optimizer, host) = FULL * sum(self.trained), self._moments()
        fixed, loss, kept, work = weights + adapters + optimizer, self._loss(), self._kept(), self._work()
        held = gradients if self.training.micro_batches_per_step * self.setup.context > self.setup.processes else 0
        # Where groups hold the same, torch keeps what it sums over them until backward ends.
        twice = held * (self.setup.processes > self.setup.shards)
        head, head_gradient = self.stream * self.config.vocab_size * self.config.hidden_size, self._head_gradient()
        taught, expanded = self._teacher_layer(), self._expanded()
        layer, moving = self._layer_weights(), FULL * self._layer_trained()
        backward = 2 * layer + (self._gathered_item + FULL) * self._layer_trained()
        peaks = {
            "forward": fixed + held + head + kept + 2 * layer + max(layer, expanded),
            "teacher": fixed + held + head + kept + 2 * taught + max(taught, expanded),
            "loss": fixed + held + head + kept + loss,
            "first layer of backward": fixed + held + head + head_gradient + kept + work + backward,
            "last layer of backward": fixed + gradients + twice + head + head_gradient + work + backward
            + self._layer() * (not self._recomputes),
            "head": fixed + gradients + twice + head + 2 * head_gradient,
            "update": fixed + gradients,
        }  # fmt: skip
        activations = kept + work + head + head_gradient + 2 * layer + moving
        peak = max(peaks.values())
        return Memory(weights, adapters, gradients, optimizer, activations, loss, peak, host, self._checkpoint())
