"""Reading machine code: loops are found, cycles counted by hand, and what misses a goal says so."""

from dataclasses import replace

import pytest

from bench.machine_code.__main__ import row
from bench.machine_code.cases import CASES
from bench.machine_code.measure import Measured, measure_cases
from bench.machine_code.pipes import (
    GPUS,
    access_bits,
    overlapped_exponentials,
    pipe_cycles,
    products_of,
    tensor_cycles,
    waits,
)
from bench.machine_code.program import inner_loops, instructions


def disassembly(text: str) -> str:
    """As nvdisasm prints it, of lines that are labels or instructions."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(line if line.endswith(":") else f"  /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))


LEAVES = {
    "a predicate": "@P0 BRA `(.L_x_0)",
    "a uniform predicate": "@!UP0 BRA `(.L_x_0)",
    "a uniform predicate among the operands": "BRA.U !UP0, `(.L_x_0)",
}


@pytest.mark.parametrize("jump", LEAVES.values(), ids=LEAVES)
def test_a_loop_ends_with_any_predicate(jump: str) -> None:
    code = disassembly(f"MOV R0, R1\n.L_x_0:\n@P1 FFMA R0, R0, R1, R2\n{jump}\nEXIT")
    assert inner_loops(code) == [["FFMA R0, R0, R1, R2", jump.removeprefix("@P0 ").removeprefix("@!UP0 ")]]


def test_a_loop_may_leave_from_its_middle() -> None:
    code = disassembly(
        """.L_x_0:
        FADD R0, R0, R1
        @!UP0 BRA `(.L_x_1)
        FMUL R0, R0, R1
        BRA `(.L_x_0)
        .L_x_1:
        EXIT
        .L_x_2:
        BRA `(.L_x_2)"""
    )
    ((first, *_, last),) = inner_loops(code)
    assert (first, last) == ("FADD R0, R0, R1", "BRA `(.L_x_0)")
    assert instructions(code)[-1] == "EXIT"  # what follows is never reached


def test_of_nested_loops_the_inner_one_counts() -> None:
    code = disassembly(
        """.L_x_0:
        FADD R0, R0, R1
        .L_x_1:
        FMUL R0, R0, R1
        @P0 BRA `(.L_x_1)
        @P1 BRA `(.L_x_0)
        EXIT"""
    )
    assert inner_loops(code) == [["FMUL R0, R0, R1", "BRA `(.L_x_1)"]]


def test_a_wait_for_a_barrier_is_no_loop_of_its_own() -> None:
    """Its slow part stands behind the end and jumps back, over all that lies between."""
    code = disassembly(
        """BRX R4 -0x1a0 (*"BRANCH_TARGETS .L_x_0,.L_x_9"*)
        .L_x_0:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2
        @!P0 BRA `(.L_x_2)
        .L_x_1:
        HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
        @P1 BRA `(.L_x_0)
        .L_x_9:
        BSSY B0, `(.L_x_3)
        FADD R0, R0, R1
        BSYNC B0
        .L_x_3:
        EXIT
        .L_x_2:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2
        @!P0 BRA `(.L_x_2)
        BRA `(.L_x_1)"""
    )
    (loop,) = inner_loops(code)
    assert [line.split()[0].split(".")[0] for line in loop] == ["SYNCS", "BRA", "HGMMA", "BRA", "BRA"]


def test_cycles_by_pipe() -> None:
    lines = [
        *["LOP3.LUT R0, R1, R2, RZ, 0xc0, !PT"] * 6, *["FFMA R0, R0, R1, R2"] * 4, "MUFU.EX2 R0, R0",
        "IMAD.WIDE R2, R3, R4, R6", "LDS.128 R8, [R2]", "LDSM.16.M88.4 R8, [R2]", "LDGSTS.E.128 [R2], desc[UR4][R4.64]",
        "UIADD3 UR4, UR4, 0x1, URZ",
    ]  # fmt: skip
    cycles = pipe_cycles(lines, 8, GPUS[90])
    assert cycles == {"issue": 8 * 4, "integer": 8 * 3, "float": 8 * 1.5, "special": 8 * 2, "shared": 8 * 12}
    assert pipe_cycles(lines, 8, GPUS[80])["float"] == 8 * 2.5


def test_products_by_instruction() -> None:
    group = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", "HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0"]
    assert products_of(group, 8) == {"HGMMA.64x128x16": 2 * 2 * 64 * 128 * 16}
    assert tensor_cycles(products_of(group, 4), GPUS[90]) == 2 * 64
    assert pipe_cycles(group, 4, GPUS[90])["shared"] == (32 + 16) + 32
    single = ["HMMA.16816.F32.BF16 R4, R8, R12, R4", "IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4"]
    assert products_of(single, 1) == {"HMMA.16816": 16 * 8 * 16, "IMMA.16832": 16 * 8 * 32}


def test_what_runs_beside_products() -> None:
    def loop(*left: int) -> list[str]:
        product = ["HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0"]
        wait = [f"WARPGROUP.DEPBAR.LE gsb0, 0x{n}" for n in left]
        return [*product, *product, wait[0], "MUFU.EX2 R0, R0", wait[1], "MUFU.EX2 R0, R0"]

    assert overlapped_exponentials(loop(1, 0)) == (1, 2)
    assert overlapped_exponentials(loop(0, 0)) == (0, 2)
    assert overlapped_exponentials(loop(1, 1)) == (2, 2)
    assert waits([*loop(1, 0), "DEPBAR.LE SB0, 0x14"]) == {"copies": [20], "products": [1, 0]}


def test_widths_of_access() -> None:
    kinds = ("LDG.E.128.CONSTANT R0", "LDG.E.U8 R0", "LDG.E R0", "LDGSTS.E.BYPASS.LTC128B.128 [R0]")
    assert [access_bits(line) for line in kinds] == [128, 8, 32, 128]


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "expected"),
    [(128, 128, 0, 4), (128, 32, 0, 16), (384, 168, 0, 1), (128, 32, 75 * 1024, 3), (32, 16, 0, 32)],
)
def test_programs_at_once(threads: int, registers: int, shared_bytes: int, expected: int) -> None:
    assert GPUS[90].residents(threads, registers, shared_bytes) == expected


def test_names_of_cases_are_theirs_alone() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.machine_code("linear")
@pytest.mark.slow
def test_what_misses_a_goal_says_so() -> None:
    (found,) = measure_cases(90, ["int4, 16 rows"])
    assert found.misses() == [] and found.bound == "memory" and "MISSES" not in row(found)
    assert found.load_bits["128"] > 0 and found.waits["copies"] and found.residents >= 2
    slow = replace(found, cycles=found.cycles | {"memory": found.cycles[found.busiest] / 2}, spill_bytes=8)
    assert [text.split()[0] for text in slow.misses()] == ["2.00", "spills"]
    large = replace(found, capability=89, shared_bytes=100 * 1024)
    assert large.misses() == ["100 KiB of shared memory"] and "MISSES: 100 KiB" in row(large)
    assert isinstance(large, Measured) and large.as_json()["misses"] == large.misses()
