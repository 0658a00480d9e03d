"""A model of which each process holds a part: FSDP2, by torch's `fully_shard` on every decoder layer.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from model.collectives import Group
from model.files.adapter import base_folder
from model.files.checkpoint import load_model, open_layerwise
from model.lora import adapted_layers
from model.mesh import Mesh, choose_dtype
from model.quantized import quantized_layers
from model.transformer import Transformer
from train.accelerator import this_accelerator
from train.objectives import Objective, ObjectiveOfModel
from train.packing import Batch
from train.saved_tensors import Rows

if TYPE_CHECKING:
    from accelerate import Accelerator


class LocalShards:
    """The rows of each trained parameter that this process updates, as plain tensors that share memory with them.

    Each says which rows they are: `train.saved_tensors.rows_of`.
    """

    def __init__(self, model: nn.Module, part: int, parts: int) -> None:
        self.of = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.local = {name: _local_parameter(parameter, part, parts) for name, parameter in self.of.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.local.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.local.values())


def _local_parameter(parameter: Tensor, part: int, parts: int) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return nn.Parameter(parameter.detach())
    local: Any = nn.Parameter(cast("DTensor", parameter.detach()).to_local())
    most = -(-len(parameter) // parts)
    start = min(part * most, len(parameter))
    local.rows = Rows(start, start + len(local), len(parameter))
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
        self.model = twin = _twin(model)
        # Adapters' magnitudes and the routers of experts are computed with in fp32, whatever is around them; and bytes
        # are no numbers.
        exact = bool(adapted_layers(model) or quantized_layers(model)) or model.config.experts is not None
        matrices = MixedPrecisionPolicy(
            param_dtype=None if exact else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for layer, lender in zip(twin.model.layers, model.model.layers, strict=True):
            shard_module(layer, self.mesh, policy=matrices, reshards=mesh.reshards)
            _empty(lender)
        uncast = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        if twin.lm_head is not None:
            shard_module(twin.model.embed_tokens, self.mesh, policy=uncast, reshards=mesh.reshards)
        self.module: nn.Module = ObjectiveOfModel(twin, objective)
        shard_module(self.module, self.mesh, policy=uncast, reshards=False)
        _empty(model)
        twin.to(accelerator.device)
        part = self.mesh.get_local_rank("shard")
        self.trained = LocalShards(twin, part, mesh.shard)
        self.part = part if self.mesh.get_local_rank("replicate") == 0 else None
        self.parts = mesh.shard
        self.context = context_group(mesh, accelerator.device)
        self._whole_here = [p for p in self.trained.of.values() if not isinstance(p, DTensor)]

    def part_of(self, batch: Batch) -> Batch:
        return batch if self.context is None else batch.part_of(self.context)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        self._sum_small_ones()
        for name, parameter in self.trained.of.items():
            grad = parameter.grad
            self.trained.local[name].grad = grad.to_local() if isinstance(grad, DTensor) else grad
        return [p.grad for p in self.trained.parameters() if p.grad is not None]

    def _sum_small_ones(self) -> None:
        """Over all processes, of what none of them has only a part of."""
        if not self._whole_here:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._whole_here]
        summed = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(summed)
        for parameter, part in zip(self._whole_here, summed.split([grad.numel() for grad in grads]), strict=True):
            parameter.grad = part.view_as(parameter)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Parts add up over a group; what every process has whole counts once."""
        local = self.trained.local
        parts = [local[name].grad for name, p in self.trained.of.items() if isinstance(p, DTensor)]
        squares = _squares(parts, self.accelerator.device)
        dist.all_reduce(squares, group=self.mesh.get_group("shard"))
        return (squares + _squares([p.grad for p in self._whole_here], squares.device)).sqrt()

    def clear(self) -> None:
        for parameter in (*self.trained.of.values(), *self.trained.parameters()):
            parameter.grad = None

    def whole(self) -> Transformer | None:
        """On the CPU of the main process. One tensor at a time is gathered, so no device holds more than that."""
        lenders, lent = dict(self.given.named_parameters()), quantized_layers(self.model)
        for name, parameter in self.model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if not self.accelerator.is_main_process:
                continue
            full, layer = full.detach().to("cpu", copy=True), name.removesuffix(".packed")
            if layer in lent:
                cast("Any", self.given.get_submodule(layer)).weight = lent[layer].unpacked(full)
            else:
                lenders[name].data = full
        self.given.train(self.model.training)
        return self.given if self.accelerator.is_main_process else None

    def written(self) -> set[str]:
        """What every process has whole, the first one writes."""
        return {name for name, p in self.trained.of.items() if self.part == 0 or isinstance(p, DTensor)}

    def put_away(self) -> None:
        _empty(self.given)


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


def shard_frozen(model: Transformer, mesh: DeviceMesh, load_layer: Callable[[int], None] = lambda number: None) -> None:
    """Shards the layers of a model that is only asked, in place; embeddings and head stay whole in every process.

    `load_layer` fills a layer that has no memory yet, so that never more than one is whole.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for number, layer in enumerate(model.model.layers):
        load_layer(number)
        layer.requires_grad_(False)
        shard_module(layer, mesh, policy=policy, reshards=True)
    fully_shard(model, mesh=_groups(mesh), ignored_params=set(model.parameters()))


def load_frozen(folder: Path, mesh: Mesh) -> Transformer:
    """A published model in shards, on this process's device in the dtype that this multiplies fast.

    It is read layer by layer, so that no process ever holds it all, unless it carries an adapter.
    """
    device = this_accelerator().device
    how: Any = {"dtype": choose_dtype("auto", device), "device": device}
    if base_folder(folder) != folder:
        model = load_model(folder, **how).requires_grad_(False)
        shard_frozen(model, device_mesh(mesh, device))
    else:
        model, load_layer = open_layerwise(folder, **how)
        shard_frozen(model, device_mesh(mesh, device), load_layer)
    return model


@cache
def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (mesh.replicate, mesh.shard), mesh_dim_names=("replicate", "shard"))


@cache
def context_group(mesh: Mesh, device: torch.device) -> Group | None:
    """The processes that compute a micro-batch together with this one; None where each has its own."""
    if mesh.context == 1:
        return None
    sizes = (mesh.replicate * mesh.shard // mesh.context, mesh.context)
    return Group.of_processes(init_device_mesh(device.type, sizes, mesh_dim_names=("data", "context")).get_group(1))


def _twin(model: Transformer) -> Transformer:
    """A copy that shares all weights, under parameters of its own."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
    for layer in quantized_layers(model).values():
        memo |= {id(held): held for held in (layer._weight, layer._prepared)}
    return copy.deepcopy(model, memo)


def _empty(module: nn.Module) -> None:
    """Frees the memory of its parameters, which stay, and of quantized weights."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
    for layer in quantized_layers(module).values():
        layer.weight = cast("Any", None)


def _squares(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    total = torch.zeros((), device=device)
    for tensor in tensors:
        if tensor is not None:
            total += torch.linalg.vector_norm(tensor, dtype=torch.float32).square()
    return total
