"""Tiles of flash attention by GPU: they fit its shared memory, and the loops that take the time keep to registers."""

from pathlib import Path

import pytest
import torch

from bench.machine_code.measure import measure_cases
from bench.machine_code.program import assemble
from kernels.attention import _flash_tiles as cut
from tests.native_compile import ptx_of

MOST_SPILLS = 0.06
"""Of a step's instructions: reads and writes of registers that did not fit. Most steps have none."""


@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_the_next_larger_memory_has_tiles_of_its_own(monkeypatch: pytest.MonkeyPatch, d: int) -> None:
    found = []
    for kib in (99, 163, 227):
        monkeypatch.setattr(cut, "shared_memory_bytes", lambda device, kib=kib: kib * 1024)
        found.append(cut.choose_tiles(d, torch.bfloat16, torch.device("cpu")))
        monkeypatch.setattr(cut, "shared_memory_bytes", lambda device, kib=kib: (kib + 60) * 1024)
        assert cut.choose_tiles(d, torch.bfloat16, torch.device("cpu")) == found[-1]
    assert len(set(found)) == 3


def test_a_triton_without_gluon_keeps_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cut, "is_interpreted", lambda x: False)
    assert cut.for_hopper(torch.empty(0), "_flash_hopper") is not None
    with caplog.at_level("INFO"):
        assert [cut.for_hopper(torch.empty(0), "_of_another_triton") for _ in range(2)] == [None, None]
    assert len(caplog.records) == 1
    monkeypatch.setattr(cut, "compute_capability", lambda device: (10, 0))
    assert cut.for_hopper(torch.empty(0), "_flash_hopper") is None


@pytest.mark.machine_code("attention")
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "group"), [(80, "flash"), (89, "flash"), (89, "flash:float32")])
def test_inner_loops_spill_next_to_nothing(capability: int, group: str, tmp_path: Path) -> None:
    for name, ptx in ptx_of(capability, group, tmp_path).items():
        if "plan" in name:
            continue
        for loop in assemble(ptx, capability).loops:
            if any("MMA" in line for line in loop) or "float32" in group:
                spills = sum(line.startswith(("STL", "LDL")) for line in loop)
                assert spills <= MOST_SPILLS * len(loop), f"{name}: {spills} of {len(loop)}"


@pytest.mark.machine_code("attention")
@pytest.mark.slow
def test_an_a100_multiplies_for_longer_than_anything_else_takes() -> None:
    """Counted from machine code, by pipe: its shared memory, above all, keeps up with its tensor cores."""
    for found in measure_cases(80, ["flash, d 64", "flash, d 128"]):
        assert found.bound == "tensor" and found.misses() == []
