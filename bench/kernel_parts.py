"""The parts of the kernel benchmark, in the order in which they run.

A part is a function that returns its cases. `tiny` asks for a few shapes that Triton's interpreter gets through in
seconds: they prove that a part runs from end to end, and nothing else. A new part is one more function in the list.
"""

from collections.abc import Callable

from bench.kernel_attention import (
    decode,
    decode_8bit,
    flash_backward,
    flash_forward,
    flash_forward_backward,
    prefill_paged,
    verify,
)
from bench.kernel_cases import Case
from bench.kernel_drafts import sampling_drafts
from bench.kernel_fused import fused
from bench.kernel_losses import losses_cross_entropy, losses_distillation
from bench.kernel_quantized import (
    quantized_backward,
    quantized_fp8,
    quantized_int4,
    quantized_int8,
    quantized_nf4,
)
from bench.kernel_quantized_fused import quantized_fused
from bench.kernel_routing import sampling_routing
from bench.kernel_sampling import sampling_tokens

Part = Callable[[bool], list[Case]]

PARTS: dict[str, Part] = {
    build.__name__: build
    for build in (
        flash_forward,
        flash_forward_backward,
        flash_backward,
        decode,
        decode_8bit,
        verify,
        prefill_paged,
        fused,
        quantized_nf4,
        quantized_int4,
        quantized_int8,
        quantized_fp8,
        quantized_backward,
        quantized_fused,
        losses_cross_entropy,
        losses_distillation,
        sampling_tokens,
        sampling_drafts,
        sampling_routing,
    )
}


def parts_named(wanted: str) -> list[str]:
    """The part of this name, else all whose names begin with it and an underscore: `quantized` means six."""
    return [wanted] if wanted in PARTS else [name for name in PARTS if name.startswith(f"{wanted}_")]
