"""Every kernel compiles for an H100 and for the smallest GPU, there in fp32, and fits into its shared memory.

No GPU is needed for that. What is missing here is compiled with all optimizations where its machine code is read, and
must fit there too: packed attention for an A100 and the smallest GPU and in Gluon (test_flash_tiles.py,
test_flash_hopper.py), quantized products of every class for an H100 and an A100 and in fp32 (test_quantized_pairs.py).
Kernels without products of matrices are the same code for every GPU since the A100.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.native_compile import FLOATS_IN_FP64, ONLY_PTX, compile_alone

QUICKLY = {"DISABLE_PTXAS_OPT": "1", "DISABLE_LLVM_OPT": "1", "TRITON_DISABLE_LINE_INFO": "1"}
"""Machine code without the optimizations of LLVM and ptxas and without line numbers: half of the time goes there, and
nothing that is checked here depends on them. Triton lays out shared memory before."""


FAMILIES = {
    "around": ["attention"],
    "flash": ["attention"],
    "lora": ["linear"],
    "losses": ["losses"],
    "optimizer": [],
    "paged": ["attention"],
    "products": ["linear"],
    "routing": ["attention", "linear"],
    "sampling": ["sampling"],
}
"""Folders of kernels that a group compiles, besides the kernels that stand in none."""


def compiled(groups: str, capability: int) -> Any:
    families = {family for group in groups.split() for family in FAMILIES[group.partition(":")[0]]}
    return pytest.param(groups, capability, marks=pytest.mark.machine_code(*sorted(families)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "capability"),
    [
        compiled("around optimizer", 90),
        compiled("flash", 90),
        compiled("lora", 90),
        compiled("losses", 90),
        compiled("sampling routing", 90),
        compiled("paged", 90),
        compiled("products routing", 89),
        compiled("paged paged:float32", 89),
        compiled("around:float32 optimizer", 89),
        compiled("lora lora:float32", 89),
        compiled("losses losses:float32", 89),
    ],
)
def test_kernels_compile(groups: str, capability: int, tmp_path: Path) -> None:
    compile_alone(capability, groups.split(), tmp_path, **QUICKLY)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "capability"), [compiled("around flash paged losses", 89)])
def test_floats_of_torch_compile_stay_numbers(groups: str, capability: int, tmp_path: Path) -> None:
    """torch.compile launches a kernel with floats in fp64: no tile may become fp64 by that."""
    compile_alone(capability, groups.split(), tmp_path, ONLY_PTX, FLOATS_IN_FP64, **QUICKLY)
    code = [line for file in tmp_path.glob("*/*.ttir") for line in file.read_text().splitlines()]
    wide = [line for line in code if "f64" in line and "tt.func" not in line]
    assert wide and all("arith.truncf" in line for line in wide), wide
