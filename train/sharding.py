"""A model of which each process holds a part: FSDP2, by torch's `fully_shard` on every decoder layer.

Where neighbours divide the layers (model/trained_split.py), it is their parts that are sharded, each over the processes
that have the same one; embeddings and head over all of them.

Matrices are cut by rows. Vectors (norms, biases, magnitudes), and matrices with fewer rows than processes, are whole in
every process: they are small, and stay in fp32 whatever dtype matrices are gathered in. A quantized weight is cut as
the bytes of codes and scales that its product reads, prepared for the device (`QuantizedLayer.pack`).

    embeddings      a group of their own, unless they are the head too
    each layer      a group: gathered before its forward and its backward, freed behind them
    the head        gathered from forward to the end of backward: losses multiply with it behind the model's forward

Gradients are reduced in fp32, with every micro-batch, so that none is ever kept whole. They are sums: averages are for
those whose losses are means, and gloo has not always had them.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from model.collectives import Group
from model.files.checkpoint import load_config
from model.lazy import open_published, weights_of
from model.lora import adapted_layers
from model.mesh import Mesh
from model.quantized import quantized_layers
from model.tensor_parallel import ALONE, LAYERS
from model.trained_split import connect
from model.transformer import Transformer
from model.unmade import filled_in_turn
from train.accelerator import this_accelerator
from train.objectives import Objective, ObjectiveOfModel
from train.packing import Batch
from train.parts import Parts, layout_of
from train.saved_tensors import Place, Span

if TYPE_CHECKING:
    from accelerate import Accelerator

M = TypeVar("M", bound=nn.Module)


class LocalShards:
    """The part of each trained parameter that this process updates, as plain tensors that share memory with it.

    Each says which part it is: `train.saved_tensors.place_of`.
    """

    def __init__(self, model: nn.Module, parts: "Parts") -> None:
        self.of = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.local = {name: _local_parameter(parameter, parts.place(name)) for name, parameter in self.of.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.local.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.local.values())


def _local_parameter(parameter: Tensor, place: Place) -> nn.Parameter:
    """`place`: of the parameter, of which this process may have some rows."""
    local: Any = nn.Parameter(parameter.detach())
    if isinstance(parameter, DTensor):
        shared, mesh = cast("DTensor", parameter.detach()), parameter.device_mesh
        local = nn.Parameter(shared.to_local())
        most = -(-len(parameter) // mesh.size(mesh.ndim - 1))
        start = place.rows.start + min(mesh.get_local_rank(mesh.ndim - 1) * most, len(parameter))
        place = place._replace(rows=Span(start, start + len(local), place.rows.of))
    local.place = place
    return local


class Sharded:
    """See `train.parallel.Parallel`.

    The model that is given lends its weights: while training lasts it has none. Its twin is what is called.
    """

    divided_by = 1

    def __init__(
        self, model: Transformer, objective: Objective, accelerator: "Accelerator", mesh: Mesh, dtype: torch.dtype
    ) -> None:
        self.accelerator, self.mesh, self.given = accelerator, device_mesh(mesh, accelerator.device), model
        self.parts_of = parts = Parts(model, tensor_group(mesh, accelerator.device))
        filled = filled_in_turn(model)
        self.model = twin = _twin(model)
        # Adapters' magnitudes and the routers of experts are computed with in fp32, whatever is around them; bytes and
        # levels are no numbers.
        holds_bytes = quantized_layers(model) or not all(p.is_floating_point() for p in model.parameters())
        exact = bool(adapted_layers(model) or holds_bytes) or model.config.experts is not None
        matrices = MixedPrecisionPolicy(
            param_dtype=None if exact else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        layers: Any = twin.model.layers
        for number in range(model.config.num_layers):
            layers[number] = _twin(lender := filled(number))
            parts.take(twin, number)
            shard_module(layers[number], self.mesh, policy=matrices, reshards=mesh.reshards)
            self._lend(lender)
        all_of_copy = device_mesh(mesh.undivided, accelerator.device)
        uncast = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        if twin.lm_head is not None:
            shard_module(twin.model.embed_tokens, all_of_copy, policy=uncast, reshards=mesh.reshards)
        self.module: nn.Module = ObjectiveOfModel(twin, objective)
        shard_module(self.module, all_of_copy, policy=uncast, reshards=False)
        self._lend(model)
        parts.connect(twin)
        self.module.to(accelerator.device)  # not the twin alone: the head is of this group, which pads what has moved
        self.trained = LocalShards(twin, parts)
        self._copy = all_of_copy.get_group("shard")
        self.part = all_of_copy.get_local_rank("shard") if all_of_copy.get_local_rank("replicate") == 0 else None
        self.parts = mesh.shard * mesh.tensor
        self.context = context_group(mesh, accelerator.device)
        self._whole_here = [name for name, p in self.trained.of.items() if not isinstance(p, DTensor)]

    def _lend(self, module: nn.Module) -> None:
        """Frees what a module of the given model holds, but for frozen bytes that nobody could put together again."""
        for layer in quantized_layers(module).values():
            if self.parts_of.group.count == 1 or not self.accelerator.is_main_process:
                layer.weight = cast("Any", None)
            elif layer.device.type != "cpu":
                layer.weight = layer.format.moved(layer.weight, "cpu")
        _empty(module)

    def part_of(self, batch: Batch) -> Batch:
        if self.context is not None:
            return batch.part_of(self.context)
        return batch if self.parts_of.group.count == 1 else batch.losses_among(self.parts_of.group)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        self._sum_small_ones()
        for name, parameter in self.trained.of.items():
            grad = parameter.grad
            self.trained.local[name].grad = grad.to_local() if isinstance(grad, DTensor) else grad
        sharded = {name: p for name, p in self.trained.named_parameters() if name not in self._whole_here}
        self.parts_of.sum_shared(sharded)
        return [p.grad for p in self.trained.parameters() if p.grad is not None]

    def _sum_small_ones(self) -> None:
        """Over all processes, of what none of them has only some rows of; as parts of whole ones, if they are parts."""
        if not self._whole_here:
            return
        shapes = [self.parts_of.shapes[name] for name in self._whole_here]
        sizes = [math.prod(shape) for shape in shapes]
        summed = torch.zeros(sum(sizes), device=self.accelerator.device)
        own = []
        for name, shape, flat in zip(self._whole_here, shapes, summed.split(sizes), strict=True):
            own.append(self.parts_of.place(name).of(flat.view(shape)))
            if (grad := self.trained.of[name].grad) is not None:
                own[-1].copy_(grad).mul_(self.parts_of.weight(name))
        dist.all_reduce(summed)
        for name, part in zip(self._whole_here, own, strict=True):
            self.trained.of[name].grad = part.contiguous()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Parts add up over the processes of a copy; what several of them have counts once."""
        owned = [self.trained.local[name].grad for name in self._owned()]
        squares = _squares(owned, self.accelerator.device)
        dist.all_reduce(squares, group=self._copy)
        return squares.sqrt()

    def clear(self) -> None:
        for parameter in (*self.trained.of.values(), *self.trained.parameters()):
            parameter.grad = None

    def whole(self) -> Transformer | None:
        """On the CPU of the main process. One tensor at a time is gathered, so no device holds more than that."""
        lenders, lent = dict(self.given.named_parameters()), quantized_layers(self.model)
        for name, parameter in self.model.named_parameters():
            layer = name.removesuffix(".packed")
            if layer in lent and self.parts_of.group.count > 1:  # the main process has kept it
                continue
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            full = self.parts_of.joined(name, full.detach())
            if not self.accelerator.is_main_process:
                continue
            full = full.to("cpu", copy=True)
            if layer in lent:
                cast("Any", self.given.get_submodule(layer)).weight = lent[layer].unpacked(full)
            else:
                lenders[name].data = full
        self.given.train(self.model.training)
        return self.given if self.accelerator.is_main_process else None

    def written(self) -> dict[str, str]:
        return {name: self.parts_of.block(name) for name in self._owned()}

    def _owned(self) -> list[str]:
        """Trained parameters of which no process before this one in a copy has the same part."""
        is_first = self.mesh.get_local_rank("shard") == 0
        is_cut = {name: isinstance(p, DTensor) for name, p in self.trained.of.items()}
        return [name for name in is_cut if self._owns(name) and (is_cut[name] or is_first)]

    def _owns(self, name: str) -> bool:
        """Among those who divide the layers."""
        is_over_all = not name.startswith(LAYERS) and name not in self._whole_here
        return is_over_all or self.parts_of.is_first(name)

    def put_away(self) -> None:
        self._lend(self.given)


