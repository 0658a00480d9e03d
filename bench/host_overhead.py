"""What a decoding step costs the host: Python's time, kernel launches and uploads, with nothing computed.

    python -m bench.host_overhead        # writes bench/results/host-overhead.json; half a minute, no GPU needed

An engine over a model of 32 layers decodes 1, 16 and 256 sequences. Kernels are stubs that count themselves, operators
of torch run on a CPU over tiny tensors, and a replay does nothing: what is left is the time that Python and torch's
dispatcher take before a GPU hears of a step. On a GPU each launch takes some microseconds more, and so does a replay.
Of each figure the least of all steps, in processor time of the one thread; of launches and uploads the most.

`replayed`: a step from a CUDA graph, from the scheduled work to what will be read; `launched`: the same step kernel by
kernel; `step`: all of `Engine.step` around a replay, scheduling and telling clients included. Of a pair, a draft of 4
layers that guesses 4 tokens for requests with temperature 1, the step is one of drafting, verifying and committing: the
device waits for each of its passes.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from bench.common import write_result
from kernels.common.cuda_graph import Graphs, Outputs
from serve.engine import engine as engine_module
from serve.engine.batch_state import Staged
from serve.engine.engine import Engine
from serve.sampling_params import SamplingParams
from tests.serve.toys import make_engine
from tests.tiny import tiny_model

LAYERS, BATCHES, STEPS, PROMPT = 32, (1, 16, 256), 40, 20
DRAFT_LAYERS, NUM_DRAFTS, PAIR_BATCHES = 4, 4, (1, 16)
AS_ON_A_GPU: dict[str, Callable[..., Any]] = {
    "runs_triton": lambda x: True,
    "is_interpreted": lambda x: False,
    "num_processors": lambda device: 132,
    "compute_capability": lambda device: (9, 0),
}


class EmptyGraph:
    """Replays nothing."""

    def __init__(self, pool: Any) -> None:
        """No memory of its own."""

    def capture(self, run: Callable[[], Outputs]) -> Outputs:
        return run()

    def replay(self) -> None:
        """The device would work here."""


@contextmanager
def stubs() -> Iterator[Counter[str]]:
    """Kernels that count themselves as `launches` and compute nothing, and uploads, counted."""
    counts: Counter[str] = Counter()
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def launcher(self: JITFunction, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: counts.update(launches=1)

    def counted(upload: Callable[..., Any]) -> Callable[..., Any]:
        def uploading(*args: Any) -> Any:
            counts["uploads"] += 1
            return upload(*args)

        return uploading

    replace(JITFunction, "__getitem__", launcher)
    replace(torch, "from_numpy", counted(torch.from_numpy))
    replace(Staged, "upload", counted(Staged.upload))
    replace(torch, "empty", torch.zeros)  # what no kernel has written must still be a token
    for name, module in list(sys.modules.items()):
        for function in vars(module).keys() & AS_ON_A_GPU.keys() if name.startswith(("kernels.", "model.")) else ():
            replace(module, function, AS_ON_A_GPU[function])
    try:
        yield counts
    finally:
        for owner, name, old in reversed(replaced):
            setattr(owner, name, old)


def decoding_engine(batch: int, *, captures: bool, drafts: bool) -> Engine:
    """An engine amid decoding so many sequences, every kind of kernel met once."""
    sizes = {"vocab_size": 512, "seed": 1}
    draft = tiny_model(num_layers=DRAFT_LAYERS, **sizes) if drafts else None
    graphs = Graphs(EmptyGraph) if captures else None
    choose = engine_module.graphs_on
    engine_module.graphs_on = lambda device: graphs
    try:
        options = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_pages": 4096}
        options["num_speculative_tokens"] = NUM_DRAFTS if drafts else None
        engine = make_engine(tiny_model(num_layers=LAYERS, **sizes), draft, **options)
    finally:
        engine_module.graphs_on = choose
    engine.max_pending = 1
    for number in range(batch):
        params = SamplingParams(max_tokens=200, ignore_eos=True, top_p=0.9, seed=None if drafts else number)
        engine.add_request(str(number), [2] * PROMPT, params)
    for _ in range(6):
        engine.step()
    return engine


def measure(batch: int, *, captures: bool) -> dict[str, float]:
    """Of a launched step and of `Engine.step`: microseconds, launches, uploads."""
    launches: list[tuple[float, int, int]] = []
    steps = []
    with stubs() as counts:
        engine = decoding_engine(batch, captures=captures, drafts=False)
        launch = engine.launch_pass

        def timed(work: Any) -> Any:
            counts.clear()
            began = time.thread_time()
            pending = launch(work)
            launches.append((time.thread_time() - began, counts["launches"], counts["uploads"]))
            return pending

        engine.launch_pass = timed  # type: ignore[method-assign]
        for _ in range(STEPS):
            began = time.thread_time()
            engine.step()
            steps.append(time.thread_time() - began)
    seconds = min(seconds for seconds, _, _ in launches)
    # A page fills up in one step of sixteen.
    most_launches, most_uploads = (max(column) for column in list(zip(*launches, strict=True))[1:])
    return {
        "microseconds": round(1e6 * seconds, 1),
        "launches": most_launches,
        "uploads": most_uploads,
        "step_microseconds": round(1e6 * min(steps), 1),
    }


def measure_pair(batch: int, *, captures: bool) -> dict[str, float]:
    """Of a step of a pair: microseconds, launches, uploads."""
    steps: list[tuple[float, int, int]] = []
    with stubs() as counts:
        engine = decoding_engine(batch, captures=captures, drafts=True)
        for _ in range(STEPS):
            counts.clear()
            began = time.thread_time()
            engine.step()
            steps.append((time.thread_time() - began, counts["launches"], counts["uploads"]))
    seconds, launches, uploads = zip(*steps, strict=True)
    return {"microseconds": round(1e6 * min(seconds), 1), "launches": max(launches), "uploads": max(uploads)}


def compare(title: str, batches: tuple[int, ...], measured: Callable[..., dict[str, float]]) -> dict[str, Any]:
    """Steps from graphs beside steps kernel by kernel, by batch; a line of a table for each."""
    result = {}
    print(f"{title:>9} {'replayed':>10} {'uploads':>8} {'step':>10} {'launched':>10} {'launches':>9}")
    for batch in batches:
        replayed, launched = (measured(batch, captures=captures) for captures in (True, False))
        result[str(batch)] = {"replayed": replayed, "launched": launched}
        step = replayed.get("step_microseconds", replayed["microseconds"])
        print(f"{batch:9} {replayed['microseconds']:7.0f} µs {replayed['uploads']:8} {step:7.0f} µs", end=" ")
        print(f"{launched['microseconds']:7.0f} µs {launched['launches']:9}")
    return result


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    result = compare("sequences", BATCHES, measure)
    pairs = compare("of a pair", PAIR_BATCHES, measure_pair)
    pair = {"draft_layers": DRAFT_LAYERS, "draft_tokens": NUM_DRAFTS, "sequences": pairs}
    figures = {"layers": LAYERS, "sequences": result, "pair": pair}
    write_result("host-overhead", "python -m bench.host_overhead", figures)


if __name__ == "__main__":
    main()
