"""Fair shares between tenants, against the bounds of the paper; service is counted here, not read off the counters."""

from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.engine import Engine
from serve.engine.requests import Sequence
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant
from tests.serve.toys import TableModel, make_engine

NUM_PAGES, MAX_LEN = 12, 96
MOST_IN_BATCH = NUM_PAGES * 16
LONGEST_PROMPT = 64
BOUND = 2 * max(LONGEST_PROMPT, 2 * MOST_IN_BATCH)
"""Theorem 4.4, with weights 1 and 2 of prompt and output tokens."""
Kind = tuple[int, int]
"""Prompt and output tokens of a request."""


def make() -> Engine:
    table = TableModel(torch.full((8, 8), 1 / 8))
    return make_engine(table, num_pages=NUM_PAGES, max_model_len=MAX_LEN, max_num_seqs=4, enable_prefix_caching=False)


class Service:
    """Counts what each tenant has had: prompts when they are admitted, output tokens as they come."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.had: dict[str, float] = {}
        self._owners: dict[str, str] = {}
        self._prompts: dict[str, int] = {}

    def ask(self, tenant: Tenant, kind: Kind, *, priority: int = 0) -> str:
        request_id = str(len(self._owners))
        self._owners[request_id], self._prompts[request_id] = tenant.name, kind[0]
        self.had.setdefault(tenant.name, 0.0)
        params = SamplingParams(max_tokens=kind[1], temperature=0.0, ignore_eos=True)
        self.engine.add_request(request_id, [2] * kind[0], params, tenant=tenant, priority=priority)
        return request_id

    def step(self) -> list[str]:
        """Returns the requests that have ended."""
        outputs = self.engine.step()
        for request_id in {s.request_id for s in self.engine.scheduler.running} | {o.request_id for o in outputs}:
            self.had[self._owners[request_id]] += self._prompts.pop(request_id, 0)
        for output in outputs:
            self.had[self._owners[output.request_id]] += 2 * len(output.new_token_ids)
        return [output.request_id for output in outputs if output.finished]


def differences(
    kinds: list[list[Kind]], weights: tuple[float, float] = (1.0, 1.0), num_steps: int = 150
) -> list[float]:
    """After each step, how much more of its weight's worth the first tenant has had, both with requests waiting.

    The first one's come all at once before the other's, and then one after another, as the other's do.
    """
    service = Service(make())
    tenants = [Tenant(name, weight) for name, weight in zip("ab", weights, strict=True)]
    sources: list[Iterator[Kind]] = [cycle(own) for own in kinds]
    for tenant, source in zip(tenants, sources, strict=True):
        for _ in range(12):
            service.ask(tenant, next(source))
    found = []
    for _ in range(num_steps):
        service.step()
        for tenant, source in zip(tenants, sources, strict=True):
            share = service.engine.scheduler.shares.of(tenant)
            while share is None or share.num_waiting < 12:
                service.ask(tenant, next(source))
                assert share is not None
        found.append(service.had["a"] / weights[0] - service.had["b"] / weights[1])
    assert min(service.had.values()) > 0
    return found


requests_of_a_tenant = st.lists(st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, 30)), min_size=1, max_size=4)


@settings(max_examples=6, deadline=None)
@given(st.tuples(requests_of_a_tenant, requests_of_a_tenant))
def test_two_tenants_with_requests_waiting_differ_by_no_more_than_the_bound(
    kinds: tuple[list[Kind], list[Kind]],
) -> None:
    found = differences(list(kinds))
    assert max(found) - min(found) <= BOUND


def test_weights_are_shares_of_the_service() -> None:
    found = differences([[(8, 8)], [(8, 8)]], weights=(3.0, 1.0), num_steps=250)
    assert max(found) - min(found) <= BOUND
    service = Service(make())
    for name, weight in (("a", 3.0), ("b", 1.0)):
        for _ in range(100):
            service.ask(Tenant(name, weight), (8, 8))
    for _ in range(120):
        service.step()
    assert service.had["a"] / service.had["b"] == pytest.approx(3, rel=0.15)


def test_in_order_of_arrival_the_bound_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would prove nothing."""
    engine_first: Callable[..., Sequence | None] = lambda self, waiting: next(iter(waiting), None)  # noqa: E731
    monkeypatch.setattr("serve.engine.fair_shares.FairShares.first", engine_first)
    found = differences([[(64, 30)], [(1, 1)]], num_steps=350)
    assert max(found) - min(found) > BOUND


def ends(service: Service) -> list[str]:
    found: list[str] = []
    while service.engine.has_work():
        found += service.step()
    return found


def test_time_without_requests_is_no_credit() -> None:
    """A tenant who comes after the other has had much goes on beside it, and not before all of its requests."""
    service = Service(make())
    for _ in range(60):
        service.ask(Tenant("a"), (32, 16))
    for _ in range(120):
        service.step()
    for _ in range(20):
        service.ask(Tenant("b"), (32, 16))
    had = dict(service.had)
    for _ in range(100):
        service.step()
    gained = {name: service.had[name] - had[name] for name in "ab"}
    assert gained["a"] > 200 and abs(gained["a"] - gained["b"]) <= BOUND


def test_a_tenant_who_returns_to_an_empty_queue_is_lifted_to_who_waited_last() -> None:
    service = Service(make())
    service.ask(Tenant("a"), (32, 16))
    ends(service)
    service.ask(Tenant("b"), (4, 4))
    shares = service.engine.scheduler.shares
    a, b = shares.of(Tenant("a")), shares.of(Tenant("b"))
    assert a is not None and b is not None and b.counter == a.counter == 32 + 2 * 16


def test_a_priority_goes_before_shares_and_shares_before_arrival() -> None:
    service = Service(make_engine(TableModel(torch.full((8, 8), 1 / 8)), max_num_seqs=1, num_pages=16))
    service.ask(Tenant("a"), (8, 4))
    ends(service)
    a, b = service.ask(Tenant("a"), (8, 4)), service.ask(Tenant("b"), (8, 2))
    again, urgent = service.ask(Tenant("b"), (8, 2)), service.ask(Tenant("a"), (8, 4), priority=-1)
    assert ends(service) == [urgent, b, again, a]


def test_preemption_is_not_paid_for_twice() -> None:
    service = Service(make())
    service.ask(Tenant("a"), (32, 16))
    for _ in range(5):
        service.step()
    service.engine.scheduler.preempt(service.engine.scheduler.running[0])
    ends(service)
    share = service.engine.scheduler.shares.of(Tenant("a"))
    assert share is not None and share.counter == 32 + 2 * 16 and share.num_waiting == 0


def test_requests_of_nobody_in_particular_are_one_tenant_beside_others() -> None:
    service = Service(make_engine(TableModel(torch.full((8, 8), 1 / 8)), max_num_seqs=1, num_pages=16))
    before = service.ask(Tenant(), (8, 2))
    named = service.ask(Tenant("a"), (8, 2))
    nobodys = [service.ask(Tenant(), (8, 2)) for _ in range(3)]
    second = service.ask(Tenant("a"), (8, 2))
    assert ends(service) == [before, named, *nobodys[:2], second, nobodys[2]]
