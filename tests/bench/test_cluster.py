"""Simulated clusters: nothing is lost uncounted, queues are as long as theory has them, and runs repeat to the bit."""

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cluster import simulation
from bench.cluster.__main__ import NAME, SCENARIOS, drawn, engine_shape, over_time, simulate
from bench.cluster.replica import EngineShape, Replica
from bench.cluster.routers import ROUTERS
from bench.cluster.simulation import Autoscaler, Failure, Outcome, Simulation, percentile, summary
from bench.cluster.trace import Conversation, Request, Traffic, Turn, blocks_of
from bench.common import RESULTS
from bench.models import LLAMA_8B, shaped
from model.cost import GPUS, Gpu, OnGpus, Roofline, Served
from pipeline.plan_serving import placements
from serve.engine.kv_cache import pages_for
from tests.tiny import tiny_config

TOY = Roofline(OnGpus(Served(tiny_config())), Gpu("toy", 1 << 30, 1e9, 1e10, 1e9))
"""A step takes some hundreds of microseconds."""
SMALL = EngineShape(TOY, num_pages=64, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)
SCALER = Autoscaler(1, 3, start_s=0.05, every_s=0.01, upscale_s=0.02, downscale_s=0.1, look_back_s=0.03)
LONGEST_STEP_S = TOY.step_s([(448, 57), *[(511, 1)] * 7], rows=8)
TRAFFIC = Traffic(
    conversations=60, seconds=0.1, systems=6, system_tokens=64, message_tokens=12, answer_tokens=8, most_tokens=40,
    pause_s=0.02,
)  # fmt: skip


def run(
    trace: Sequence[Conversation], shape: EngineShape = SMALL, router: str = "round robin", **settings: Any
) -> Outcome:
    return Simulation(trace, shape, ROUTERS[router](), **({"replicas": 2} | settings)).run()


def single(number: int, begin_s: float, prompt: int, answer: int = 1) -> Conversation:
    """One turn that shares nothing with others."""
    return Conversation(number, begin_s, 0, 0, (Turn(prompt, answer, 0.0),))


def all_pages_are_free(outcome: Outcome) -> bool:
    return all(one.cache.num_used == 0 and not any(one.cache.pool.holders) for one in outcome.replicas)


# --- conservation -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    router=st.sampled_from(list(ROUTERS)),
    count=st.integers(1, 5),
    deaths=st.lists(st.floats(0.0, 0.2), max_size=4),
    retries=st.booleans(),
    is_scaled=st.booleans(),
)
def test_every_request_finishes_or_is_counted_lost(
    seed: int, router: str, count: int, deaths: list[float], retries: bool, is_scaled: bool
) -> None:
    scaler = replace(SCALER, maximum=6) if is_scaled else None
    failures = [Failure(at_s) for at_s in deaths[: None if is_scaled else count - 1]]
    trace = replace(TRAFFIC, conversations=40).trace(seed)
    outcome = run(trace, router=router, replicas=count, failures=failures, retries=retries, autoscaler=scaler)
    found, turns = summary(outcome), sum(len(conversation.turns) for conversation in trace)
    assert found["finished"] + found["lost"] == found["requests"]
    assert found["requests"] + outcome.num_unasked == turns
    assert not (retries and found["lost"]) and (failures or not found["lost"] + found["retried"])
    for request in outcome.requests:
        assert request.is_lost == (request.end_s is None)
        if request.end_s is not None:
            assert request.first_s is not None and request.arrival_s < request.first_s <= request.end_s
    assert all_pages_are_free(outcome)
    assert all(not one.requests and one.outstanding_tokens == 0 for one in outcome.replicas)


def test_a_cluster_that_died_out_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="turns never came to an end: no replica takes requests"):
        run(TRAFFIC.trace(0), replicas=1, failures=[Failure(0.05)])


def test_what_a_death_cuts_off_is_lost_or_asked_for_again_and_nothing_else() -> None:
    trace = TRAFFIC.trace(3)
    lost = run(trace, failures=[Failure(0.05)], retries=False)
    again = run(trace, failures=[Failure(0.05)], retries=True)
    found = summary(lost)
    assert 0 < found["lost"] <= SMALL.max_num_seqs  # those that ran
    cut_off = [request for request in lost.requests if request.is_lost]
    assert all(request.first_s is not None and request.first_s <= 0.05 for request in cut_off)
    assert summary(again)["lost"] == 0 and summary(again)["retried"] >= len(cut_off)
    dead = [replica for replica in lost.replicas if replica.ended_s is not None]
    assert len(dead) == 1 and dead[0].ended_s == 0.05
    assert lost.replica_seconds == pytest.approx(lost.end_s + 0.05)


