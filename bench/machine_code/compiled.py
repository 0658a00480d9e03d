"""The kernels of cases, compiled down to PTX: for the process that does it and for the one that reads it.

`python -m bench.machine_code.compiled 90 FOLDER [CASE…]` needs a process of its own: where Triton interprets, it cannot
compile.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Compiled:
    """The kernel of a case for one GPU."""

    case: str
    ptx: str
    constants: dict[str, Any]
    num_warps: int
    shared_bytes: int

    @property
    def parts_warps(self) -> bool:
        """Whether registers move between groups of warps that do different things."""
        return "setmaxnreg" in self.ptx

    @property
    def loop_warps(self) -> int:
        """Warps that run a loop together."""
        return 4 if self.parts_warps else self.num_warps


def compile_cases(capability: int, names: Sequence[str] = ()) -> Iterator[Compiled]:
    """All cases of a GPU, or those of these names, each as soon as it is there."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, str(capability), *names]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield Compiled(**json.loads(line))
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed")


def main(capability: int, names: Sequence[str]) -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    from bench.machine_code.cases import CASES
    from tests.native_compile import compile_instead_of_launching

    launched = compile_instead_of_launching(capability)
    CUDABackend.make_cubin = lambda *args: b""  # who reads the PTX assembles it
    for case in CASES:
        if capability in case.gpus and (case.name in names or not names):
            launched.clear()
            case.call()
            print(json.dumps(asdict(_the_kernel_of(case, launched))), flush=True)


def _the_kernel_of(case: Any, launched: dict[str, Any]) -> Compiled:
    found = []
    for name, kernel in launched.items():
        arguments = kernel.src.fn.arg_names
        constants = {arguments[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}
        if name.split()[0].endswith(f".{case.kernel}") and case.constants.items() <= constants.items():
            plain = {key: value for key, value in constants.items() if isinstance(value, int | str)}
            metadata = kernel.metadata
            found.append(Compiled(case.name, kernel.asm["ptx"], plain, metadata.num_warps, metadata.shared))
    if len(found) != 1:
        raise SystemExit(f"{case.name}: {len(found)} of {sorted(launched)} are {case.kernel}")
    return found[0]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
