"""Where requests go and how many replicas there should be, without Ray."""

import random
from collections import Counter

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serve.http.metrics import joined
from serve.replicas import (
    BLOCK_BYTES,
    IMBALANCE,
    SLACK,
    TARGET_USE,
    PrefixRouter,
    ReplicaLoad,
    matching,
    text_blocks,
    wanted_replicas,
)

IDLE = {"a": 0, "b": 0, "c": 0}


def text(seed: int, num_blocks: float) -> bytes:
    return random.Random(seed).randbytes(int(num_blocks * BLOCK_BYTES))


def test_blocks_stand_for_all_text_up_to_them() -> None:
    common, one, other = text(0, 3), text(1, 2), text(2, 2)
    first, second = text_blocks(common + one), text_blocks(common + other)
    assert len(first) == 5 and first[:3] == second[:3] and not set(first[3:]) & set(second[3:])
    assert text_blocks(common + one + b"more") == first  # no full block
    assert not set(text_blocks(common, "poet")) & set(text_blocks(common, "support"))
    assert text_blocks(b"", "poet") == text_blocks(b"short", "poet") and text_blocks(b"short") == []
    assert not set(text_blocks(text(3, 1) + common)) & set(first)  # the same text elsewhere


def test_requests_follow_their_prefix_and_new_ones_spread() -> None:
    router, went = PrefixRouter(), Counter[str]()
    for group in range(12):
        blocks = text_blocks(text(group, 4))
        first = router.rank(blocks, IDLE)[0]
        router.sent(first, blocks)
        went[first] += 1
        for turn in range(3):
            longer = text_blocks(text(group, 4) + text(100 + turn, 2))
            assert router.rank(longer, IDLE)[0] == first
    assert set(went.values()) == {4}


def test_the_longer_prefix_wins() -> None:
    router, whole = PrefixRouter(), text_blocks(text(0, 8))
    router.sent("a", whole[:4])
    router.sent("b", whole[:6])
    assert router.rank(whole, IDLE) == ["b", "a", "c"]
    assert router.rank(whole, {"a": 0, "b": SLACK, "c": 0})[0] == "b"


def test_a_busy_replica_is_spared_and_comes_last() -> None:
    router, blocks = PrefixRouter(), text_blocks(text(0, 8))
    router.sent("a", blocks, "talk")
    loads = {"a": 9.0, "b": 2.0, "c": 1.0}
    mean = sum(loads.values()) / 3
    assert loads["a"] <= IMBALANCE * mean + SLACK and router.rank(blocks, loads, "talk")[0] == "a"
    loads["a"] = 13.0
    assert router.rank(blocks, loads, "talk") == ["c", "b", "a"]


def test_a_session_stays_whatever_is_said_in_it() -> None:
    router = PrefixRouter()
    router.sent("b", text_blocks(text(0, 2)), "talk")
    router.sent("c", text_blocks(text(1, 9)))
    assert router.rank(text_blocks(text(1, 9)), IDLE, "talk")[0] == "b"
    assert router.rank(text_blocks(text(1, 9)), IDLE, "other")[0] == "c"
    assert router.rank(text_blocks(text(1, 9)), IDLE)[0] == "c"


def test_prompts_too_short_for_blocks_take_turns() -> None:
    router, went = PrefixRouter(), []
    router.sent("b", text_blocks(text(0, 50)))
    for _ in range(6):
        went.append(router.rank([], IDLE)[0])
        router.sent(went[-1], [])
    assert went == ["a", "c", "b", "a", "c", "b"]


def test_a_replica_that_is_gone_is_forgotten() -> None:
    router, blocks = PrefixRouter(), text_blocks(text(0, 4))
    router.sent("b", blocks)
    router.keep(["a", "c"])
    assert router.rank(blocks, {"a": 0, "c": 0, "b": 0})[0] == "a"


def test_what_is_remembered_of_a_prompt_is_its_beginning() -> None:
    router, generator = PrefixRouter(max_blocks=50), random.Random(0)
    for _ in range(300):
        blocks = text_blocks(text(generator.randrange(8), 20)[: generator.randrange(1, 20) * BLOCK_BYTES])
        router.sent("a", blocks, generator.choice([None, "talk"]))
        sent = router._sent["a"]
        assert len(sent) <= 50
        for group in range(8):
            whole = text_blocks(text(group, 20))
            held = [block in sent for block in whole]
            assert held == sorted(held, reverse=True) and matching(whole, sent) == sum(held)


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([], 1),
        ([(0, 0, 0.0)] * 3, 1),
        ([(7, 0, 0.1)], 1),
        ([(8, 0, 0.1)], 2),
        ([(1, 0, 0.8)], 2),  # long prompts: the pages are full first
        ([(10, 25, 1.0)], 5),
        ([(10, 0, 0.0), (0, 0, 0.0)], 2),
        ([(7, 0, 0.7)] * 4, 4),
    ],
)
def test_replicas_are_wanted_for_what_there_is_to_do(loads: list[tuple[int, int, float]], wanted: int) -> None:
    found = wanted_replicas([ReplicaLoad(*load) for load in loads], 10)
    assert found == wanted
    use = sum(ReplicaLoad(*load).use(10) for load in loads)
    assert use <= found * TARGET_USE + 1e-6 and (found == 1 or use > (found - 1) * TARGET_USE)


def test_metrics_of_several_servers_are_one_text_in_which_each_has_its_label() -> None:
    texts, expected = {}, set()
    for number, server in enumerate(("a", "b")):
        registry = CollectorRegistry()
        Gauge("waiting", 'of "all"', registry=registry).set(number)
        prometheus_client.Counter("done", "by reason", ["reason"], registry=registry).labels(
            reason='a "quoted}" one\n'
        ).inc(2 + number)
        Histogram("seconds", "how long", registry=registry, buckets=(1.0, 2.0)).observe(1.5)
        texts[server] = generate_latest(registry).decode()
        for family in text_string_to_metric_families(texts[server]):
            expected |= {
                (
                    family.name,
                    family.type,
                    sample.name,
                    *sorted({**sample.labels, "replica": server}.items()),
                    sample.value,
                )
                for sample in family.samples
            }
    found = [
        (family.name, family.type, sample.name, *sorted(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(joined(texts, "replica"))
        for sample in family.samples
    ]
    assert set(found) == expected and len(found) == len(expected)
    kinds = [line.split()[2] for line in joined(texts, "replica").splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
