"""Where a decode step leaves the GPU idle: a profiler trace of the engine, and the gaps between its kernels.

    python -m bench.serve.decode_trace FOLDER [--draft FOLDER|ngram] [--batch 8] [--steps 50] [--trace trace.json]

A step that never waits for the host launches its kernels faster than they run: the gaps are those of the hardware, a
few microseconds, and none has the length of a step. Beside the gaps it prints every call by which the host waited for
the device: without a draft there must be none but one a step, the event behind the tokens of the step before.
"""

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from serve import LLM, SamplingParams

WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Of the CUDA runtime."""


def find_gaps(kernels: Iterable[tuple[float, float]]) -> list[float]:
    """The idle times between kernels (begin, end), in their unit; overlapping kernels leave none."""
    ordered = sorted(kernels)
    busy_until = accumulate((end for _, end in ordered), max)
    return [begin - end for (begin, _), end in zip(ordered[1:], busy_until, strict=False) if begin > end]


def kernel_times(profiler: profile) -> list[tuple[float, float]]:
    """Begin and end of all that ran on the GPU, in microseconds."""
    events = profiler.events() or []
    return [(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"]


def trace(llm: LLM, batch: int, steps: int, path: str | None) -> None:
    engine, random_ = llm.engine, random.Random(0)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8 * steps + 64, ignore_eos=True)
    for number in range(batch):
        engine.add_request(str(number), random_.choices(range(engine.vocab_size), k=64), params)
    for _ in range(20):  # prompts, and whatever is compiled at first use
        engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    for number in range(batch):
        engine.abort(str(number))
    if path is not None:
        profiler.export_chrome_trace(path)
    report(profiler, steps)


def report(profiler: profile, steps: int) -> None:
    events, kernels = profiler.events() or [], kernel_times(profiler)
    gaps = find_gaps(kernels)
    span = max(end for _, end in kernels) - min(begin for begin, _ in kernels)
    print(f"{steps} steps, {len(kernels) / steps:.0f} kernels and {span / steps:.0f} us each")
    print(f"idle {100 * sum(gaps) / span:.1f}% of the time; gaps in us: {describe(gaps)}")
    waits = Counter(event.name for event in events if event.name in WAITING_CALLS)
    print("calls that wait for the device, per step:", {name: count / steps for name, count in waits.items()})


def describe(gaps: list[float]) -> str:
    if len(gaps) < 2:
        return "none"
    hundredths = statistics.quantiles(gaps, n=100)
    return f"median {hundredths[49]:.1f}, 99th percentile {hundredths[98]:.1f}, longest {max(gaps):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--draft", help='folder of a draft, or "ngram"')
    parser.add_argument("--batch", type=int, default=8, help="sequences that decode")
    parser.add_argument("--steps", type=int, default=50, help="steps that are traced")
    parser.add_argument("--trace", help="file for the trace, to be opened in a browser's tracing page")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decode_trace needs a GPU: on a CPU no kernel runs beside the host.")
    trace(LLM(options.model, draft=options.draft), options.batch, options.steps, options.trace)


if __name__ == "__main__":
    main()
