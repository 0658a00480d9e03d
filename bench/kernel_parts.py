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
from bench.kernel_fused import fused

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
    )
}
