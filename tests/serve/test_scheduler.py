"""The scheduler without a model: budgets, order, preemption, progress. Steps are committed as the engine does."""

import cProfile
import random
from collections.abc import Callable

import pytest

from serve.engine.kv_cache import BlockTable, KVCache, pages_for
from serve.engine.requests import Sequence, TextStream
from serve.engine.scheduler import WORTH_DIVIDING, Schedule, Scheduler
from serve.sampling_params import SamplingParams
from tests.serve.toys import toy_tokenizer

TOKENIZER = toy_tokenizer()


class Bench:
    """A scheduler, and requests that end after a given number of tokens."""

    def __init__(self, *, num_pages: int = 32, max_num_seqs: int = 8, budget: int = 32) -> None:
        self.cache = KVCache(num_pages)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=num_pages * 16,
        )
        self.sequences: dict[int, Sequence] = {}
        self.finished: list[int] = []

    def add(self, num_prompt: int, num_output: int, *, priority: int = 0, arrival: float = 0.0, n: int = 1) -> Sequence:
        first = len(self.sequences) + len(self.finished)
        choices = [
            Sequence(
                id=first + index,
                request_id=str(first),
                index=index,
                params=SamplingParams(max_tokens=num_output),
                tokens=[first + 1] * num_prompt,
                num_prompt_tokens=num_prompt,
                arrival=arrival,
                priority=priority,
                deadline=None,
                seed=0,
                end_token_ids=(),
                table=BlockTable(self.cache.num_pages),
                text=TextStream(TOKENIZER),  # type: ignore[arg-type]
            )
            for index in range(n)
        ]
        choices[0].siblings = choices[1:]
        self.sequences |= {sequence.id: sequence for sequence in choices}
        self.scheduler.add(choices[0])
        return choices[0]

    def step(self, draft_length: Callable[[Sequence], int] = lambda _: 0) -> Schedule:
        decoding = {s.id for s in self.scheduler.running if s.num_pending == 1}
        schedule = self.scheduler.schedule(draft_length)
        scheduled = {chunk.sequence_id for chunk in schedule.chunks}
        assert schedule.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(scheduled) == len(schedule.chunks)
        assert decoding <= scheduled | set(schedule.preempted), "a decode was left out"
        assert sum(s.num_batch_rows for s in self.scheduler.running) <= self.scheduler.max_num_seqs
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda s: s.order)
        for chunk in schedule.chunks:
            sequence = self.sequences[chunk.sequence_id]
            assert chunk.start == sequence.num_computed and chunk.num_tokens > 0
            assert pages_for(chunk.start + chunk.num_tokens + chunk.num_drafts) <= sequence.table.num_pages
            self.commit(sequence, chunk.num_tokens)
        return schedule

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_computed += num_tokens
        if sequence.num_pending:
            return
        for emitting in (sequence, *self.scheduler.fork(sequence)):
            emitting.tokens.append(0)
            self.cache.trim(emitting.table, emitting.num_tokens)
            if emitting.num_output == emitting.params.max_tokens:
                self.scheduler.remove(emitting)
                del self.sequences[emitting.id]
                self.finished.append(emitting.id)

    def drain(self, draft_length: Callable[[Sequence], int] = lambda _: 0, limit: int = 50_000) -> None:
        for _ in range(limit):
            if not self.sequences:
                break
            assert self.step(draft_length).chunks, "deadlock: nothing was scheduled"
        assert not self.sequences
        assert self.cache.num_used == 0 and not any(self.cache.pool.holders)


