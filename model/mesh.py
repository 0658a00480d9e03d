"""Devices, their dtypes, and the processes of a run: chosen and named here, for training, measuring and serving.

Whatever comes after takes a `torch.device` and asks no further. torch is imported by what needs it, so that a process
knows its rank before that.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Rank:
    """One process among those that a launcher (accelerate, torchrun) started together."""

    index: int
    """0 is the main one."""
    local: int
    """Among those of the same machine: the number of its GPU."""
    count: int


def this_rank() -> Rank:
    """This process's; the only one where no launcher said otherwise."""
    index, local, count = (int(os.environ.get(name, default)) for name, default in _LAUNCHED)
    return Rank(index, local, count)


_LAUNCHED = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))


class MeshError(ValueError):
    """Processes that cannot be arranged as they were asked to; a fact of the launch, the same in all of them."""


@dataclass(frozen=True)
class Mesh:
    """How the processes of a run share the memory of training: `replicate` groups of `shard` times `tensor` each.

    A group holds the weights, their gradients and moments once, a part in each process; groups hold the same.
    """

    replicate: int
    shard: int
    context: int = 1
    """So many neighbours of a group compute a micro-batch together, each a part of its tokens; the others their own."""
    tensor: int = 1
    """So many neighbours compute a micro-batch together, each a part of every layer (model/trained_split.py)."""
    reshards: bool = True
    """Whether a layer's weights are freed between forward and backward, and gathered anew."""
    recomputes: bool = False
    """Whether the launcher asks for activation checkpointing, whatever the recipe says."""

    @property
    def is_whole(self) -> bool:
        """Whether every process has all of the model."""
        return self.shard == self.tensor == 1

    @property
    def together(self) -> int:
        """Processes that compute a micro-batch together."""
        return self.context * self.tensor

    @property
    def undivided(self) -> "Mesh":
        """As many shares, all of whole layers."""
        return replace(self, shard=self.shard * self.tensor, tensor=1)


def training_mesh(shard: int | None, environment: Mapping[str, str] = os.environ) -> Mesh:
    """The mesh of this run: a recipe's number of processes that share one copy, else what the launcher asks for.

    That is accelerate's FSDP configuration, handed down in the environment; without one every process has a copy of its
    own. Raises MeshError for what the processes do not divide into, or potstill does not do.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    is_sharded, context, tensor = _is_on(environment, "ACCELERATE_USE_FSDP"), *_asked_together(environment)
    for name, size in (("cp_size", context), ("tp_size", tensor)):
        if size > 1 and (shard is not None or not is_sharded):
            advice = "leave dp_shard_size out of the recipe" if is_sharded else "set distributed_type to FSDP"
            raise MeshError(f"the launcher asks for {name} {size}, which goes with its own shards: {advice}")
    if shard is not None:
        return Mesh(_groups(world, shard, "dp_shard_size"), shard)
    if not is_sharded:
        return Mesh(world, 1)
    if _is_on(environment, "FSDP_OFFLOAD_PARAMS"):
        advice = "set it to false; the optimizer paged_adamw keeps moments in host memory"
        raise MeshError(f"the launcher asks for fsdp_offload_params, which potstill does not do: {advice}")
    asked = _asked_sizes(environment, world)
    return Mesh(
        _groups(world, asked * tensor, "the launcher's FSDP configuration"),
        asked,
        context,
        tensor,
        reshards=environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() not in _KEEPS,
        recomputes=_is_on(environment, "FSDP_ACTIVATION_CHECKPOINTING"),
    )


_KEEPS = ("false", "shard_grad_op", "hybrid_shard_zero2", "no_shard")
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""accelerate numbers them from 1."""


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")


def _asked_together(environment: Mapping[str, str]) -> tuple[int, int]:
    """Among how many processes accelerate's configuration divides the tokens of a batch, and each layer."""
    if not _is_on(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1, 1
    names = ("CP_SIZE", "TP_SIZE", "CP_COMM_STRATEGY")
    context, tensor, how = (environment.get(f"PARALLELISM_CONFIG_{name}") for name in names)
    if int(context or 1) > 1 and how not in (None, "allgather"):
        raise MeshError(f"the launcher asks for cp_comm_strategy {how}; keys and values are gathered: set allgather")
    if int(context or 1) > 1 and int(tensor or 1) > 1:
        raise MeshError(f"cp_size {context} and tp_size {tensor} do not go together: set one of them to 1")
    return int(context or 1), int(tensor or 1)


def _asked_sizes(environment: Mapping[str, str], world: int) -> int:
    """Over how many processes accelerate's configuration shards: those that divide tokens are among them."""
    if _is_on(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        names = ("DP_REPLICATE", "CP", "DP_SHARD", "TP", "SP")
        replicate, context, shard, tensor, sequence = (
            int(environment.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) for name in names
        )
        if sequence > 1:
            raise MeshError("training is sharded over data, context and tensor alone: set sp_size to 1")
        if (product := replicate * context * shard * tensor) != world:
            sizes = f"dp_replicate_size {replicate} times cp_size {context} times dp_shard_size {shard}"
            sizes += f" times tp_size {tensor}" if tensor > 1 else ""
            raise MeshError(f"{sizes} is {product}, but {world} processes were started")
        return context * shard
    strategy = environment.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    strategy = _STRATEGIES[int(strategy) - 1] if strategy in ("1", "2", "3", "4", "5") else strategy
    if environment.get("FSDP_VERSION", "1") == "2" or strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return world
    return 1 if strategy == "NO_SHARD" else int(environment.get("LOCAL_WORLD_SIZE", world))


def _groups(world: int, shard: int, who: str) -> int:
    if world % shard:
        raise MeshError(f"{who} asks for shards over {shard} processes, which does not divide the {world} that run")
    return world // shard


def has_gpu() -> bool:
    """Whether computation goes to a GPU where nobody says otherwise; a launcher can ask for the CPU."""
    import torch

    asks_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    return torch.cuda.is_available() and not asks_for_cpu


def gpus() -> list[Any]:
    """Properties of every GPU of this machine: `name`, `total_memory` and so on."""
    import torch

    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def choose_device(name: str = "auto") -> "torch.device":
    """The device of that name; `auto` is this process's GPU, or the CPU without one.

    A GPU with a number becomes the current one: kernels are launched on the current device, wherever their tensors
    are. Raises ValueError for what is no device or is not there.
    """
    import torch

    if name == "auto":
        rank = this_rank()
        name = "cpu" if not has_gpu() else "cuda" if rank.count == 1 else f"cuda:{rank.local}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f'device must be "auto", "cpu" or "cuda", not {name!r}') from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs for torch")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, device: "torch.device") -> "torch.dtype":
    """The dtype of that name; `auto` is bf16 where the device multiplies it fast, else fp32. Raises ValueError."""
    import torch

    if name == "auto":
        return training_dtype("bf16", on_gpu=device.type == "cuda")
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, not {name!r}")
    return getattr(torch, name)


def training_dtype(precision: str, *, on_gpu: bool) -> "torch.dtype":
    """What matrix products are in at this precision, "bf16" or "fp32".

    A CPU without bf16 instructions takes up to eighty times as long in bf16, so there it is fp32 either way.
    """
    import torch

    fast = on_gpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if precision == "bf16" and fast else torch.float32
