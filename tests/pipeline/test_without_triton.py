"""Where Triton has no wheel nothing is missing but the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.common.triton import NoLanguage, NoTriton
from tests.interpreted import needs_triton

KINDS = "import_model pretrain gqa mod distill sft qlora quantize evaluate"


@pytest.mark.slow
def test_all_imports_each_kind_of_stage_and_serving(tmp_path: Path) -> None:
    """`tests.without_triton` blocks its import; kernels are not interpreted there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.without_triton", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    modules, *_, kinds, exact, rounded, has_triton = done.stdout.splitlines()
    assert int(modules.split()[0]) > 300
    assert kinds == KINDS and exact == rounded == "4 tokens" and has_triton == "False"


@needs_triton
def test_triton_is_imported_by_nobody_who_has_no_use_for_it() -> None:
    """It takes a tenth of the time to start. Who says how kernels run, asks for it."""
    code = "import sys, serve.llm; print('triton' in sys.modules)"
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for more, expected in (({}, "False"), ({"TRITON_INTERPRET": "0"}, "True")):
        done = subprocess.run([sys.executable, "-c", code], env=plain | more, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr


def test_a_kernel_without_triton_says_so() -> None:
    triton, tl = NoTriton(), NoLanguage()

    @triton.jit
    def _first_kernel(p_x, SIZE: tl.constexpr):
        pass

    @triton.jit(do_not_specialize=["size"])
    def _second_kernel(p_x, size):
        pass

    for kernel in (_first_kernel, _second_kernel):
        with pytest.raises(RuntimeError, match=f"{kernel.__name__} is a Triton kernel, and Triton is not there"):
            kernel[(1,)](None, 3)
    assert triton.cdiv(9, 4) == 3 and triton.cdiv(8, 4) == 2
    assert [triton.next_power_of_2(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
