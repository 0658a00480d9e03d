"""Codes of quantized weights to pairs of bf16 in registers: bit operations on whole words, for NVIDIA GPUs.

A word of 32 bits holds 8 codes of 4 bits or 4 of 8; a pair is 32 bits too, as tensor cores take them. Exact:

    INT4    a code put behind 0x4300 is the bf16 128 + code; minus (128 + zero), both at once
    INT8    the low 7 bits behind 0x4300, minus 128, or 256 where the highest bit is set
    FP8     sign, exponent and mantissa moved into those of bf16 are the value · 2⁻¹²⁰, the smallest ones too
    NF4     the table, cut into bytes, lies in registers; `prmt` looks up four of them at once by 3 bits of each code

`prmt` answers with the sign of a byte instead of the byte where the fourth bit is set. So each half of the table,
looked up with that bit as it is and inverted, gives the bytes of both halves by one xor, if the two bytes of every
entry i and i + 8 have the same signs. The table has them in `NF4_ORDER`, with zero as −0.

Sources: https://arxiv.org/abs/2211.10017 (integers behind an exponent), PTX ISA.
"""

import torch

from kernels.common.triton import tl, triton
from kernels.linear.quantization import NF4_TABLE

NF4_ORDER = (0, 4, 1, 5, 8, 12, 9, 13, 3, 6, 2, 7, 11, 15, 10, 14)
"""The code of NF4 that each of ours stands for."""

_TAKE = "lop3.b32 {0}, {1}, {2}, {3}, 0xEA;"  # (1 & 2) | 3


def _ptx(registers: int, *lines: str) -> tl.constexpr:
    return tl.constexpr("\n".join(("{", f".reg .b32 t<{registers}>;", *lines, "}")))


def _int4() -> tl.constexpr:
    """From a word and −(128 + zero) twice: codes i and i + 4."""
    lines = ["mov.b32 t4, 0x3F803F80;"]
    for i in range(4):
        lines += [f"shr.u32 t{i}, $4, {4 * i};", _TAKE.format(f"t{i}", f"t{i}", "0x000F000F", "0x43004300")]
        lines.append(f"fma.rn.bf16x2 ${i}, t{i}, t4, $5;")
    return _ptx(5, *lines)


def _int8() -> tl.constexpr:
    """From a word: codes i and i + 2."""
    lines = ["mov.b32 t2, 0x3F803F80;"]
    for i in range(2):
        lines += [
            f"shr.u32 t{i}, $2, {8 * i};",
            _TAKE.format("t3", f"t{i}", "0x007F007F", "0x43004300"),
            _TAKE.format("t4", f"t{i}", "0x00800080", "0xC300C300"),
            f"fma.rn.bf16x2 ${i}, t3, t2, t4;",
        ]
    return _ptx(5, *lines)


def _fp8() -> tl.constexpr:
    """From a word: codes i and i + 2. Adding −0 keeps the sign of a zero."""
    lines = ["mov.b32 t2, 0x7B807B80;", "mov.b32 t3, 0x80008000;", "shl.b32 t0, $2, 8;", "mov.b32 t1, $2;"]
    for i in range(2):
        lines += [
            f"shr.u32 t4, t{i}, 4;",
            "and.b32 t4, t4, 0x07F007F0;",
            _TAKE.format("t4", f"t{i}", "0x80008000", "t4"),
            f"fma.rn.bf16x2 ${i}, t4, t2, t3;",
        ]
    return _ptx(5, *lines)


def _nf4() -> tl.constexpr:
    """From a word and the 4 even words of `nf4_bytes`: codes 2i and 2i + 1."""
    lines = [f"mov.b32 t{number + 5}, {word & 0xFFFFFFFF:#x};" for number, word in enumerate(nf4_bytes()[1::2])]
    lines += ["mov.b32 t0, $4;", "xor.b32 t1, $4, 0x88888888;"]
    for i in (0, 2):
        for byte, half in ((2, 0), (3, 2)):
            lines += [
                f"prmt.b32 t{byte}, ${half + 5}, t{half + 5}, t0;",
                f"prmt.b32 t4, ${half + 6}, t{half + 6}, t1;",
                f"xor.b32 t{byte}, t{byte}, t4;",
            ]
        lines += [f"prmt.b32 ${i}, t2, t3, 0x5140;", f"prmt.b32 ${i + 1}, t2, t3, 0x7362;"]
        lines += ["shr.u32 t0, t0, 16;", "shr.u32 t1, t1, 16;"] if i == 0 else []
    return _ptx(9, *lines)


def nf4_bytes() -> list[int]:
    """What `prmt` looks up, as 8 words: the low bytes of the first half of the table, of the second, the high bytes."""
    table = torch.tensor([value or -0.0 for value in NF4_TABLE]).to(torch.bfloat16)[list(NF4_ORDER)]
    halves = table.view(torch.uint8).view(2, 8, 2).permute(2, 0, 1).contiguous()
    halves[:, 1] ^= (halves[:, 0] >> 7) * 0xFF
    return halves.view(torch.int32).flatten().tolist()


INT4_PTX, INT8_PTX, FP8_PTX, NF4_PTX = _int4(), _int8(), _fp8(), _nf4()
_FOUR, _TWO = tl.constexpr("=&r,=&r,=&r,=&r,"), tl.constexpr("=&r,=&r,")


@triton.jit
def decoded_pairs(b_words, b_zeros, table, FORMAT: tl.constexpr):
    """Values before scaling, bf16 [N, LANES, M, PER / 2, 2], of words [N, LANES, M].

    INT4: with zeros [N, 1], int32. NF4: with the words of `nf4_bytes`.
    """
    if FORMAT == "int4":
        b_offsets = tl.broadcast_to((b_zeros * 0x10001 | -1023360256)[:, :, None], b_words.shape)  # 0xC300C300
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            INT4_PTX, _FOUR + "r,r", [b_words, b_offsets], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    elif FORMAT == "nf4":
        low_0, low_1, high_0, high_1 = table
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            NF4_PTX, _FOUR + "r,r,r,r,r", [b_words, low_0, low_1, high_0, high_1], dtype=(tl.int32,) * 4, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        b_0, b_1 = tl.inline_asm_elementwise(
            INT8_PTX if FORMAT == "int8" else FP8_PTX, _TWO + "r", [b_words], dtype=(tl.int32,) * 2, is_pure=True,
            pack=1,
        )  # fmt: skip
    if FORMAT == "int4" or FORMAT == "nf4":
        b_pairs = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))
        b_pairs = tl.reshape(b_pairs, [b_words.shape[0], b_words.shape[1], b_words.shape[2], 4])
    else:
        b_pairs = tl.join(b_0, b_1)
    b_low = b_pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(b_low, (b_pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
