"""What the kernels should reach on a Hopper GPU, and where they are furthest from it.

A goal names a candidate, one of its figures, and the least that the figure may be, over all shapes of a part that the
goal is about. `times_ours` of a peer is how many times as long as ours it takes. `judge` finds the worst shape.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LARGE_BYTES = 256 * 2**20


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
)


def judge(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
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