def shard_module(module: nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy, reshards: bool) -> None:
    """Makes a module a group of its own, in place: what of its parameters no group has yet."""
    for layer in quantized_layers(module).values():
        if layer.packed is None:
            layer.pack()
    fully_shard(
        module,
        mesh=_groups(mesh),
        reshard_after_forward=reshards,
        mp_policy=policy,
        ignored_params={parameter for parameter in module.parameters() if not is_cut(parameter, mesh)},
    )
    group: Any = module
    group.set_gradient_divide_factor(1.0)  # a factor alone would ask for products that only NCCL has
    group.set_force_sum_reduction_for_comms(True)
    group.set_reduce_scatter_unused_params(True, recurse=False)  # a layer that no token of one process has passed


def _groups(mesh: DeviceMesh) -> DeviceMesh:
    """As `fully_shard` takes it: where one group is all, no groups of groups.

    Those would sum gradients once more, and keep what they summed until backward ends: all gradients, a second time.
    """
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh


def is_cut(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Whether its rows are spread over processes."""
    return parameter.dim() > 1 and len(parameter) >= mesh["shard"].size()


def shard_frozen(
    model: Transformer, mesh: DeviceMesh, load_layer: Callable[[int], object] = lambda number: None
) -> None:
    """Shards the layers of a model that is only asked, in place; embeddings and head stay whole in every process.

    `load_layer` fills a layer that has no memory yet, so that never more than one is whole.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for number, layer in enumerate(model.model.layers):
        load_layer(number)
        layer.requires_grad_(False)
        shard_module(layer, mesh, policy=policy, reshards=True)
    fully_shard(model, mesh=_groups(mesh), ignored_params=set(model.parameters()))


def split_frozen(model: Transformer, mesh: Mesh, device: torch.device) -> None:
    """As `shard_frozen`, of a model that every process has; in the parts of layers that the mesh asks for."""
    parts = Parts(model, tensor_group(mesh, device))
    shard_frozen(model, device_mesh(mesh, device), lambda number: parts.take(model, number))
    parts.connect(model)


def load_frozen(folder: Path, mesh: Mesh, dtype: torch.dtype) -> Transformer:
    """A published model in shards, on this process's device.

    It is read layer by layer, so that no process ever holds it all; of what carries an adapter, all of that.
    """
    device = this_accelerator().device
    layout = layout_of(load_config(folder), group := tensor_group(mesh, device))
    model, load_layer = open_published(folder, dtype, device, layout)
    shard_frozen(model, device_mesh(mesh, device), load_layer)
    if group.count > 1:
        connect(model, group)
    return model


def make_frozen(model: Transformer, make_layer: Callable[[int], None], mesh: Mesh) -> Transformer:
    """The same of a model that is not published, whose layers hold no memory yet, and are made one at a time."""
    shard_frozen(model, device_mesh(mesh, model.device), make_layer)
    return model


@cache
def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """Of the processes that have the same parts of layers."""
    names = ("replicate", "shard", "tensor")
    if mesh.tensor == 1:
        return init_device_mesh(device.type, (mesh.replicate, mesh.shard), mesh_dim_names=names[:2])
    return init_device_mesh(device.type, (mesh.replicate, mesh.shard, mesh.tensor), mesh_dim_names=names)[names[:2]]


@cache
def tensor_group(mesh: Mesh, device: torch.device) -> Group:
    """The processes that divide each layer with this one."""
    if mesh.tensor == 1:
        return ALONE
    sizes = (mesh.replicate * mesh.shard, mesh.tensor)
    return Group.of_processes(init_device_mesh(device.type, sizes, mesh_dim_names=("data", "tensor")).get_group(1))


@cache
def data_group(mesh: Mesh, device: torch.device) -> Group:
    """Of those who divide each layer one each, this process among them: who has a batch of its own."""
    sizes = (mesh.replicate * mesh.shard, mesh.tensor)
    return Group.of_processes(init_device_mesh(device.type, sizes, mesh_dim_names=("data", "tensor")).get_group(0))


@cache
def context_group(mesh: Mesh, device: torch.device) -> Group | None:
    """The processes that compute a micro-batch together with this one; None where each has its own."""
    if mesh.context == 1:
        return None
    sizes = (mesh.replicate * mesh.shard // mesh.context, mesh.context)
    return Group.of_processes(init_device_mesh(device.type, sizes, mesh_dim_names=("data", "context")).get_group(1))


def _twin(model: M) -> M:
    """A copy that shares all weights, under parameters of its own."""
    own = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, weights_of(model) | own)


def _empty(module: nn.Module) -> None:
    """Frees the memory of its parameters, which stay."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


def _squares(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    total = torch.zeros((), device=device)
    for tensor in tensors:
        if tensor is not None:
            total += torch.linalg.vector_norm(tensor, dtype=torch.float32).square()
    return total
