"""Which form of products with weights in 4 and 8 bits, and of attention while decoding, a processor is given."""

import shutil

from kernels.common.floats_cpu import AVX2, NEON
from kernels.common.processor import processor_features
from kernels.linear import _rounded_cpu, _skinny_cpu, _tiles_cpu


def cpu_form(features: frozenset[str] | None = None, compiler: str = "cc") -> str:
    """Say it in words, and what is missing for a faster one that only needs installing.

    `features` are a processor's, as Linux names them; default: this machine's.
    """
    features = processor_features() if features is None else features
    if shutil.which(compiler) is None:
        return f"torch's operators, slower: there is no C compiler `{compiler}` (Debian: apt install gcc)"
    if features >= NEON:
        integers = "dot products of NEON" if "asimddp" in features else "NEON"
        return f"C for NEON in fp32; rounded activations: {integers}"
    if not features >= AVX2:
        return "torch's operators, slower: the C forms are for x86 processors with AVX2, FMA and F16C, and for arm64"
    bf16 = "AMX" if features >= _tiles_cpu.NEEDS else "AVX-512" if features >= _skinny_cpu.NEEDS_BF16 else "none"
    integers = "VNNI" if _rounded_cpu.has_vnni(features) else "AVX2"
    fp32 = "AVX-512" if features >= _skinny_cpu.NEEDS_OUTPUTS else "AVX2"
    if bf16 == "none":
        return f"C for {fp32} in fp32, since the processor has no bf16 instructions; rounded activations: {integers}"
    return f"C for {bf16} in bf16, {fp32} in fp32; rounded activations: {integers}"
