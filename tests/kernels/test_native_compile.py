"""Every kernel compiles for an H100 and for the smallest GPU, there in fp32, and fits into its shared memory.

No GPU is needed for that. What is missing here is compiled with all optimizations where its machine code is read, and
must fit there too: packed attention for an A100 and the smallest GPU and in Gluon (test_flash_tiles.py,
test_flash_hopper.py), quantized products of every class for an H100 and an A100 and in fp32 (test_quantized_pairs.py).
Kernels without products of matrices are the same code for every GPU since the A100.
"""

from pathlib import Path

import pytest

from tests.native_compile import compile_alone

QUICKLY = {"DISABLE_PTXAS_OPT": "1", "DISABLE_LLVM_OPT": "1", "TRITON_DISABLE_LINE_INFO": "1"}
"""Machine code without the optimizations of LLVM and ptxas and without line numbers: half of the time goes there, and
nothing that is checked here depends on them. Triton lays out shared memory before."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "capability"),
    [("around optimizer", 90), ("flash", 90), ("lora", 90), ("losses sampling routing", 90), ("paged", 90),
     ("products routing", 89), ("paged paged:float32", 89), ("around:float32 optimizer", 89),
     ("lora lora:float32", 89), ("losses losses:float32", 89)],
)  # fmt: skip
def test_kernels_compile(groups: str, capability: int, tmp_path: Path) -> None:
    compile_alone(capability, groups.split(), tmp_path, **QUICKLY)
