"""What `doctor` says of a processor's products is what they choose."""

import torch

from kernels.common.processor import processor_features
from kernels.linear._skinny_cpu import multiplies
from kernels.linear._tiles_cpu import has_tiles
from kernels.linear.cpu_form import cpu_form

ZEN = frozenset({"avx2", "fma", "f16c"})
ICE_LAKE = ZEN | {"avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_vnni"}
COOPER_LIKE = ICE_LAKE | {"avx512_bf16"}
CORTEX_A72 = frozenset({"fp", "asimd"})


def test_each_processor_is_told_its_form() -> None:
    assert cpu_form(ZEN) == (
        "C for AVX2 in fp32, since the processor has no bf16 instructions; rounded activations: AVX2"
    )
    assert "AVX-512 in fp32" in cpu_form(ICE_LAKE) and cpu_form(ICE_LAKE).endswith("VNNI")
    assert cpu_form(COOPER_LIKE).startswith("C for AVX-512 in bf16")
    assert cpu_form(COOPER_LIKE | {"amx_bf16"}).startswith("C for AMX in bf16")
    assert cpu_form(CORTEX_A72) == "C for NEON in fp32; rounded activations: NEON"
    assert cpu_form(CORTEX_A72 | {"asimddp"}).endswith("rounded activations: dot products of NEON")


def test_what_is_missing_is_named() -> None:
    assert "AVX2, FMA and F16C, and for arm64" in cpu_form(frozenset({"sse4_2"}))
    assert "no C compiler `no-such-compiler`" in cpu_form(ZEN, "no-such-compiler")


def test_this_machine_is_told_what_it_does() -> None:
    form, x = cpu_form(), torch.zeros(2, 64, dtype=torch.bfloat16)
    assert form.startswith("C for") == multiplies(torch.float32)
    assert ("AMX" in form) == has_tiles(x) or "amx_bf16" in processor_features()
    assert ("in bf16" in form) == multiplies(torch.bfloat16)
