"""Devices and ranks: chosen in one place, and a numbered GPU becomes the current one."""

import re
from pathlib import Path

import pytest
import torch

from model.mesh import Rank, choose_device, choose_dtype, has_gpu, this_rank, training_dtype

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
