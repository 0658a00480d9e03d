"""Bit operations that decode weights: their PTX, run here step by step on every code; the machine code of products."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.linear import _quantized_pairs as pairs
from kernels.linear._quantized_tiles import _places
from kernels.linear.quantization import NF4_TABLE
from tests.machine_code import assemble, inner_loops, instructions, pipe_cycles, ptx_of

BYTES_PER_CYCLE = 13.9
"""Of an H100's memory, for each of its SMs: 3.35 TB/s, 132 of them, 1.83 GHz."""
MULTIPLICATIONS_PER_CYCLE = 2048
"""In bf16, on the tensor cores of one SM."""
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


MARKS = {"nf4": "0x5140", "int4": "0x000F000F", "int8": "0x00800080", "fp8": "0x07F007F0"}
WEIGHT_BYTES = {"nf4": 0.5 + 1 / 64, "int4": 0.5 + 4 / 128, "int8": 1.0, "fp8": 1.0}
"""Read for each weight, with its share of a scale."""
WORDS = 128 * 16
"""That one step of a product decodes."""


@pytest.fixture(scope="module")
def on_an_h100(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return ptx_of(90, "products", tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_decoding_keeps_up_with_the_memory_of_an_h100(on_an_h100: dict[str, str], tmp_path: Path) -> None:
    """Counted from machine code: every pipe's cycles for a step, beside those in which memory delivers its weights."""
    seen = set()
    for name, ptx in on_an_h100.items():
        found = [format for format, mark in MARKS.items() if mark in ptx]
        if "product" not in name or not found:
            continue
        (format,) = found
        seen.add(format)
        assemble(ptx, 90, tmp_path)
        codes = WORDS * (8 if WEIGHT_BYTES[format] < 1 else 4)
        memory = codes * WEIGHT_BYTES[format] / BYTES_PER_CYCLE
        step = max(inner_loops(tmp_path), key=len)
        assert any("HGMMA" in line for line in step)
        assert not any(line.startswith(("STS", "SHFL")) for line in step), "weights move between threads"
        worst = max(pipe_cycles(step, 4).values()) / memory
        assert worst <= (1.15 if format == "nf4" else 1.0), f"{format}: {worst:.2f}"
    assert seen == set(MARKS)


@pytest.mark.slow
def test_codes_of_eight_bits_go_through_tensor_cores_as_they_are(on_an_h100: dict[str, str], tmp_path: Path) -> None:
    """And nothing in a step takes longer than its products."""
    for code, instruction, tile in (("s8.s8", "IGMMA", 128 * 256 * 64), ("e4m3.e4m3", "QGMMA", 128 * 128 * 128)):
        (ptx,) = (ptx for name, ptx in on_an_h100.items() if "codes" in name and code in ptx)
        report = assemble(ptx, 90, tmp_path)
        assert "0 bytes stack frame, 0 bytes spill stores" in report, report
        step = max(inner_loops(tmp_path), key=len)
        assert any(line.startswith(instruction) for line in step)
        assert max(pipe_cycles(step, 8).values()) <= tile / (2 * MULTIPLICATIONS_PER_CYCLE)


@pytest.mark.slow
def test_gradients_of_many_rows_take_little_more_than_their_product(on_an_h100: dict[str, str], tmp_path: Path) -> None:
    """Of 4,096 rows: cycles of a weight written out once, beside those of its products on the tensor cores."""
    product = 4096 / MULTIPLICATIONS_PER_CYCLE
    for name, ptx in on_an_h100.items():
        if "expand" in name:
            assemble(ptx, 90, tmp_path)
            decoded = max(pipe_cycles(instructions(tmp_path), 4).values()) / 64**2  # the smallest tile
            moved = (max(WEIGHT_BYTES.values()) + 2) / BYTES_PER_CYCLE
            assert product + max(decoded, moved) <= 1.15 * product


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "group"), [(90, "quantized"), (80, "quantized"), (89, "quantized:float32")])
def test_nothing_spills(capability: int, group: str, tmp_path: Path) -> None:
    for name, ptx in ptx_of(capability, group, tmp_path / "cache").items():
        report = assemble(ptx, capability, tmp_path)
        assert "0 bytes stack frame, 0 bytes spill stores" in report, f"{name}: {report}"
