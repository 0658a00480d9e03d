"""The order of copies: a state has arrived before it is worked on, and is written back before it is read."""

import torch

from train.offload import DeviceCopy, State, prefetched


class LazyCopier:
    """A device whose copies happen as late as they may: used too early a state is NaN, read too early it is old."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names: dict[int, str] = {}
        self.pending: list[tuple[State, State]] = []

    def fetch(self, host: State) -> DeviceCopy:
        self.log.append(f"fetch {host['name'].item():.0f}")
        device = {kind: torch.full_like(tensor, float("nan")) for kind, tensor in host.items()}
        self.pending.append((host, device))
        return DeviceCopy(device, None)

    def wait_for(self, copy: DeviceCopy) -> None:
        """Copies are done in order: this one, and all that were asked for before."""
        while self.pending:
            source, target = self.pending.pop(0)
            for kind, tensor in target.items():
                tensor.copy_(source[kind])
            if target is copy.state:
                break
        self.log.append(f"use {copy.state['name'].item():.0f}")

    def write_back(self, copy: DeviceCopy, host: State) -> None:
        self.log.append(f"write {copy.state['name'].item():.0f}")
        self.pending.append((copy.state, host))

    def finish(self) -> None:
        self.log.append("finish")
        for source, target in self.pending:
            for kind, tensor in target.items():
                tensor.copy_(source[kind])
        self.pending.clear()


def states(count: int) -> list[State]:
    return [{"name": torch.tensor(float(n)), "moment": torch.tensor([10.0 * n])} for n in range(count)]


def test_the_next_state_arrives_while_one_is_updated_and_all_are_written_back() -> None:
    copier, hosts = LazyCopier(), states(3)
    for step in (1, 2):
        for state in prefetched(hosts, copier):
            state["moment"] += 1
        assert [host["moment"].item() for host in hosts] == [10.0 * n + step for n in range(3)]
    first = ["fetch 0", "fetch 1", "use 0", "write 0", "fetch 2", "use 1", "write 1", "use 2", "write 2", "finish"]
    assert copier.log == first * 2


def test_one_state_and_none() -> None:
    copier = LazyCopier()
    assert [state["name"].item() for state in prefetched(states(1), copier)] == [0.0]
    assert list(prefetched([], copier)) == []
