"""What the kernels should reach on a Hopper GPU, and where they are furthest from it.

A goal names a candidate, one of its figures, and the least that the figure may be, over all shapes of a part that the
goal is about. `times_ours` of a peer is how many times as long as ours it takes, `times_our_peak` how many times as
much memory. `compare` finds the worst shape.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

FORMATS = ("nf4", "int4", "int8", "fp8")
Concerns = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Goal:
    """`figure` of `candidate` must be at least `at_least` in every case of `part` that `concerns` accepts."""

    text: str
    part: str
    candidate: str
    figure: str
    at_least: float
    concerns: Concerns


def _heads_of(size: int) -> Concerns:
    return lambda case: case["shape"]["head_dim"] == size and case["shape"]["length"] >= 4096


def _rows(number: int, at_least_bytes: float = 0) -> Concerns:
    return lambda case: case["shape"]["rows"] == number and case["bytes"] >= at_least_bytes


def _long_loss(**more: Any) -> Concerns:
    return lambda case: {"tokens": 8192, "vocabulary": 131_072, **more}.items() <= case["shape"].items()


# fmt: off
_ROWS = (
    ("nf4", "bitsandbytes", 1, 1.0), ("nf4", "bitsandbytes gemv", 1, 1.0), ("int4", "torch_int4", 1, 1.0),
    ("int4", "gemlite", 1, 1.0), ("nf4", "bitsandbytes", 16, 1.3), ("int4", "gemlite", 16, 2.0),
    ("int4", "marlin", 16, 0.95),
    *((name, "cublas", rows, ratio) for name in FORMATS for rows, ratio in ((64, 1.0), (256, 0.95))),
)
"""Format, peer, rows, and how many times as long as ours it takes."""
GOALS = tuple(Goal(*fields) for fields in (
    ("forward d128, 4k-16k, over SDPA flash", "flash_forward", "sdpa_flash", "times_ours", 1.6, _heads_of(128)),
    ("forward d128, 4k-16k, over SDPA cuDNN", "flash_forward", "sdpa_cudnn", "times_ours", 1.0, _heads_of(128)),
    ("forward d64, 4k-16k, over SDPA cuDNN", "flash_forward", "sdpa_cudnn", "times_ours", 1.0, _heads_of(64)),
    ("forward + backward d128, 4k-16k, over SDPA cuDNN", "flash_forward_backward", "sdpa_cudnn", "times_ours", 0.95,
     _heads_of(128)),
    ("decode over FlashInfer", "decode", "flashinfer", "times_ours", 1.0, lambda case: True),
    ("decode over vLLM's Triton", "decode", "vllm_triton", "times_ours", 1.1, lambda case: True),
    ("decode, fraction of the limit from 256 MB", "decode", "potstill", "roofline_fraction", 0.85,
     lambda case: case["bytes"] >= 256 * 2**20),
    ("verification: plain decode over ours", "verify", "decode", "times_ours", 1 / 1.05, lambda case: True),
    ("verification over vLLM's Triton, batch to 8", "verify", "vllm_triton", "times_ours", 1.5,
     lambda case: case["shape"]["batch"] <= 8),
    *((f"{name}, {rows} row{'s' * (rows > 1)}, over {'bf16' if peer == 'cublas' else peer}", f"quantized_{name}", peer,
       "times_ours", ratio, _rows(rows)) for name, peer, rows, ratio in _ROWS),
    *((f"{name}, 1 row, fraction from 32 MB", f"quantized_{name}", "potstill", "roofline_fraction", 0.75,
       _rows(1, 32e6)) for name in FORMATS),
    ("distillation, 8k x 128k, over chunks", "losses_distillation", "chunked", "times_ours", 1.5, _long_loss()),
    ("distillation, 8k x 128k, over Liger's JSD", "losses_distillation", "liger", "times_ours", 1.2,
     _long_loss(kind="jsd")),
    ("distillation, 8k x 128k, memory of dense", "losses_distillation", "dense", "times_our_peak", 1 / 0.15,
     _long_loss()),
))
# fmt: on


def compare(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each goal its worst case; none where nothing that it concerns was measured."""
    cases = {part["part"]: part["cases"] for part in parts}
    for goal in GOALS:
        concerned = [case for case in cases.get(goal.part, []) if goal.concerns(case)]
        found = [(case["candidates"].get(goal.candidate, {}).get(goal.figure), case["name"]) for case in concerned]
        figures = [(figure, name) for figure, name in found if figure is not None]
        worst, shape = min(figures, default=(None, None))
        yield {
            "goal": goal.text, "at_least": goal.at_least, "shapes": len(figures), "worst": worst,
            "worst_shape": shape, "reached": None if worst is None else worst >= goal.at_least,
        }  # fmt: skip


def describe(goal: dict[str, Any]) -> str:
    """One line."""
    if goal["worst"] is None:
        return f"  {goal['goal']:50} at least {goal['at_least']:.2f}: not measured"
    word = "reached" if goal["reached"] else "MISSED"
    where = f"worst {goal['worst']:.2f} of {goal['shapes']} shapes, at {goal['worst_shape']}"
    return f"  {goal['goal']:50} at least {goal['at_least']:.2f}: {word}, {where}"
