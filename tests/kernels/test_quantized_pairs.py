"""Bit operations that decode weights: their PTX, run here step by step on every code; the machine code of products."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.machine_code.compiled import compile_cases
from bench.machine_code.measure import BY_NAME, measure_cases
from bench.machine_code.program import assemble
from kernels.linear import _quantized_pairs as pairs
from kernels.linear._quantized_tiles import _places
from kernels.linear.quantization import NF4_TABLE
from tests.native_compile import ptx_of

PTX = {"int4": pairs.INT4_PTX, "int8": pairs.INT8_PTX, "fp8": pairs.FP8_PTX, "nf4": pairs.NF4_PTX}


def prmt(one: Tensor, other: Tensor, selector: Tensor) -> Tensor:
    """PTX ISA: each of four bytes is one of eight, or eight times its highest bit."""
    chosen = torch.zeros_like(selector)
    for place in range(4):
        which = selector >> 4 * place & 15
        byte = (one | other << 32) >> 8 * (which & 7) & 0xFF
        chosen = chosen | torch.where(which >= 8, (byte >> 7) * 0xFF, byte) << 8 * place
    return chosen


def halves(word: Tensor) -> Tensor:
    """The two bf16 of words, fp64 [..., 2]."""
    shorts = torch.stack((word & 0xFFFF, word >> 16), -1)
    return (shorts << 16).to(torch.int32).view(torch.float32).double()


def fma(one: Tensor, other: Tensor, third: Tensor) -> Tensor:
    wide = halves(one) * halves(other) + halves(third)
    short = wide.to(torch.bfloat16)
    assert torch.equal(short.double(), wide), "a value was rounded"
    bits = short.view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": lambda a, b, c, table: a & b | c,
    "prmt.b32": prmt,
    "fma.rn.bf16x2": fma,
}


def run(ptx: str, outputs: int, inputs: list[Tensor]) -> list[Tensor]:
    values = {f"${outputs + number}": word for number, word in enumerate(inputs)}
    for line in ptx.splitlines():
        if operation := re.fullmatch(r"(\S+) (\$?\w+), (.*);", line.strip()):
            name, target, operands = operation.groups()
            assert name != "lop3.b32" or operands.endswith("0xEA")
            known = (values[x] if x in values else torch.tensor(int(x, 0)) for x in operands.split(", "))
            values[target] = OPERATIONS[name](*known).expand_as(inputs[0])
    return [values[f"${number}"] for number in range(outputs)]


def expected_values(format: str, codes: Tensor, zeros: Tensor) -> Tensor:
    if format == "nf4":
        return torch.tensor(NF4_TABLE).to(torch.bfloat16)[torch.tensor(pairs.NF4_ORDER)[codes]].double()
    if format == "fp8":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    return (codes - zeros if format == "int4" else (codes ^ 128) - 128).double()


@pytest.mark.parametrize("format", PTX)
def test_every_code_becomes_its_value(format: str) -> None:
    """In every place of a word, beside any others; INT4 with every zero."""
    bits, shifts = _places(format)
    words = torch.randint(0, 1 << 32, (4096,))
    if format == "fp8":  # NaN: no weight has it
        for shift in (0, 8, 16, 24):
            words = torch.where((words >> shift & 0x7F) == 0x7F, words & ~(1 << shift), words)
    zeros = torch.arange(4096) % 16
    others = {
        "int4": [(0xC300 | zeros) * 0x10001],
        "nf4": [torch.tensor(x & 0xFFFFFFFF) for x in pairs.nf4_bytes()[::2]],
    }
    results = run(PTX[format].value, 16 // bits, [words, *others.get(format, [])])
    for (first, second), result in zip(shifts, results, strict=True):
        codes = torch.stack((words >> first, words >> second), -1) & (1 << bits) - 1
        assert len(codes.unique()) >= min(1 << bits, 254)
        assert torch.equal(halves(result), expected_values(format, codes, zeros[:, None]))


@pytest.mark.machine_code("linear")
@pytest.mark.slow
def test_an_h100_decodes_as_fast_as_its_memory_delivers() -> None:
    """Up to 16 rows, and for gradients of many; counted from machine code, by pipe."""
    names = [name for name, case in BY_NAME.items() if 90 in case.most_ratio]
    assert len(names) == 3 * len(PTX)
    for found in measure_cases(90, names):
        assert found.ratio is not None and found.bound == ("tensor" if "4096" in found.case else "memory")
        assert found.misses() == [], found.case


@pytest.mark.machine_code("linear")
@pytest.mark.slow
def test_weights_reach_the_tensor_cores_of_an_h100_from_registers() -> None:
    for compiled in compile_cases(90, [f"{format}, 16 rows" for format in PTX]):
        (step,) = (loop for loop in assemble(compiled.ptx, 90).loops if any("HGMMA" in line for line in loop))
        assert not any(line.startswith(("STS", "SHFL")) for line in step), "weights move between threads"


@pytest.mark.machine_code("linear")
@pytest.mark.slow
def test_codes_of_eight_bits_go_through_tensor_cores_as_they_are() -> None:
    """And nothing that a step issues takes longer than its products."""
    names = {"int8 times int8, 256 rows": "IGMMA", "fp8 times fp8, 256 rows": "QGMMA"}
    for found in measure_cases(90, list(names)):
        assert found.tensor[0].startswith(names[found.case]) and found.spill_bytes == found.stack_bytes == 0
        assert max(found.cycles[pipe] for pipe in ("issue", "integer", "float")) <= found.cycles["tensor"]


@pytest.mark.machine_code("linear")
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "group"), [(90, "quantized"), (80, "quantized"), (89, "quantized:float32")])
def test_nothing_spills(capability: int, group: str, tmp_path: Path) -> None:
    """And what an A100 needs of shared memory the smallest GPU has, where the same blocks are computed."""
    for name, ptx in ptx_of(capability, group, tmp_path, fits=89 if capability == 80 else None).items():
        program = assemble(ptx, capability)
        assert program.spill_bytes == program.stack_bytes == 0, f"{name}: {program.report}"
