"""To which replica a request goes. `prefix aware` is the router of serve/replicas.py itself, as a cluster runs it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from bench.cluster.replica import Replica
from bench.cluster.trace import Request
from serve.replicas import PrefixRouter


class Router(Protocol):
    """One for all replicas."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """One of those that take requests, of which there is at least one."""
        ...


class RoundRobin:
    """One after another."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        self._next += 1
        return replicas[(self._next - 1) % len(replicas)]


class LeastTokens:
    """Where the fewest tokens of prompts and answers are outstanding; of equals the first."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: replica.outstanding_tokens)


class PrefixAware:
    """Where most of the prompt was sent before, and a conversation where it was."""

    def __init__(self) -> None:
        self._router = PrefixRouter()

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        by_name, session = {replica.name: replica for replica in replicas}, str(request.conversation.number)
        self._router.keep(by_name)
        loads = {name: float(len(replica.requests)) for name, replica in by_name.items()}
        name = self._router.rank(request.blocks, loads, session)[0]
        self._router.sent(name, request.blocks, session)
        return by_name[name]


ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": RoundRobin,
    "least outstanding tokens": LeastTokens,
    "prefix aware": PrefixAware,
}
