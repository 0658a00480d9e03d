"""What the kernels should reach on a Hopper GPU, and where they are furthest from it.

A goal names a candidate, one of its figures, and the least that the figure may be, over all shapes of a part that the
goal is about. `times_ours` of a peer is how many times as long as ours it takes, `times_our_peak` how many times as
much memory. `compare` finds the worst shape.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LARGE_BYTES = 256 * 2**20
LARGE_MATRIX_BYTES = 32e6
LONG_LOSS = {"tokens": 8192, "vocabulary": 131_072}
QUANTIZED = ("nf4", "int4", "int8", "fp8")


@dataclass(frozen=True)
class Goal:
    """`figure` of `candidate` must be at least `at_least` in every case of `part` that `concerns` accepts."""

    text: str
    part: str
    candidate: str
    figure: str
    at_least: float
    concerns: Callable[[dict[str, Any]], bool]


def _heads_of(size: int) -> Callable[[dict[str, Any]], bool]:
    return lambda case: case["shape"]["head_dim"] == size and case["shape"]["length"] >= 4096


def _any(case: dict[str, Any]) -> bool:
    return True


def _large(case: dict[str, Any]) -> bool:
    return case["bytes"] >= LARGE_BYTES


def _few_sequences(case: dict[str, Any]) -> bool:
    return case["shape"]["batch"] <= 8


def _rows(number: int) -> Callable[[dict[str, Any]], bool]:
    return lambda case: case["shape"]["rows"] == number


def _one_row_of_a_large_matrix(case: dict[str, Any]) -> bool:
    return case["shape"]["rows"] == 1 and case["bytes"] >= LARGE_MATRIX_BYTES


def _long_loss(case: dict[str, Any]) -> bool:
    return LONG_LOSS.items() <= case["shape"].items()


def _long_jsd(case: dict[str, Any]) -> bool:
    return _long_loss(case) and case["shape"]["kind"] == "jsd"


def _quantized_goals() -> Iterator[Goal]:
    for peer, part in (
        ("bitsandbytes", "nf4"),
        ("bitsandbytes gemv", "nf4"),
        ("torch_int4", "int4"),
        ("gemlite", "int4"),
    ):
        yield Goal(f"{part}, 1 row, over {peer}", f"quantized_{part}", peer, "times_ours", 1.0, _rows(1))
    yield Goal("nf4, 16 rows, over bitsandbytes", "quantized_nf4", "bitsandbytes", "times_ours", 1.3, _rows(16))
    yield Goal("int4, 16 rows, over GemLite", "quantized_int4", "gemlite", "times_ours", 2.0, _rows(16))
    yield Goal("int4, 16 rows, over Marlin", "quantized_int4", "marlin", "times_ours", 0.95, _rows(16))
    for name in QUANTIZED:
        part, concerned = f"quantized_{name}", _one_row_of_a_large_matrix
        yield Goal(f"{name}, 1 row, fraction from 32 MB", part, "potstill", "roofline_fraction", 0.75, concerned)
        yield Goal(f"{name}, 64 rows, over bf16", part, "cublas", "times_ours", 1.0, _rows(64))
        yield Goal(f"{name}, 256 rows, over bf16", part, "cublas", "times_ours", 0.95, _rows(256))


LOSSES = "losses_distillation"

GOALS = (
    Goal("forward d128, 4k-16k, over SDPA flash", "flash_forward", "sdpa_flash", "times_ours", 1.6, _heads_of(128)),
    Goal("forward d128, 4k-16k, over SDPA cuDNN", "flash_forward", "sdpa_cudnn", "times_ours", 1.0, _heads_of(128)),
    Goal("forward d64, 4k-16k, over SDPA cuDNN", "flash_forward", "sdpa_cudnn", "times_ours", 1.0, _heads_of(64)),
    Goal(
        "forward + backward d128, 4k-16k, over SDPA cuDNN",
        "flash_forward_backward",
        "sdpa_cudnn",
        "times_ours",
        0.95,
        _heads_of(128),
    ),
    Goal("decode over FlashInfer", "decode", "flashinfer", "times_ours", 1.0, _any),
    Goal("decode over vLLM's Triton", "decode", "vllm_triton", "times_ours", 1.1, _any),
    Goal("decode, fraction of the limit from 256 MB", "decode", "potstill", "roofline_fraction", 0.85, _large),
    Goal("verification: plain decode over ours", "verify", "decode", "times_ours", 1 / 1.05, _any),
    Goal("verification over vLLM's Triton, batch to 8", "verify", "vllm_triton", "times_ours", 1.5, _few_sequences),
    *_quantized_goals(),
    Goal("distillation, 8k x 128k, over chunks", LOSSES, "chunked", "times_ours", 1.5, _long_loss),
    Goal("distillation, 8k x 128k, over Liger's JSD", LOSSES, "liger", "times_ours", 1.2, _long_jsd),
    Goal("distillation, 8k x 128k, memory of dense", LOSSES, "dense", "times_our_peak", 1 / 0.15, _long_loss),
)


def compare(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each goal its worst case; none where nothing that it concerns was measured."""
    cases = {part["part"]: part["cases"] for part in parts}
    for goal in GOALS:
        figures = {}
        for case in cases.get(goal.part, []):
            found = case["candidates"].get(goal.candidate, {})
            if goal.figure in found and goal.concerns(case):
                figures[case["name"]] = found[goal.figure]
        worst = min(figures, key=lambda name: figures[name], default=None)
        yield {
            "goal": goal.text,
            "at_least": goal.at_least,
            "shapes": len(figures),
            "worst": None if worst is None else figures[worst],
            "worst_shape": worst,
            "reached": None if worst is None else figures[worst] >= goal.at_least,
        }


def describe(goal: dict[str, Any]) -> str:
    """One line."""
    if goal["worst"] is None:
        return f"  {goal['goal']:50} at least {goal['at_least']:.2f}: not measured"
    word = "reached" if goal["reached"] else "MISSED"
    where = f"worst {goal['worst']:.2f} of {goal['shapes']} shapes, at {goal['worst_shape']}"
    return f"  {goal['goal']:50} at least {goal['at_least']:.2f}: {word}, {where}"
