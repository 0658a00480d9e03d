"""One kernel's machine code, measured and held against the goals of its case."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.machine_code.cases import CASES, Case
from bench.machine_code.compiled import Compiled, compile_cases
from bench.machine_code.pipes import (
    GPUS,
    Gpu,
    access_bits,
    overlapped_exponentials,
    pipe_cycles,
    products_of,
    tensor_cycles,
    waits,
)
from bench.machine_code.program import Program, assemble

_LOADS = ("LDG.", "LDGSTS.")
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Measured:
    """A case on one GPU. Cycles are those of a round of the main loop, or of a program that has none."""

    case: str
    capability: int
    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    spills_in_loop: int
    """Instructions that write or read spilled registers."""
    shared_bytes: int
    residents: int
    """Programs that a processor holds at once."""
    moves_registers: bool
    """Whether groups of warps hand registers to each other (setmaxnreg)."""
    serializes_products: bool
    """Whether the assembler made asynchronous products wait for each other."""
    tensor: list[str]
    """Instructions for tensor cores."""
    load_bits: dict[str, int]
    """How many loads from global memory move how many bits a thread, or "tiles" by TMA."""
    waits: dict[str, list[int]]
    """How many groups may be left after each wait, for copies and for products."""
    exponentials: tuple[int, int]
    """How many run beside asynchronous products, and how many there are."""
    loop_instructions: int
    """0: there is no loop."""
    cycles: dict[str, float]
    """By pipe; and those in which tensor cores and memory do what they must, at their full rates."""

    @property
    def bound(self) -> str | None:
        """What should take the time."""
        worst = max(("tensor", "memory"), key=self.cycles.__getitem__)
        return worst if self.cycles[worst] else None

    @property
    def busiest(self) -> str:
        """The part that is busy for longest beside tensor cores and memory."""
        return max((name for name in self.cycles if name not in ("tensor", "memory")), key=self.cycles.__getitem__)

    @property
    def ratio(self) -> float | None:
        """Of the busiest part to the bound; with a product that follows, of both together to the product."""
        if self.bound is None:
            return None
        case = BY_NAME[self.case]
        busy = self.cycles[self.busiest]
        if case.product_rows:
            return 1 + max(busy, self.cycles["memory"]) / self.cycles["tensor"]
        return busy / self.cycles[self.bound]

    def misses(self) -> list[str]:
        """The goals that are not met."""
        case, gpu = BY_NAME[self.case], GPUS[self.capability]
        most, ratio = case.most_ratio.get(self.capability), self.ratio
        beside, exponentials = self.exponentials
        misses = {
            f"{ratio or 0:.2f} of {self.bound} cycles, not {most}": most and (ratio is None or ratio > most),
            f"spills {self.spill_bytes} bytes": case.keeps_registers and (self.spill_bytes or self.stack_bytes),
            f"{self.shared_bytes / 1024:.0f} KiB of shared memory": self.shared_bytes > gpu.shared_bytes - 1024,
            f"{beside} of {exponentials} exponentials beside products": case.overlaps and beside < exponentials / 2,
            "no registers are moved": case.overlaps and not self.moves_registers,
        }
        return [text for text, is_missed in misses.items() if is_missed]

    def as_json(self) -> dict[str, Any]:
        rounded = {name: round(cycles, 1) for name, cycles in self.cycles.items()}
        ratio = None if self.ratio is None else round(self.ratio, 3)
        goal = BY_NAME[self.case].most_ratio.get(self.capability)
        more = {"bound": self.bound, "busiest": self.busiest, "ratio": ratio, "goal": goal, "misses": self.misses()}
        return asdict(self) | {"cycles": rounded} | more


def measure_cases(capability: int, names: Sequence[str] = ()) -> Iterator[Measured]:
    """All cases of a GPU, or those of these names, each as soon as it is there."""
    for compiled in compile_cases(capability, names):
        yield measure(compiled, capability)


def measure(compiled: Compiled, capability: int) -> Measured:
    case, gpu = BY_NAME[compiled.case], GPUS[capability]
    program, warps = assemble(compiled.ptx, capability), compiled.loop_warps
    loop = _main_loop(program, warps)
    lines = loop or program.instructions
    products = products_of(lines, warps)
    return Measured(
        case=case.name,
        capability=capability,
        kernel=case.kernel,
        registers=program.registers,
        spill_bytes=program.spill_bytes,
        stack_bytes=program.stack_bytes,
        spills_in_loop=sum(line.startswith(("STL", "LDL")) for line in loop),
        shared_bytes=compiled.shared_bytes,
        residents=gpu.residents(32 * compiled.num_warps, program.registers, compiled.shared_bytes),
        moves_registers=compiled.parts_warps,
        serializes_products=program.serializes_products,
        tensor=sorted(products),
        load_bits=_load_bits(program.instructions if compiled.parts_warps else lines),
        waits=waits(lines),
        exponentials=overlapped_exponentials(loop),
        loop_instructions=len(loop),
        cycles=pipe_cycles(lines, warps, gpu) | _bounds(case, compiled, products, gpu),
    )


def _main_loop(program: Program, warps: int) -> list[str]:
    """The loop of most products, else of most loads; of several the shortest: others treat the edges besides."""

    def worth(loop: list[str]) -> tuple[float, int, int, int]:
        products = sum(products_of(loop, warps).values())
        multiplied = sum(line.startswith("FFMA") for line in loop)
        loads = sum(access_bits(line) for line in loop if line.startswith(_LOADS))
        return products, multiplied, loads, -len(loop)

    found = [loop for loop in program.loops if any(line.startswith(_LOADS) or "GMMA" in line for line in loop)]
    return max(found, key=worth, default=[])


def _bounds(case: Case, compiled: Compiled, products: dict[str, float], gpu: Gpu) -> dict[str, float]:
    constants, made = compiled.constants, sum(products.values())
    read = case.bytes_read(constants, made) if case.bytes_read else 0.0
    tensor = tensor_cycles(products, gpu)
    if case.product_rows:
        tensor = case.product_rows * constants["OUTPUTS"] * constants["TILE"] / gpu.products["H"]
    return {"tensor": tensor, "memory": read / gpu.memory_bytes}


def _load_bits(lines: Sequence[str]) -> dict[str, int]:
    loads = Counter(str(access_bits(line)) for line in lines if line.startswith(_LOADS))
    loads["tiles"] = sum(line.startswith("UTMALDG") for line in lines)
    return {bits: count for bits, count in loads.items() if count}
