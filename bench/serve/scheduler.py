"""What planning a step costs the host: 256 sequences decode, 1,000 wait, and there is no model.

    python -m bench.serve.scheduler      # writes bench/results/scheduler.json; seconds

Processor time of one thread, the median and the least of all steps.
"""

import statistics
import time

from bench.common import write_result
from tests.serve.test_scheduler import Bench

RUNNING, WAITING, PROMPT, STEPS = 256, 1000, 20, 200


def step_ms(num_drafts: int) -> list[float]:
    bench = Bench(num_pages=RUNNING * 40, max_num_seqs=RUNNING, budget=8192)
    for number in range(RUNNING + WAITING):
        bench.add(PROMPT, STEPS + 10, arrival=float(number))
    bench.step()
    if (len(bench.scheduler.running), len(bench.scheduler.waiting)) != (RUNNING, WAITING):
        raise SystemExit("not all run and wait that should")
    taken = []
    for _ in range(STEPS):
        begin = time.thread_time()
        schedule = bench.scheduler.schedule(lambda _: num_drafts)
        taken.append(1e3 * (time.thread_time() - begin))
        for chunk in schedule.chunks:
            bench.commit(bench.sequences[chunk.sequence_id], chunk.num_tokens)
    return taken


def main() -> None:
    result = {"running": RUNNING, "waiting": WAITING, "unit": "milliseconds of one thread's processor time"}
    for num_drafts in (0, 4):
        taken = step_ms(num_drafts)
        figures = {"median": statistics.median(taken), "least": min(taken)}
        print(num_drafts, "draft tokens:", figures)
        result[f"{num_drafts}_draft_tokens"] = figures
    write_result("scheduler", "python -m bench.serve.scheduler", result)


if __name__ == "__main__":
    main()
