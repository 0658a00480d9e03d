"""Devices and ranks: chosen in one place, and a numbered GPU becomes the current one."""

import re
from pathlib import Path

import pytest
import torch

from model.mesh import (
    Mesh,
    MeshError,
    Rank,
    choose_device,
    choose_dtype,
    has_gpu,
    this_rank,
    training_dtype,
    training_mesh,
)

ROOT = Path(__file__).resolve().parents[2]
CHOICES = re.compile(
    r"""torch\.device\((?!"(cpu|meta)"\))   # from a name
    | cuda\.(is_available|set_device|device_count)
    | environ.*(RANK|WORLD_SIZE|ACCELERATE_) | "(LOCAL_)?RANK" | "WORLD_SIZE"
    """,
    re.VERBOSE,
)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A stand-in for a machine with two GPUs; what is made the current one ends up in the list."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_a_numbered_gpu_becomes_the_current_one(two_gpus: list[torch.device]) -> None:
    """Kernels are launched on the current device, wherever their tensors are."""
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert two_gpus == [torch.device("cuda", 1)]


def test_without_a_number_the_current_gpu_stays(two_gpus: list[torch.device]) -> None:
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")
    assert two_gpus == []


def test_an_engine_on_a_numbered_gpu_makes_it_current_before_anything_is_loaded(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import serve.engine.loading
    from serve.config import EngineConfig

    def load(*_: object, device: torch.device, **__: object) -> None:
        assert two_gpus == [device] == [torch.device("cuda", 1)]
        raise InterruptedError

    monkeypatch.setattr(serve.engine.loading, "load_model", load)
    with pytest.raises(InterruptedError):
        serve.engine.loading.load_models(EngineConfig(str(tmp_path), device="cuda:1"))


def test_each_launched_process_has_its_own_gpu(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert this_rank() == Rank(index=3, local=1, count=4)
    assert choose_device() == torch.device("cuda", 1) and two_gpus == [torch.device("cuda", 1)]


def test_a_launcher_can_ask_for_the_cpu(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert not has_gpu() and choose_device() == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:2", "cuda:7"])
def test_a_device_that_is_not_there_is_one_sentence(two_gpus: list[torch.device], name: str) -> None:
    with pytest.raises(ValueError, match="device ") as caught:
        choose_device(name)
    assert name in str(caught.value) and "\n" not in str(caught.value) and two_gpus == []


def test_dtypes_by_name() -> None:
    assert choose_dtype("float16", torch.device("cpu")) == torch.float16
    assert choose_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ValueError, match="dtype must be auto, float32, bfloat16, float16"):
        choose_dtype("int8", torch.device("cpu"))


@pytest.mark.parametrize("name", ["_is_avx512_bf16_supported", "_is_amx_tile_supported"])
def test_products_are_in_bf16_where_the_device_has_instructions_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    for feature in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, feature, lambda: False)
    assert choose_dtype("auto", cpu) == training_dtype("bf16", on_gpu=False) == torch.float32
    assert training_dtype("bf16", on_gpu=True) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, name, lambda: True)
    assert choose_dtype("auto", cpu) == training_dtype("bf16", on_gpu=False) == torch.bfloat16
    assert training_dtype("fp32", on_gpu=False) == training_dtype("fp32", on_gpu=True) == torch.float32


def test_nobody_else_chooses_a_device_or_reads_a_rank() -> None:
    for room in ("kernels", "model", "compress", "train", "serve", "pipeline"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if path != ROOT / "model" / "mesh.py":
                found = [line for line in path.read_text().splitlines() if CHOICES.search(line)]
                assert not found, f"{path.relative_to(ROOT)} leaves model/mesh.py out: {found[0].strip()}"


LAUNCH_FILES = {
    "multi_gpu": Mesh(8, 1),
    "fsdp": Mesh(1, 8),
    "multi_node_fsdp": Mesh(2, 8),
    "fsdp_context": Mesh(1, 8, 4, recomputes=True),
    "fsdp_tensor": Mesh(1, 4, tensor=2),
}


def test_processes_that_divide_tokens_hold_the_weights_together_too() -> None:
    environment = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "WORLD_SIZE": "8"}
    sizes = {f"PARALLELISM_CONFIG_{name}_SIZE": "2" for name in ("DP_REPLICATE", "DP_SHARD", "CP")}
    assert training_mesh(None, environment | sizes) == Mesh(2, 4, 2)


