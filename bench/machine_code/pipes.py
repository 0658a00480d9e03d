"""For how many cycles a loop keeps each part of a processor busy, counted from its instructions.

A processor ("SM") issues four instructions a cycle. Half as many integer operations, comparisons and selections get
through, a sixteenth as many exponentials and conversions in eight; shared memory moves 128 bytes. What a warp does once
for all its lanes (U…), jumps and barriers take issue slots alone. Rates of tensor cores and memory are those of data
sheets, divided by processors and clock.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Gpu:
    """One processor of it."""

    name: str
    products: dict[str, int]
    """Multiplications with addition in a cycle on tensor cores, by the first letter of the instruction: 16-bit floats
    (H), 8-bit floats (Q), integers (I)."""
    memory_bytes: float
    """Its share of what memory delivers in a cycle."""
    float_lanes: int
    shared_bytes: int
    most_warps: int
    most_programs: int

    def residents(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Programs that it holds at once. Registers come in pieces of 256 a warp, shared memory costs 1 KiB more."""
        warps = -(-threads // 32)
        by_registers = 65_536 // (-(-registers // 8) * 256) // warps
        by_memory = self.shared_bytes // (shared_bytes + 1024)
        return min(by_registers, by_memory, self.most_warps // warps, self.most_programs)


GPUS = {
    80: Gpu("A100", {"H": 1024, "I": 2048}, 13.4, 64, 164 * 1024, 64, 32),
    89: Gpu("RTX 4090", {"H": 256, "Q": 512, "I": 1024}, 3.1, 128, 100 * 1024, 48, 24),
    90: Gpu("H100", {"H": 2048, "Q": 4096, "I": 4096}, 13.9, 128, 228 * 1024, 64, 32),
}
"""By ten times the compute capability."""

_TENSOR = re.compile(r"(?:HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA)\.\w+")
_COPIES_LEFT = re.compile(r"DEPBAR\.LE SB0, 0x(\w+)")
_PRODUCTS_LEFT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)")
_ISSUE_ALONE = (
    "U", "LD", "ST", "RED", "ATOM", "BAR", "BRA", "BRX", "BSSY", "BSYNC", "CALL", "RET", "EXIT", "NOP", "DEPBAR",
    "MEMBAR", "FENCE", "ERRBAR", "CCTL", "WARP", "SYNCS", "ELECT", "HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA",
    "S2R", "CS2R", "R2UR", "SHFL",
)  # fmt: skip
_FLOAT = ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2")
_SPECIAL = ("MUFU", "I2F", "F2I", "F2F", "I2I", "FRND", "POPC")
_SHARED = ("LDS", "STS", "LDSM", "STSM", "LDGSTS", "SHFL", "ATOMS")


def pipe_cycles(lines: Sequence[str], warps: int, gpu: Gpu) -> dict[str, float]:
    """Cycles of each part for instructions that each of so many warps runs once."""
    names = [line.split()[0].split(".") for line in lines]
    kinds = [_kind(name[0]) for name in names]
    lanes = {kind: 32 * kinds.count(kind) for kind in set(kinds)}
    pipes = {
        "issue": len(names) / 4,
        "integer": lanes.get("integer", 0) / 64,
        "float": lanes.get("float", 0) / gpu.float_lanes + lanes.get("multiplied integer", 0) / 64,
        "special": lanes.get("special", 0) / 16,
        "shared": sum(map(_shared_cycles, lines)),
    }
    return {name: warps * cycles for name, cycles in pipes.items()}


def _kind(name: str) -> str:
    if name in _FLOAT:
        return "float"
    if name in _SPECIAL:
        return "special"
    if name == "IMAD":
        return "multiplied integer"
    return "other" if name.startswith(_ISSUE_ALONE) else "integer"


def _shared_cycles(line: str) -> float:
    """Of a warp's instruction: its bytes over 128, or what the tensor cores read for a product."""
    name = line.split()[0].split(".")
    if name[0] in ("LDSM", "STSM"):
        return float(name[-1]) if name[-1].isdigit() else 1.0
    if name[0] in _SHARED:
        return access_bits(line) / 32
    if name[0].endswith("GMMA"):
        _, columns, _ = map(int, name[1].split("x"))
        # Of four warps: 32 bytes a column, and as many a row unless those come from registers.
        return (columns / 4 + (16 if line.split(",")[1].strip().startswith("gdesc") else 0)) / 4
    return 0.0


def access_bits(line: str) -> int:
    """What each lane moves with an instruction of memory."""
    widths = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
    return max([widths[part] for part in line.split()[0].split(".") if part in widths], default=32)


def products_of(lines: Sequence[str], warps: int) -> dict[str, float]:
    """Multiplications on tensor cores by each kind of instruction, such as HGMMA.64x128x16, for so many warps."""
    found: dict[str, float] = {}
    for line in lines:
        if name := _TENSOR.match(line):
            shape = name[0].split(".")[1]
            # Four warps share an asynchronous product.
            each = prod(map(int, shape.split("x"))) / 4 if "x" in shape else _mma_products(shape)
            found[name[0]] = found.get(name[0], 0) + warps * each
    return found


def _mma_products(shape: str) -> int:
    """16816 is 16 × 8 × 16."""
    return 16 * 8 * int(shape[3:])


def tensor_cycles(products: dict[str, float], gpu: Gpu) -> float:
    """Of `products_of` a loop."""
    return sum(count / gpu.products[name[0]] for name, count in products.items())


def waits(lines: Sequence[str]) -> dict[str, list[int]]:
    """How many groups may be left after each wait, for copies and for asynchronous products, in order."""
    found: dict[str, list[int]] = {"copies": [], "products": []}
    for line in lines:
        if wait := _COPIES_LEFT.match(line):
            found["copies"].append(int(wait[1], 16))
        elif wait := _PRODUCTS_LEFT.match(line):
            found["products"].append(int(wait[1], 16))
    return found


def overlapped_exponentials(loop: Sequence[str]) -> tuple[int, int]:
    """How many exponentials of a loop run while asynchronous products do, and how many there are."""
    running, are_beside = 0, list[bool]()
    for line in (*loop, *loop):  # what one round leaves running, the next begins with
        if "GMMA" in line and "gsb0" in line:
            running += 1
        elif wait := _PRODUCTS_LEFT.match(line):
            running = min(running, int(wait[1], 16))
        elif line.startswith("MUFU.EX2"):
            are_beside.append(running > 0)
    second_round = are_beside[len(are_beside) // 2 :]
    return sum(second_round), len(second_round)
