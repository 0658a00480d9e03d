"""A kernel's machine code: what the assembler says of it, its instructions, and its inner loops.

Loops come from the graph of jumps, not from where instructions lie: a wait for a barrier is a loop of its own, whose
slow part stands at the end of the code and jumps back over everything between.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
OPTIONS = ("-v", "--regAllocOptLevel=2")
"""Of the assembler, as Triton calls it."""
_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"(\.L_\w+):")
_ENDS = ("EXIT", "RET", "KILL")


@dataclass(frozen=True)
class Program:
    """A kernel for one GPU. It is disassembled when somebody looks inside."""

    report: str
    """What the assembler said."""
    machine_code: bytes

    @cached_property
    def instructions(self) -> list[str]:
        return instructions(self._disassembly)

    @cached_property
    def loops(self) -> list[list[str]]:
        """The instructions of each loop that holds no other, waits for barriers left aside."""
        return inner_loops(self._disassembly)

    @cached_property
    def _disassembly(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "kernel.cubin").write_bytes(self.machine_code)
            return _run(["nvdisasm", "-c", "kernel.cubin"], folder)

    @property
    def registers(self) -> int:
        """Of a thread, as launched."""
        return self._number(r"Used (\d+) registers")

    @property
    def stack_bytes(self) -> int:
        return self._number(r"(\d+) bytes stack frame")

    @property
    def spill_bytes(self) -> int:
        """Of a thread, written and read."""
        return self._number(r"(\d+) bytes spill stores") + self._number(r"(\d+) bytes spill loads")

    @property
    def serializes_products(self) -> bool:
        """Whether the assembler made asynchronous products wait for each other."""
        return any(warning in self.report for warning in ("C7510", "C7515"))

    def _number(self, pattern: str) -> int:
        return sum(map(int, re.findall(pattern, self.report)))


def assemble(ptx: str, capability: int) -> Program:
    """PTX → machine code of a GPU, `capability` being ten times its compute capability."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx)
        # Asynchronous products and redistributed registers are Hopper's alone.
        architecture = "sm_90a" if capability == 90 else f"sm_{capability}"
        report = _run(["ptxas", *OPTIONS, f"--gpu-name={architecture}", "kernel.ptx", "-o", "kernel.cubin"], folder)
        return Program(report, (Path(folder) / "kernel.cubin").read_bytes())


def _run(command: list[str], folder: str) -> str:
    command = [str(TOOLS / command[0]), *command[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout or done.stderr


def instructions(text: str) -> list[str]:
    """All of a disassembly that can run, without the predicates before them."""
    graph = _Graph.of(text)
    return [_unconditional(line) for block in sorted(graph.reached()) for line in graph.blocks[block].lines]


def inner_loops(text: str) -> list[list[str]]:
    graph = _Graph.of(text)
    loops = list(graph.loops())
    waits = [loop for loop in loops if _waits(graph, loop)]
    loops = [loop for loop in loops if loop not in waits]
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    return [
        [_unconditional(line) for block in sorted(loop.difference(*waits)) for line in graph.blocks[block].lines]
        for loop in innermost
    ]


def _waits(graph: "_Graph", loop: frozenset[int]) -> bool:
    """Whether a loop does nothing but to ask a barrier again and again."""
    return {_name(line) for block in loop for line in graph.blocks[block].lines} == {"SYNCS", "BRA"}


def _unconditional(line: str) -> str:
    return re.sub(r"^@!?\w+ ", "", line)


def _name(line: str) -> str:
    return _unconditional(line).split()[0].split(".")[0]


class _Block:
    """Instructions that run one after another, and where they go then."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.targets: set[str] = set()
        self.falls_through = True

    def end(self, line: str, joins: dict[str, str]) -> bool:
        """Note an instruction; returns whether it ends the block. joins: where warps that parted meet again."""
        self.lines.append(line)
        name = _name(line)
        labels = set(re.findall(r"\.L_\w+", line))
        if name == "BSSY":
            joins[line.split()[1].rstrip(",")] = labels.pop()
            return False
        if name == "BSYNC":
            labels = {joins[line.split()[-1]]}
        elif not labels and name not in _ENDS:
            return False
        self.targets = labels
        # A uniform predicate may stand among the operands: BRA.U !UP0, `(.L_x_1).
        self.falls_through = line.startswith("@") or (name not in ("BRX", "BSYNC", *_ENDS) and "," in line)
        return True


class _Graph:
    """Blocks of a kernel in the order in which they lie, and which may follow which."""

    def __init__(self, blocks: list[_Block], labels: dict[str, int]) -> None:
        self.blocks = blocks
        self.followers = [
            {labels[target] for target in block.targets if target in labels}
            | ({number + 1} if block.falls_through and number + 1 < len(blocks) else set())
            for number, block in enumerate(blocks)
        ]

    @classmethod
    def of(cls, text: str) -> "_Graph":
        blocks, labels, joins = [_Block()], dict[str, int](), dict[str, str]()
        for row in text.splitlines():
            if label := _LABEL.match(row.strip()):
                if blocks[-1].lines:
                    blocks.append(_Block())
                labels[label[1]] = len(blocks) - 1
            elif (line := _LINE.match(row)) and blocks[-1].end(line[1], joins):
                blocks.append(_Block())
        return cls(blocks, labels)

    def reached(self) -> set[int]:
        found, todo = {0}, [0]
        while todo:
            new = self.followers[todo.pop()] - found
            found |= new
            todo += new
        return found

    def loops(self) -> Iterator[frozenset[int]]:
        """Blocks of each loop: those from which its first block is reached again without leaving through it."""
        back: dict[int, set[int]] = {}
        for last, first in self._jumps_back():
            back.setdefault(first, set()).add(last)
        leaders = [set[int]() for _ in self.blocks]
        for number, followers in enumerate(self.followers):
            for follower in followers:
                leaders[follower].add(number)
        for first, lasts in back.items():
            found, todo = {first}, list(lasts)
            while todo:
                block = todo.pop()
                if block not in found:
                    found.add(block)
                    todo += leaders[block]
            yield frozenset(found)

    def _jumps_back(self) -> Iterator[tuple[int, int]]:
        """Jumps to a block that is on the way to where they start, from a walk through all blocks."""
        seen, path, on_path = {0}, [(0, iter(self.followers[0]))], {0}
        while path:
            block, others = path[-1]
            for other in others:
                if other in on_path:
                    yield block, other
                elif other not in seen:
                    seen.add(other)
                    on_path.add(other)
                    path.append((other, iter(self.followers[other])))
                    break
            else:
                path.pop()
                on_path.discard(block)
