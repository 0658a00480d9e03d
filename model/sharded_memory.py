"""What training in shards (train/sharding.py) holds in each of the processes that have a copy of the models together.

    what lasts      a share of every matrix with its gradient and moments, of quantized ones their bytes; vectors, and a
                    teacher's embeddings and head whole
    gathered        the head from forward to the end of backward, and layers one after another. In forward a layer lies
                    there as it came and as it is used, until the next has come: the last one until the loss is known.
                    In backward there is one and the next. All in the dtype of products, or as they are where the model
                    has an adapter
    on their way    a layer's gradients, whole, and once more in fp32 as they are reduced, until those of the next are;
                    at the end those of head and embeddings

Where neighbours divide each layer (model/trained_split.py), all of that is of their parts, and what is sharded among
those who have the same part; a part that one process alone has is copied as it is used, and no layer waits for the
next. Embeddings and head are sharded among all. Losses are those of a part of the rows.

Collectives of gloo work on copies of their own; those of NCCL do not.

A process counts that has as many rows as any.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from model.collectives import Group
from model.cost import FULL
from model.formats.base import WeightFormat
from model.mesh import MeshError
from model.tensor_parallel import LAYERS
from model.trained_split import TrainedSplit, check_trained_split, part_config
from model.training_memory import Arithmetic, Memory, Setup, quantized, shapes_of


def smallest_shards(setup: Setup, processes: int, budget: int) -> Setup | None:
    """The setup on so many processes, in the fewest shards whose peak fits `budget` bytes; None if none does.

    Where all of them do not help, they divide the tokens of micro-batches among as few as do, unless routers are to see
    all; or each layer, if its models can be divided.
    """
    divisors = [count for count in range(1, processes + 1) if processes % count == 0]
    together = [] if setup.whole_documents else divisors[1:]
    meshes = [(count, 1, 1) for count in divisors]
    if not setup.routed and setup.model.mixture_of_depths is None:
        meshes += [(processes, count, 1) for count in together]
    meshes += [(processes, 1, count) for count in together]
    for among, context, tensor in meshes:
        placed = replace(setup, processes=processes, shards=among, context=context, tensor=tensor)
        with suppress(MeshError):
            if placed.memory().peak <= budget:
                return placed
    return None


def check_divided(setup: Setup) -> None:
    """Raise MeshError, one sentence, where `setup.tensor` processes cannot divide the layers of its models."""
    count = setup.tensor
    if count == 1:
        return
    dora = setup.adapter is not None and setup.adapter.dora
    check_trained_split(setup.model, count, dora=dora, rounds=setup.rounding is not None)
    models = [(setup.model, Arithmetic(setup).formats())]
    models += [] if setup.teacher is None else [(setup.teacher, dict(setup.teacher_formats))]
    for config, formats in models:
        split = TrainedSplit(Group(0, count), config)
        for name, one, shape in quantized(config, formats):
            split.check_cut(name, shape, one)


def _of_parts(setup: Setup) -> Setup:
    """Of the models that one process's layers are."""
    if setup.tensor == 1:
        return setup
    first = Group(0, setup.tensor)
    teacher = None if setup.teacher is None else part_config(setup.teacher, first)
    formats = {name: one.of_parts() for name, one in setup.teacher_formats.items()}
    return replace(setup, model=part_config(setup.model, first), teacher=teacher, teacher_formats=formats)