# --- the engine's own scheduler ---------------------------------------------------------------------------------------


class Watched(Replica):
    """Checks what the scheduler promises, before each step."""

    def begin_step(self) -> float:
        decoding = {one.id for one in self.scheduler.running if one.num_pending == 1}
        preempted = self.scheduler.num_preemptions
        seconds = super().begin_step()
        chunks, running = self._chunks, self.scheduler.running
        scheduled = {chunk.sequence_id for chunk in chunks}
        assert sum(chunk.num_tokens for chunk in chunks) <= self.shape.max_num_batched_tokens
        assert len(running) <= self.shape.max_num_seqs and running == sorted(running, key=lambda one: one.order)
        assert len(decoding - scheduled) <= self.scheduler.num_preemptions - preempted, "a decode was left out"
        for chunk in chunks:
            sequence = self._sequence(chunk)
            assert chunk.start == sequence.num_computed
            assert pages_for(chunk.start + chunk.num_tokens) <= sequence.table.num_pages
        pool = self.cache.pool
        assert sum(holders > 0 for holders in pool.holders) + pool.num_free == pool.num_pages
        assert seconds == self.shape.roofline.step_s([(chunk.start, chunk.num_tokens) for chunk in chunks], self._rows)
        return seconds

    @property
    def _rows(self) -> int:
        return sum(self._sequence(chunk).num_pending == chunk.num_tokens for chunk in self._chunks)


@pytest.mark.parametrize("num_pages", [10, 64])
def test_each_step_is_one_of_the_engines_scheduler(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "Replica", Watched)
    traffic = replace(TRAFFIC, seconds=0.01, system_tokens=16, answer_tokens=30, turns=1)
    outcome = run(traffic.trace(1), replace(SMALL, num_pages=num_pages), replicas=2)
    assert summary(outcome)["finished"] == 60 and all_pages_are_free(outcome)
    assert (summary(outcome)["preemptions"] > 0) == (num_pages == 10)


def test_a_conversation_that_no_replica_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="a conversation of 601 tokens does not fit a replica"):
        run([single(0, 0.0, 600)])


def test_later_turns_find_what_the_earlier_ones_said() -> None:
    talk = Conversation(0, 0.0, 0, 32, (Turn(40, 20, 0.0), Turn(30, 10, 0.5)))
    outcome = run([talk], replicas=1)
    first, second = outcome.requests
    assert second.prompt[: len(first.prompt)] == first.prompt and len(second.prompt) == 32 + 40 + 20 + 30
    assert first.end_s is not None and second.arrival_s == pytest.approx(first.end_s + 0.5)
    (cache,) = (replica.cache for replica in outcome.replicas)
    assert cache.num_hit_tokens == (32 + 40 + 20 - 1) // 16 * 16


# --- queues -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [0.3, 0.7])
def test_one_replica_with_a_batch_of_one_waits_as_an_m_d_1_queue(use: float) -> None:
    """Poisson arrivals, equal work: the mean wait is ρ D / (2 (1 − ρ)), Pollaczek and Khinchine."""
    work_s, draw, at_s = TOY.step_s([(0, 48)], rows=1), random.Random(5), 0.0
    trace = []
    for number in range(12_000):
        at_s += draw.expovariate(use / work_s)
        trace.append(single(number, at_s, 48))
    outcome = run(trace, replace(SMALL, max_num_seqs=1), replicas=1)
    waits = [request.first_s - request.arrival_s - work_s for request in outcome.requests if request.first_s]
    assert len(waits) == len(trace) and min(waits) > -1e-9
    assert statistics.fmean(waits) == pytest.approx(use * work_s / (2 * (1 - use)), rel=0.05)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 4))
def test_more_replicas_are_never_worse_on_the_same_trace(seed: int, count: int) -> None:
    """Twice as many by turns: each has every other request of what one had before.

    One request alone, and so the last, may come when a step has just begun that would have ended with more to compute:
    it waits for that.
    """
    draw = random.Random(seed)
    trace = [single(n, draw.uniform(0, 0.1), draw.randint(8, 200), draw.randint(1, 40)) for n in range(80)]
    trace.sort(key=lambda conversation: conversation.begin_s)
    few, many = run(trace, replicas=count), run(trace, replicas=2 * count)
    before, after = ([first_token(request) for request in outcome.requests] for outcome in (few, many))
    assert all(second <= first + LONGEST_STEP_S for first, second in zip(before, after, strict=True))
    assert statistics.fmean(after) <= statistics.fmean(before)
    assert statistics.fmean(map(whole_answer, many.requests)) <= statistics.fmean(map(whole_answer, few.requests))
    assert last_end(many) <= last_end(few) + LONGEST_STEP_S


