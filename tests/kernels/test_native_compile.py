"""Every kernel compiles for an H100 and for the smallest GPU, there in fp32 too, some for an A100, and fits into its
shared memory: no GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_compile import MOST_SHARED_BYTES

KERNELS = {
    "around": {
        "rms_norm._forward_kernel", "rms_norm._backward_kernel", "swiglu._forward_kernel", "swiglu._backward_kernel",
        "rotary._rotary_kernel", "rotary_write._rotate_and_write_kernel", "write_pages._write_kernel",
    },
    "flash": {"flash._forward_kernel", "flash._grad_queries_kernel", "flash._grad_keys_kernel"},
    "hopper": {"_flash_hopper._forward_kernel", "_flash_hopper_backward._backward_kernel"},
    "lora": {"lora._shrink_kernel", "lora._expand_kernel", "quantized._product_kernel"},
    "losses": {
        "linear_cross_entropy._statistics_kernel", "linear_cross_entropy._gradient_kernel",
        "linear_distillation._statistics_kernel", "linear_distillation._divergence_kernel",
    },
    "optimizer": {"adamw_8bit._update_kernel"},
    "paged": {"paged._attend_kernel"},
    "quantized": {"quantized._product_kernel", "quantized._grad_input_kernel", "quantized._expand_kernel"},
    "sampling": {
        "random._fill_kernel", "_thresholds._extremes_kernel", "_thresholds._narrow_kernel", "sample._kept_mass_kernel",
        "sample._probabilities_kernel", "sample._race_kernel", "sample._draw_kernel",
        "logit_adjustments._adjust_kernel", "token_logprobs._logprobs_kernel", "verification._walk_kernel",
        "verification._next_token_kernel", "ngram._ngram_kernel",
    },
    "routing": {
        "token_routing._select_kernel", "token_routing._gather_kernel", "token_routing._add_kernel",
        "token_routing._add_backward_kernel", "visible_slots._list_slots_kernel", "_paged_plan._count_kernel",
        "_paged_plan._list_kernel", "paged._attend_kernel", "paged._merge_kernel",
        "leading_rows._leading_rows_kernel",
    },
}  # fmt: skip

QUICKLY = {"DISABLE_PTXAS_OPT": "1", "DISABLE_LLVM_OPT": "1", "TRITON_DISABLE_LINE_INFO": "1"}
"""Machine code without the optimizations of LLVM and ptxas and without line numbers: half of the time goes there, and
nothing that is checked here depends on them. Triton lays out shared memory before."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "capability"),
    [("around optimizer", 90), ("flash hopper", 90), ("lora", 90), ("losses sampling routing", 90), ("paged", 90),
     ("quantized", 90), ("quantized lora flash flash:float32 sampling routing", 80),
     ("quantized quantized:float32", 89), ("flash flash:float32 sampling routing", 89),
     ("paged paged:float32", 89), ("around around:float32 optimizer", 89), ("lora lora:float32", 89),
     ("losses losses:float32", 89)],
)  # fmt: skip
def test_kernels_compile(groups: str, capability: int, tmp_path: Path) -> None:
    environment = os.environ | QUICKLY | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.native_compile", str(capability), *groups.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    expected = set().union(*(KERNELS[group.partition(":")[0]] for group in groups.split()))
    assert {".".join(kernel["name"].split()[0].split(".")[-2:]) for kernel in kernels} >= expected
    assert [kernel for kernel in kernels if kernel["shared_bytes"] > MOST_SHARED_BYTES[capability]] == []