@pytest.mark.parametrize("seed", range(30))
def test_every_load_drains_within_the_budget(seed: int) -> None:
    random_ = random.Random(seed)
    bench = Bench(num_pages=random_.choice([6, 12, 40]), max_num_seqs=random_.choice([1, 4, 9]), budget=16)
    longest = bench.cache.num_pages * 16
    drafts = random_.choice([0, 3])
    for _ in range(40):
        num_prompt = random_.randint(1, longest // 2)
        num_output = random_.randint(1, longest // 2 - 1)
        n = random_.randint(1, min(3, bench.scheduler.max_num_seqs))
        bench.add(num_prompt, num_output, priority=random_.choice([0, 0, 1]), n=n)
        if random_.random() < 0.3:
            bench.step(lambda _: drafts)
    bench.drain(lambda _: drafts)
    if bench.cache.num_pages == 6 and bench.scheduler.max_num_seqs > 1:
        assert bench.scheduler.num_preemptions > 0


def test_two_giants_that_only_fit_one_by_one_both_finish() -> None:
    bench = Bench(num_pages=10, budget=16)
    first, second = bench.add(140, 10), bench.add(140, 10)
    bench.step()
    assert first.is_running and not second.is_running  # no pages for half of the second
    bench.drain()
    assert bench.finished == [first.id, second.id]
    assert bench.scheduler.num_preemptions == 0


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    bench = Bench(num_pages=64, budget=8)
    short = bench.add(4, 50)
    bench.step()
    bench.add(400, 1, priority=-1)  # goes before the decode in every order but this one
    for _ in range(20):
        before = short.num_tokens
        schedule = bench.step()
        assert short.num_tokens == before + 1
        assert schedule.num_tokens == 8  # the prompt takes all that is left


def test_earlier_and_more_urgent_requests_go_first() -> None:
    bench = Bench(max_num_seqs=1)
    late = bench.add(4, 2, arrival=2.0)
    early = bench.add(4, 2, arrival=1.0)
    urgent = bench.add(4, 2, arrival=3.0, priority=-1)
    bench.drain()
    assert bench.finished == [urgent.id, early.id, late.id]


def test_the_last_one_is_preempted_and_comes_back_first() -> None:
    bench = Bench(num_pages=4, budget=32)
    first, second = bench.add(16, 40), bench.add(14, 40)
    third = bench.add(4, 1)
    preempted: list[int] = []
    while not preempted:
        preempted += bench.step().preempted
    assert preempted == [second.id]
    assert second.num_computed == 0 and second.num_output > 0 and second.table.num_pages == 0
    assert bench.scheduler.waiting == [second, third]
    bench.drain()
    assert bench.finished.index(first.id) < bench.finished.index(second.id)


def test_nobody_is_preempted_for_a_draft() -> None:
    bench = Bench(num_pages=4)
    for _ in range(2):
        bench.add(14, 18)
    bench.drain(lambda _: 8)
    assert bench.scheduler.num_preemptions == 0


def test_drafts_take_only_what_decodes_leave() -> None:
    bench = Bench(num_pages=64, max_num_seqs=8, budget=10)
    for _ in range(8):
        bench.add(1, 20)
    while sum(s.num_pending == 1 for s in bench.scheduler.running) < 8:
        bench.step()
    schedule = bench.step(lambda _: 5)
    assert sum(chunk.num_tokens for chunk in schedule.chunks) == 8
    assert sum(chunk.num_drafts for chunk in schedule.chunks) == 2


def test_drafts_stop_at_the_longest_sequence() -> None:
    bench = Bench(num_pages=2)
    sequence = bench.add(28, 4)
    bench.step()
    assert sequence.num_tokens == 29
    (chunk,) = bench.step(lambda _: 8).chunks
    assert chunk.start + 1 + chunk.num_drafts == 32 == bench.scheduler.max_model_len


def test_choices_take_batch_rows_before_they_fork() -> None:
    bench = Bench(max_num_seqs=4)
    leader = bench.add(40, 5, n=3)
    other = bench.add(4, 5, n=2)
    bench.step()
    assert leader.is_running and not other.is_running
    bench.step()
    assert len(bench.scheduler.running) == 3
    assert bench.cache.num_used == 3  # one prompt, held by three
    bench.step()
    assert bench.cache.num_used == 5  # two of three have copied the last page, which is not full
    bench.drain()


def test_a_step_costs_the_same_however_many_wait() -> None:
    """In Python calls, which no other process changes: a few for a sequence that decodes, none for one that waits."""

    def num_calls(num_waiting: int) -> int:
        bench = Bench(num_pages=1000, max_num_seqs=100, budget=4000)
        for number in range(100 + num_waiting):
            bench.add(20, 100, arrival=float(number))
        bench.step()
        bench.step()  # the first decode of a sequence looks at its pages
        assert (len(bench.scheduler.running), len(bench.scheduler.waiting)) == (100, num_waiting)
        profiler = cProfile.Profile()
        profiler.runcall(bench.scheduler.schedule)
        return sum(entry.callcount for entry in profiler.getstats())

    alone = num_calls(0)
    assert alone <= 15 * 100 and num_calls(1000) <= alone + 5


def test_the_budget_must_hold_a_token_for_every_sequence() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Scheduler(KVCache(4), max_num_seqs=8, max_num_batched_tokens=4, max_model_len=64)


W = WORTH_DIVIDING


@pytest.mark.parametrize("sizes", [[W], [2 * W - 1], [W, W], [W + 1, W], [2 * W, 2 * W]])
def test_those_that_decode_are_divided_evenly_where_it_pays(sizes: list[int]) -> None:
    bench = Bench(num_pages=64, max_num_seqs=64, budget=512)
    for _ in range(sum(sizes)):
        bench.add(5, 9)
    bench.step()
    for size in [*sizes, 0]:
        chunks = bench.scheduler.schedule(num_groups=2).chunks
        assert len(chunks) == size
        for chunk in chunks:  # what it draws is not known yet
            bench.sequences[chunk.sequence_id].num_computed += 1
