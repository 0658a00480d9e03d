"""Layers that neighbouring processes divide, as training by shards sees it: what is where, and what gradients lack.

Of each parameter a process has all, or a block of rows or columns (model/trained_split.py). Several have the same block
where there are fewer KV heads than processes, and all have it of what is not divided.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from model.collectives import Group
from model.config import ModelConfig
from model.tensor_parallel import LAYERS, WHOLE, Layout, Part
from model.trained_split import TrainedSplit, connect, is_everywhere, take_part
from model.transformer import Transformer
from train.saved_tensors import Place, Span, block_name


def layout_of(config: ModelConfig, group: Group) -> Layout:
    """MeshError where the group cannot divide the layers."""
    return WHOLE if group.count == 1 else TrainedSplit(group, config)


class Parts:
    """Of a model, this process's among those of a group."""

    def __init__(self, model: Transformer, group: Group) -> None:
        """`model`: whole."""
        self.group = group
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._layouts = [layout_of(model.config, Group(index, group.count)) for index in range(group.count)]

    def take(self, model: Transformer, number: int) -> None:
        """Leaves a layer with this process's part."""
        split = self._layouts[self.group.index]
        if isinstance(split, TrainedSplit):
            take_part(model.model.layers[number], f"{LAYERS}{number}", split)

    def connect(self, model: Transformer) -> None:
        """Once it has been sharded."""
        if self.group.count > 1:
            connect(model, self.group)

    def place(self, name: str) -> Place:
        """Where this process's part lies in the whole parameter."""
        return _place(self._part(name, self.group.index), self.shapes[name])

    def block(self, name: str) -> str:
        """What its part is called in a checkpoint."""
        if self._blocks(name) == 1:
            return name
        return block_name(name, self._block(name), beside=self.place(name).columns is not None)

    def is_first(self, name: str) -> bool:
        """Whether no process before this one has the same part."""
        return self.group.index * self._blocks(name) % self.group.count == 0

    def weight(self, name: str) -> float:
        """By which its gradients are multiplied before they are added up: what all have, they have alike."""
        return 1 / self.group.count if is_everywhere(name) else 1.0

    def sum_shared(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Adds up the gradients of parts of layers that several processes have, in place."""
        shared = {
            name: p.grad
            for name, p in parameters.items()
            if name.startswith(LAYERS) and self._blocks(name) < self.group.count and p.grad is not None
        }
        if not shared:
            return
        sizes = [self._blocks(name) * grad.numel() for name, grad in shared.items()]
        summed = next(iter(shared.values())).new_zeros(sum(sizes))
        own = []
        for (name, grad), flat in zip(shared.items(), summed.split(sizes), strict=True):
            own.append(flat.view(self._blocks(name), *grad.shape)[self._block(name)])
            own[-1].copy_(grad).mul_(self.weight(name))
        self.group.sum(summed)
        for grad, part in zip(shared.values(), own, strict=True):
            grad.copy_(part)

    def joined(self, name: str, part: Tensor) -> Tensor:
        """The whole parameter, in every process, of what each has."""
        if self.group.count == 1 or self._blocks(name) == 1:
            return part
        whole = part.new_empty(self.shapes[name])
        for index, piece in enumerate(self.group.gather(part)):
            _place(self._part(name, index), self.shapes[name]).of(whole).copy_(piece)
        return whole

    def _part(self, name: str, index: int) -> Part:
        return self._layouts[index].part(name, self.shapes[name])

    def _blocks(self, name: str) -> int:
        """Of how many different ones the whole consists."""
        rows, columns = self.place(name)
        span = rows if columns is None else columns
        return span.of // (span.stop - span.start)

    def _block(self, name: str) -> int:
        """The number of this process's."""
        rows, columns = self.place(name)
        span = rows if columns is None else columns
        return span.start // (span.stop - span.start)


def _place(part: Part, shape: torch.Size) -> Place:
    (rows,) = (slice(*one.indices(shape[0])) for one in part.rows)
    columns = None if part.columns == slice(None) else Span(part.columns.start, part.columns.stop, shape[1])
    return Place(Span(rows.start, rows.stop, shape[0]), columns)
