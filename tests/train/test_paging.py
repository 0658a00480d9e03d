"""The order of copies: what a state is worked on has arrived, and what was worked on goes home before it is read."""

import torch

from train.offload import State, Visit, walk


class LazyCopier:
    """A device whose copies happen as late as they may: used too early a state is NaN, read too early it is old."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names: dict[int, str] = {}
        self.pending: list[tuple[State, State]] = []

    def fetch(self, home: State) -> Visit:
        self.log.append(f"fetch {home['name'].item():.0f}")
        near = {kind: torch.full_like(tensor, float("nan")) for kind, tensor in home.items()}
        self.pending.append((home, near))
        return Visit(near, None)

    def wait_for(self, visit: Visit) -> None:
        """Copies are done in order: this one, and all that were asked for before."""
        while self.pending:
            source, target = self.pending.pop(0)
            for kind, tensor in target.items():
                tensor.copy_(source[kind])
            if target is visit.near:
                break
        self.log.append(f"use {visit.near['name'].item():.0f}")

    def send_back(self, visit: Visit, home: State) -> None:
        self.log.append(f"send {visit.near['name'].item():.0f}")
        self.pending.append((visit.near, home))

    def finish(self) -> None:
        self.log.append("finish")
        for source, target in self.pending:
            for kind, tensor in target.items():
                tensor.copy_(source[kind])
        self.pending.clear()


def states(count: int) -> list[State]:
    return [{"name": torch.tensor(float(n)), "moment": torch.tensor([10.0 * n])} for n in range(count)]


def test_the_next_state_arrives_while_one_is_updated_and_all_are_home_at_the_end() -> None:
    copier, homes = LazyCopier(), states(3)
    for step in (1, 2):
        for near in walk(homes, copier):
            near["moment"] += 1
        assert [home["moment"].item() for home in homes] == [10.0 * n + step for n in range(3)]
    first = ["fetch 0", "fetch 1", "use 0", "send 0", "fetch 2", "use 1", "send 1", "use 2", "send 2", "finish"]
    assert copier.log == first * 2


def test_one_state_and_none() -> None:
    copier = LazyCopier()
    assert [near["name"].item() for near in walk(states(1), copier)] == [0.0]
    assert list(walk([], copier)) == []