def first_token(request: Request) -> float:
    assert request.first_s is not None
    return request.first_s - request.arrival_s


def whole_answer(request: Request) -> float:
    assert request.end_s is not None
    return request.end_s - request.arrival_s


def last_end(outcome: Outcome) -> float:
    return max(request.end_s for request in outcome.requests if request.end_s is not None)


# --- routers ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_prefixes_are_found_more_often_where_the_router_knows_of_them(seed: int) -> None:
    trace = replace(TRAFFIC, seconds=2.0).trace(seed)
    rates = {name: summary(run(trace, router=name, replicas=4))["prefix_hit_rate"] for name in ROUTERS}
    assert rates["prefix aware"] > max(rates["round robin"], rates["least outstanding tokens"])


def test_conversations_stay_where_they_are() -> None:
    outcome = run(replace(TRAFFIC, seconds=4.0).trace(0), router="prefix aware", replicas=4)
    assert all(replica.cache.num_queried_tokens for replica in outcome.replicas)
    talks: dict[int, set[str]] = {}
    router, replicas = ROUTERS["prefix aware"](), [Replica(f"replica {n}", SMALL, 0.0) for n in range(4)]
    for request in outcome.requests:
        talks.setdefault(request.conversation.number, set()).add(router.choose(request, replicas).name)
    assert all(len(names) == 1 for names in talks.values()) and len({*map(tuple, talks.values())}) == 4


def test_the_least_outstanding_tokens_are_those_of_prompts_and_answers() -> None:
    replicas = [Replica(f"replica {n}", SMALL, 0.0) for n in range(3)]
    router = ROUTERS["least outstanding tokens"]()
    sizes = [(100, 10), (20, 5), (20, 4), (50, 1), (1, 1)]
    chosen = []
    for number, (prompt, answer) in enumerate(sizes):
        request = Request(number, single(number, 0.0, prompt, answer), 0, 0.0)
        chosen.append(router.choose(request, replicas))
        chosen[-1].add(request)
    assert [replicas.index(one) for one in chosen] == [0, 1, 2, 2, 1]


def test_blocks_stand_for_all_tokens_up_to_them() -> None:
    common, one, other = [1] * 128, [2] * 64, [3] * 64
    assert blocks_of(common + one)[:2] == blocks_of(common + other)[:2] == blocks_of(common)
    assert blocks_of(common + one)[2] != blocks_of(common + other)[2]
    assert blocks_of(one + common)[1:] != blocks_of(common) and blocks_of([1] * 63) == []


# --- the autoscaler ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaled() -> tuple[Outcome, Autoscaler, list[Conversation]]:
    """A burst between two quiet times."""
    scaler = replace(SCALER, minimum=2, maximum=8, start_s=0.1)
    trace = replace(TRAFFIC, conversations=600, seconds=2.0, bursts=((0.5, 0.8, 20.0),)).trace(7)
    return run(trace, replicas=2, autoscaler=scaler), scaler, trace


def test_the_autoscaler_grows_in_a_burst_and_comes_back_to_its_minimum(scaled: Any) -> None:
    outcome, scaler, _ = scaled
    samples = outcome.samples
    assert samples[0].ready == samples[-1].ready == scaler.minimum
    assert sum(replica.ended_s is None for replica in outcome.replicas) == scaler.minimum
    assert scaler.minimum < summary(outcome)["most_replicas"] <= scaler.maximum
    assert all(one.ready + one.starting <= scaler.maximum for one in samples)
    assert max(one.ready for one in samples) > scaler.minimum


def test_more_and_fewer_must_have_been_wanted_for_some_time(scaled: Any) -> None:
    outcome, scaler, _ = scaled
    begins = [replica.began_s for replica in outcome.replicas if replica.began_s > 0]
    ends = [replica.ended_s for replica in outcome.replicas if replica.ended_s is not None]
    assert min(begins) >= 0.5 + scaler.upscale_s  # of the burst
    assert min(ends) >= 0.5 + scaler.upscale_s + scaler.downscale_s
    quiet = replace(scaler, upscale_s=100.0)
    never = run(replace(TRAFFIC, conversations=600).trace(7), replicas=2, autoscaler=quiet)
    assert summary(never)["most_replicas"] == 2 and max(one.waiting for one in never.samples) > 8


def test_new_replicas_take_requests_after_their_start_and_drained_ones_lose_none(scaled: Any) -> None:
    outcome, scaler, trace = scaled
    late = [replica for replica in outcome.replicas if replica.began_s > 0]
    served = [replica for replica in late if replica.cache.num_queried_tokens]
    assert served and summary(outcome)["lost"] == summary(outcome)["retried"] == 0
    assert summary(outcome)["finished"] == sum(len(conversation.turns) for conversation in trace)
    for began_s in {replica.began_s for replica in served}:
        before = [one for one in outcome.samples if began_s < one.at_s < began_s + scaler.start_s - 1e-9]
        assert before and all(one.starting for one in before)


