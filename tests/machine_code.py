"""What the compiler made of kernels, for a GPU that is not there: their PTX, their machine code, its inner loops."""

import os
import re
import subprocess
import sys
from collections import Counter
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


def instructions(folder: Path) -> list[str]:
    """All of kernel.cubin."""
    return _disassemble(folder)[0]


def inner_loops(folder: Path) -> list[list[str]]:
    """Instructions of each loop of kernel.cubin that holds no other loop."""
    instructions, loops = _disassemble(folder)
    innermost = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [instructions[first : last + 1] for first, last in innermost]


def _disassemble(folder: Path) -> tuple[list[str], list[tuple[int, int]]]:
    """Instructions, and the first and the last of each loop."""
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
    return instructions, loops


def pipe_cycles(loop: list[str], warps: int) -> dict[str, float]:
    """Cycles for which one round of a loop, run by `warps` warps, keeps each part of a Hopper SM busy.

    Four instructions issue in a cycle. Integer operations have 64 lanes; floating point has 128, but 64 for what
    multiplies integers (IMAD) there; shared memory moves 128 bytes. Matrix products and what a warp does once for all
    its lanes (U…) take issue slots alone.
    """
    names = [line.split()[0].split(".") for line in loop]
    lanes = Counter(_lanes_of(name[0]) for name in names)
    words = {"64": 2, "128": 4}
    shared = sum(max([words.get(part, 1) for part in name]) for name in names if name[0] in ("LDS", "STS", "LDGSTS"))
    pipes = {"issue": len(loop) / 4, "integer": lanes["integer"] / 2, "shared": float(shared)}
    return {
        name: warps * cycles for name, cycles in (pipes | {"float": lanes["float"] / 4 + lanes["imad"] / 2}).items()
    }


_OTHERS = (
    "U", "LD", "ST", "BAR", "BRA", "DEPBAR", "MEMBAR", "FENCE", "WARP", "HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA",
    "S2R", "NOP", "EXIT",
)  # fmt: skip


def _lanes_of(name: str) -> str:
    if name == "IMAD":
        return "imad"
    if name in ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"):
        return "float"
    return "other" if name.startswith(_OTHERS) else "integer"
