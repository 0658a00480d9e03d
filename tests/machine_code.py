"""What the compiler made of kernels, for a GPU that is not there: their PTX, their machine code, its inner loops."""

import os
import re
import subprocess
import sys
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def ptx_of(capability: int, group: str, cache: Path) -> dict[str, str]:
    """PTX of all that a group of `tests.native_compile` compiles, by the kernel's name and a number."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.native_compile", str(capability), group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted(cache.glob("*/*.ptx"))
    return {f"{file.stem} {number}": file.read_text() for number, file in enumerate(files)}


def assemble(ptx: str, capability: int, folder: Path) -> str:
    """Write kernel.cubin into the folder; returns what the assembler says of registers, spills and lost time."""
    (folder / "kernel.ptx").write_text(ptx)
    architecture = "sm_90a" if capability == 90 else f"sm_{capability}"
    command = [TOOLS / "ptxas", "-v", f"--gpu-name={architecture}", "kernel.ptx", "-o", "kernel.cubin"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr


def inner_loops(folder: Path) -> list[list[str]]:
    """Instructions of each loop of kernel.cubin that holds no other loop."""
    command = [TOOLS / "nvdisasm", "-c", "kernel.cubin"]
    text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?(.*?);", line):
            target = re.search(r"BRA.*`\((\.L_\w+)\)", instruction[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
            instructions.append(instruction[1])
    innermost = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [instructions[first : last + 1] for first, last in innermost]