def test_scaling_costs_less_than_the_most_and_waits_less_than_the_least(scaled: Any) -> None:
    outcome, scaler, trace = scaled
    least, most = (run(trace, replicas=count) for count in (scaler.minimum, scaler.maximum))
    assert summary(most)["ttft_s"]["p99"] <= summary(outcome)["ttft_s"]["p99"] < summary(least)["ttft_s"]["p99"]
    assert outcome.replica_seconds < scaler.maximum * outcome.end_s
    assert outcome.replica_seconds > scaler.minimum * outcome.end_s
    paid = over_time(outcome)["replica_seconds"]
    assert paid == sorted(paid) and paid[0] == 0
    assert 0 <= outcome.replica_seconds - paid[-1] <= scaler.maximum * scaler.every_s


def test_a_replica_that_dies_is_replaced() -> None:
    scaler = replace(SCALER, minimum=2, maximum=2)
    outcome = run(TRAFFIC.trace(2), autoscaler=scaler, failures=[Failure(0.02), Failure(0.03)])
    assert len(outcome.replicas) == 4 and outcome.samples[-1].ready == 2
    assert summary(outcome)["finished"] == len(outcome.requests)


# --- traces, figures, files -------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    def told(seed: int) -> str:
        scaler = replace(SCALER, maximum=4)
        outcome = run(TRAFFIC.trace(seed), router="prefix aware", autoscaler=scaler, failures=[Failure(0.05)])
        return json.dumps([summary(outcome), [vars(sample) for sample in outcome.samples]])

    assert told(4) == told(4) != told(5)


def test_bursts_and_lengths_are_as_asked_for() -> None:
    traffic = Traffic(20_000, 100.0, bursts=((20.0, 30.0, 9.0),), message_tokens=50, most_tokens=512)
    trace = traffic.trace(0)
    begins = [conversation.begin_s for conversation in trace]
    assert begins == sorted(begins) and begins[0] >= 0 and begins[-1] < 100
    assert sum(20 <= at_s < 30 for at_s in begins) / len(begins) == pytest.approx(0.5, abs=0.01)
    messages = [turn.message for conversation in trace for turn in conversation.turns]
    assert statistics.fmean(messages) == pytest.approx(50.5, rel=0.02) and max(messages) <= 512
    systems = [conversation.system for conversation in trace]
    assert systems.count(0) == pytest.approx(2 * systems.count(1), rel=0.1)


def test_percentiles_are_values_that_occur() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.5)) == (50.0, 99.0, 7.0)
    assert percentile([], 0.5) is None


@pytest.fixture(scope="module")
def result() -> Iterator[dict[str, Any]]:
    scenarios = replace(
        SCENARIOS,
        counts=(1, 2),
        scaling=TRAFFIC,
        autoscaling=TRAFFIC,
        autoscaler=replace(SCALER, maximum=3),
        failing=TRAFFIC,
        failing_replicas=2,
        failure=Failure(0.05),
    )
    yield {"gpu": {"title": "toy"}, **simulate(SMALL, scenarios, seed=0)}


def test_all_scenarios_are_told_and_drawn_as_simulated(result: dict[str, Any]) -> None:
    assert list(result["scaling"]) == list(ROUTERS)
    assert [row["replicas"] for row in result["scaling"]["round robin"]] == [1, 2]
    assert result["failures"]["lost"]["lost"] > 0 == result["failures"]["retried"]["lost"]
    titles = [text.text for text in ElementTree.fromstring(drawn(result)).iter() if text.get("class") == "value"]
    assert len(titles) == 4 and all(str(title).startswith("Simulated: ") for title in titles)
    json.dumps(result)


def test_the_plot_that_is_kept_shows_the_figures_beside_it() -> None:
    path = RESULTS / f"{NAME}.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["note"].startswith("Simulated, not measured")
    assert drawn(kept) == path.with_suffix(".svg").read_text(encoding="utf-8")


def test_a_replica_has_the_pages_that_plan_finds_room_for() -> None:
    (place,) = placements(Served(shaped(LLAMA_8B)), None, gpus=1, budgets=[GPUS["h100"].memory])
    shape = engine_shape("h100")
    assert shape.num_pages * 16 == place.num_tokens > 2 * 16 * engine_shape("l40s").num_pages > 0
    assert shape.roofline.tpot_s(8, 500) == Roofline(place.placed, GPUS["h100"]).tpot_s(8, 500)