@pytest.mark.parametrize("name", LAUNCH_FILES)
def test_the_mesh_is_what_the_launch_file_asks_for(name: str) -> None:
    """By the environment that accelerate's own launcher makes of the file."""
    assert training_mesh(None, launched(name)) == LAUNCH_FILES[name]


def launched(name: str, *words: str) -> dict[str, str]:
    """What a process finds that `accelerate launch` starts."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = str(ROOT / "configs" / "accelerate" / f"{name}.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", file, "--main_process_port", "0", *words, "x"])
    arguments, *_ = _validate_launch_command(arguments)
    world = arguments.num_processes
    return prepare_multi_gpu_env(arguments) | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "8"}


def test_what_the_launcher_asks_for_beside_the_sizes_is_done() -> None:
    sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert training_mesh(None, sharded | {"FSDP_SHARDING_STRATEGY": "4"}) == Mesh(2, 2)
    assert training_mesh(None, sharded | {"FSDP_SHARDING_STRATEGY": "NO_SHARD"}) == Mesh(4, 1)
    changes = {"FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    assert training_mesh(None, sharded | changes) == Mesh(1, 4, reshards=False, recomputes=True)
    assert training_mesh(2, sharded) == Mesh(2, 2), "the recipe knows better"
    assert training_mesh(4, {"WORLD_SIZE": "4"}) == Mesh(1, 4), "torchrun asks for nothing"
    assert training_mesh(None, {"WORLD_SIZE": "4"}) == Mesh(4, 1)


@pytest.mark.parametrize(
    ("shard", "environment", "sentence"),
    [
        (3, {}, "dp_shard_size asks for shards over 3 processes, which does not divide the 4 that run"),
        (None, {"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params, which potstill does not do: set it to false"),
        (None, {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "3"}, "dp_shard_size 3 is 3, but 4 processes were started"),
        (None, {"PARALLELISM_CONFIG_SP_SIZE": "2"}, "set sp_size to 1"),
        (
            None,
            {"PARALLELISM_CONFIG_TP_SIZE": "3"},
            "dp_shard_size 1 times tp_size 3 is 3, but 4 processes were started",
        ),
        (
            None,
            {"PARALLELISM_CONFIG_CP_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "2"},
            "cp_size 2 and tp_size 2 do not go together: set one of them to 1",
        ),
        (4, {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size 2, which goes with its own shards: leave dp_shard_size out"),
        (
            None,
            {"PARALLELISM_CONFIG_CP_SIZE": "3"},
            "cp_size 3 times dp_shard_size 1 is 3, but 4 processes were started",
        ),
        (
            None,
            {"PARALLELISM_CONFIG_CP_SIZE": "4", "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"},
            "cp_comm_strategy alltoall; keys and values are gathered: set allgather",
        ),
        (4, {"PARALLELISM_CONFIG_CP_SIZE": "2"}, "leave dp_shard_size out of the recipe"),
        (None, {"PARALLELISM_CONFIG_CP_SIZE": "4", "ACCELERATE_USE_FSDP": "false"}, "set distributed_type to FSDP"),
    ],
)
def test_processes_that_do_not_fit_the_mesh_are_one_sentence(
    shard: int | None, environment: dict[str, str], sentence: str
) -> None:
    known = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "4"}
    if any(name.startswith("PARALLELISM") for name in environment):
        known |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    with pytest.raises(MeshError, match=sentence):
        training_mesh(shard, known | environment)
