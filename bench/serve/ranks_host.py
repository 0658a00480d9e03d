"""What several ranks cost rank 0 in a decoding step, beside what they compute.

    python -m bench.serve.ranks_host        # writes bench/results/ranks-host-cpu.json; some seconds

The model is a table, so that a step is scheduling, telling the followers, drawing and reporting. Followers are
processes that read what they are told and do nothing. Steps of one rank and of several take turns; of each figure the
least and the median of all steps, in processor time of the engine's thread.
"""

import argparse
import statistics
import time
from itertools import product

import torch

from bench.common import write_result
from serve.engine.engine import Engine
from serve.engine.ranks import Ranks
from serve.sampling_params import SamplingParams
from tests.ranks import idle_ranks
from tests.serve.toys import VOCAB_SIZE, TableModel, make_engine

RANKS, BATCHES, STEPS, PROMPT = (2, 4, 8), (1, 16, 256), 300, 20


def decoding_engine(batch: int, ranks: Ranks | None) -> Engine:
    """Amid decoding so many sequences."""
    table = TableModel(torch.full((VOCAB_SIZE, VOCAB_SIZE), 1 / VOCAB_SIZE))
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_pages": 8192, "max_model_len": 512}
    engine = make_engine(table, ranks=ranks, **sizes)
    for number in range(batch):
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + 20, ignore_eos=True)
        engine.add_request(str(number), [2] * PROMPT, params)
    for _ in range(6):
        engine.step()
    return engine


def measure(batch: int, count: int, steps: int = STEPS) -> list[tuple[float, float]]:
    """Microseconds of a step, least and median, over one rank and over so many."""
    with idle_ranks(count) as ranks:
        engines = decoding_engine(batch, None), decoding_engine(batch, ranks)
        taken: tuple[list[float], list[float]] = [], []
        for _ in range(steps):
            for engine, seconds in zip(engines, taken, strict=True):
                began = time.thread_time()
                engine.step()
                seconds.append(time.thread_time() - began)
    return [(round(1e6 * min(seconds), 1), round(1e6 * statistics.median(seconds), 1)) for seconds in taken]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    figures = []
    for batch, count in product(BATCHES, RANKS):
        one, several = measure(batch, count)
        more = [round(ours - alone, 1) for ours, alone in zip(several, one, strict=True)]
        figures.append({"sequences": batch, "ranks": count, "one_rank": one, "several": several, "more": more})
        print(f"{batch:4} sequences, {count} ranks: {one[0]:.0f} µs and {more[0]:.0f} µs more")
    result = {"unit": "microseconds, least and median", "steps": STEPS, "decoding": figures}
    write_result("ranks-host-cpu", "python -m bench.serve.ranks_host", result)


if __name__ == "__main__":
    main()
