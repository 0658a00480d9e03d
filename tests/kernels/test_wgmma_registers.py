"""Products of Hopper's matrix units that read registers: nothing writes those before the product has ended.

`wgmma` goes on while its warps do; of what it reads and writes, PTX promises nothing before `wgmma.wait_group`. Where
Triton adds up a product with what a kernel makes in registers, such as decoded weights, it may leave some under way
over the end of a loop. On an H200 INT8 products then had other bits in every run.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native_compile import ptx_of

REGISTER = re.compile(r"%[a-z]+\d+")
WRITES_NONE = ("st", "bra", "bar", "wgmma", "cp", "ret", "red", "fence", "membar", "mbarrier", "prefetch", "//", ".")
KERNEL = """
$L__BB0_1:
 add.f32 {register}, %f9, %f9;
 wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1,%f2}}, {{%r1,%r2}}, %rd1, %p5, 1, 1, 0;
 wgmma.commit_group.sync.aligned;
 wgmma.wait_group.sync.aligned {left};
 @%p1 bra $L__BB0_1;
"""


def written(line: str) -> set[str]:
    """The registers that an instruction of PTX writes: its first operand, which may be several in braces."""
    opcode, _, operands = re.sub(r"^@!?%p\d+\s+", "", line).partition(" ")
    if opcode.startswith(WRITES_NONE):
        return set()
    first = operands[: operands.find("}")] if operands.lstrip().startswith("{") else operands.partition(",")[0]
    return set(REGISTER.findall(first))


def loops(lines: list[str]) -> Iterator[list[str]]:
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith("$L__BB")}
    for number, line in enumerate(lines):
        jump = re.search(r"bra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if jump and labels[jump[1]] < number:
            yield lines[labels[jump[1]] : number]


def overwritten(ptx: str) -> list[str]:
    """Instructions, within loops, that write what a product under way may still read."""
    found = []
    for body in loops([line.strip() for line in ptx.splitlines()]):
        pending, begun = list[set[str]](), set[str]()
        for line in body * 2:
            if line.startswith("wgmma.mma_async"):
                operands = re.findall(r"\{([^}]*)\}", line)
                begun |= set(REGISTER.findall(operands[1])) if len(operands) > 1 else set()
            elif line.startswith("wgmma.commit_group"):
                pending, begun = [*pending, begun], set()
            elif line.startswith("wgmma.wait_group"):
                left = int(line.split()[-1].rstrip(";"))
                pending = pending[len(pending) - left :] if left else []
            elif any(written(line) & product for product in (*pending, begun)):
                found.append(line)
    return found


@pytest.mark.parametrize(
    ("register", "left", "is_wrong"), [("%r2", 1, True), ("%r2", 0, False), ("%f9", 1, False), ("{%f9, %r1}", 1, True)]
)
def test_what_is_written_under_a_product_is_found(register: str, left: int, is_wrong: bool) -> None:
    assert bool(overwritten(KERNEL.format(register=register, left=left))) == is_wrong


@pytest.mark.slow
@pytest.mark.machine_code("attention", "linear")
@pytest.mark.parametrize("group", ["quantized", "products", "flash", "paged", "lora"])
def test_no_product_loses_what_it_reads(group: str, tmp_path: Path) -> None:
    kernels = ptx_of(90, group, tmp_path)
    assert any("wgmma" in ptx for ptx in kernels.values())
    assert {name: lines for name, ptx in kernels.items() if (lines := overwritten(ptx))} == {}