class InShards(Arithmetic):
    """A setup with `shards`."""

    def __init__(self, setup: Setup) -> None:
        """MeshError as `check_divided`."""
        check_divided(setup)
        super().__init__(_of_parts(setup))
        self.undivided = setup
        self.owners = setup.shards // setup.tensor
        """Processes that have the same part of each layer."""

    def formats(self) -> dict[str, WeightFormat[Any]]:
        formats = super().formats()
        return formats if self.setup.tensor == 1 else {name: one.of_parts() for name, one in formats.items()}

    def _held(self, name: str, shape: Sequence[int]) -> int:
        count = self.owners if name.startswith(LAYERS) else self.setup.shards
        is_cut = len(shape) > 1 and shape[0] >= count
        return math.prod((-(-shape[0] // count), *shape[1:])) if is_cut else math.prod(shape)

    def _weights(self) -> int:
        formats, total = self.formats(), self._of_teacher()
        for name, parameter in self.shape.named_parameters():
            format = formats.get(name.removesuffix(".weight"))
            held = self._held(name, parameter.shape) * self.stream
            total += held if format is None else self._share(self._packed(format, parameter.shape))
        return total

    def _packed(self, format: WeightFormat[Any], shape: Sequence[int]) -> int:
        """Bytes of a quantized weight, as files hold it and as products read it."""
        return format.num_bytes(shape) + format.prepared_bytes(shape, on_gpu=self.setup.on_gpu)

    def _share(self, size: int) -> int:
        """Of a part of a layer."""
        return -(-size // self.owners)

    def _of_teacher(self) -> int:
        teacher, total = self.setup.teacher, 0
        for name, shape in shapes_of(teacher).items() if teacher is not None else ():
            whole = self._taught_packed[name]
            if not name.startswith(LAYERS):
                total += whole
            elif name.removesuffix(".weight") in self.setup.teacher_formats:
                total += self._share(whole)
            else:
                total += self.teacher_item * self._held(name, shape)
        return total

    def _teacher_layer(self) -> int:
        """Of one that is whole."""
        return sum(size for name, size in self._taught_packed.items() if name.startswith(f"{LAYERS}0."))

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

    @property
    def _casts_base(self) -> bool:
        return self.setup.fp32_base and self._gathered_item != self.item

    @cached_property
    def _layer_weights(self) -> int:
        """Of one layer that is whole."""
        if self.frozen and (formats := self.formats()):
            layers = zip(formats.values(), self._layers(), strict=True)
            stored = sum(self._packed(format, layer.weight.shape) for format, layer in layers)
            return stored // self.config.num_layers + FULL * self._layer_trained
        matrices = sum(layer.weight.numel() for layer in self._layers()) // self.config.num_layers
        return self._gathered_item * matrices + FULL * self._layer_trained * (self.setup.adapter is not None)

    @cached_property
    def _layer_trained(self) -> int:
        """Elements of a layer's gradients."""
        if self.frozen and self.setup.adapter is None:
            return 0
        matrices = sum(layer.weight.numel() for layer in self._layers())
        trained = sum(math.prod(shape) for _, shape in self.trained_shapes) if self.frozen else matrices
        return trained // self.config.num_layers

    @property
    def _head_weights(self) -> int:
        return self.stream * self.config.vocab_size * self.config.hidden_size

    def memory(self) -> Memory:
        weights, adapters = self._weights(), FULL * sum(self.trained) * self.frozen
        gradients, (optimizer, host) = FULL * sum(self.trained), self._moments()
        lasting, kept, loss, work = weights + adapters + optimizer, self._kept(), self._loss(), self._work()
        held, head, head_gradient = gradients * self._accumulates, self._head_weights, self._head_gradient()
        layer, taught, expanded = self._layer_weights, self._teacher_layer(), self._expanded()
        in_forward = lasting + held + head + kept + self._waiting(layer)
        in_backward = lasting + held + head + head_gradient
        peaks = {
            "embeddings": lasting + held + self._embedding(),
            "forward": in_forward + max(self._arriving(self._waiting(layer)) + self._cast(), layer + expanded),
            "teacher": in_forward
            + self._waiting(taught)
            + max(self._arriving(self._waiting(taught)), taught + expanded),
            "loss": in_forward + loss,
            "backward": in_backward + max(map(self._backward, self._extremes())),
            "ends": lasting + held + gradients * self._adds_gradients + self._ends(),
            "update": lasting + gradients,
        }
        activations = kept + work + head + head_gradient + 2 * layer + FULL * self._layer_trained
        peak = max(peaks.values())
        host += self._whole()
        return Memory(weights, adapters, gradients, optimizer, activations, loss, peak, host, self._checkpoint())

    def _whole(self) -> int:
        """The model as it is given back to the main process; a quantized base that is divided stays there."""
        alone = replace(self.undivided, teacher=None, shards=1).arithmetic()
        return alone._weights() + FULL * sum(alone.trained) * alone.frozen

    @property
    def _accumulates(self) -> bool:
        """Whether gradients live from one micro-batch to the next."""
        together = self.setup.context * self.setup.tensor
        return self.training.micro_batches_per_step * together > self.setup.processes

    @property
    def _adds_gradients(self) -> bool:
        """Whether a backward pass adds as much as all gradients: its own.

        Where groups hold the same, torch keeps what it sums over them until backward ends.
        """
        return not self._accumulates or self.setup.processes > self.setup.shards

    def _waiting(self, layer: int) -> int:
        """As it came, or comes before its time: not from the process itself."""
        return layer if self.owners > 1 else 0

    def _arriving(self, size: int) -> int:
        """What is gathered, or reduced, while it is on its way."""
        return size if self.setup.on_gpu else 2 * size

    def _leaving(self, reduced: int) -> int:
        """A layer's gradients on their way; those that stay are divided by one into a copy."""
        return self._arriving(reduced) if self.owners > 1 else 2 * reduced

    def _cast(self) -> int:
        """The share of a layer that travels in another dtype than it is held in."""
        if self._gathered_item == self.stream or self.formats():
            return 0
        return self._share(self._layer_weights)

    def _extremes(self) -> list[int]:
        """How many layers backward may have behind it; what is between the second and the last but one is there too."""
        count = self.config.num_layers
        return sorted({done for done in (0, 1, count - 2, count - 1) if 0 <= done < count})

    def _backward(self, done: int) -> int:
        """While a layer is at work behind so many others: it and the next are whole, and its gradients leave it."""
        is_followed, kept_by_layer = done + 1 < self.config.num_layers, self._kept_by_layer()
        layer, reduced = self._layer_weights, FULL * self._layer_trained
        own = (FULL if self.frozen else self._gathered_item) * self._layer_trained
        next_one = self._waiting(layer) * is_followed
        working = next_one + layer + max(self._work(), own)
        coming = layer + (self._arriving(self._waiting(layer)) + self._cast()) * is_followed
        leaving = next_one + self._leaving(reduced) + self._share(reduced)
        before = reduced * (done > 0)
        kept = self._kept() - done * kept_by_layer + done * self._share(reduced) * self._adds_gradients
        return kept + max(before + max(working, coming), leaving - kept_by_layer)

    def _embedding(self) -> int:
        """Before all layers: a head of its own as it came and as it is used, and the embeddings on their way."""
        table = self._head_weights
        return self._arriving(table) + 2 * table * (not self.config.tie_word_embeddings)

    def _ends(self) -> int:
        """Behind all layers: gradients of head and embeddings leave, one after the other.

        They are in fp32, so that a gradient lies there as it was computed too; and the head as it is used.
        """
        gradient = self._head_gradient()
        waiting = (self._head_weights + gradient) * (not self.config.tie_word_embeddings)
        return waiting + gradient + self._arriving(gradient)
