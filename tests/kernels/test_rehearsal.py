"""Kernels are compiled side by side before they are needed; no GPU is needed to see it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.interpreted import needs_triton


@needs_triton
def test_what_is_rehearsed_is_compiled_once_and_computes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.rehearsed"]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    first, again = found["noted"]
    assert first >= 3 and again == 0
    assert found["tokens"] == [[0] * 4] * 2
    assert f"compiled {first} of {first} kernels, 0 s left" in done.stderr
    assert len(list(tmp_path.rglob("*.cubin"))) == first
