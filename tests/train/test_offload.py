"""Optimizer states in host memory: the same weights, an order of copies that holds on a GPU, the bytes planned."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.training_memory import PAGED_BUFFERS, Setup
from tests.tiny import tiny_model
from tests.train.recorded_cuda import COMPUTATION, HOST, RaceError, RecordedCuda
from tests.train.test_loop import Calls, stop
from tests.train.toy import toy_config, toy_trainer, weights_hash
from train.optimizer import AdamW, _groups
from train.tracking import read_metrics

FETCHING, WRITING = "stream 1", "stream 2"
SHAPES = ((20_000,), (300,), (4096,), (7, 1733), (9, 2048))
PIECE = SMALLEST = 4096
NUM_PIECES = 5 + 1 + 3 + 5


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a parameter."""
    for module in ("model.training_memory", "train.optimizer"):
        monkeypatch.setattr(f"{module}.PAGED_PIECE", PIECE)
        monkeypatch.setattr(f"{module}.SMALLEST_PAGED", SMALLEST)


def trained(*, eight_bit: bool, paged: bool, steps: int = 3) -> tuple[AdamW, list[nn.Parameter]]:
    """After some steps, in which a parameter may have no gradient."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:]}]
    optimizer = AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eight_bit=eight_bit, paged=paged)
    for step in range(steps):
        for number, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad = gradient if (step, number) != (1, 2) else None
        optimizer.step()
    return optimizer, weights


def read_by_host(optimizer: AdamW) -> list[Tensor]:
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [torch.zeros(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in states]


@pytest.mark.parametrize("eight_bit", [False, True])
def test_weights_and_moments_are_those_of_states_on_the_device(
    eight_bit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, expected_weights = trained(eight_bit=eight_bit, paged=False)
    with RecordedCuda(monkeypatch):
        optimizer, weights = trained(eight_bit=eight_bit, paged=True)
        moments = read_by_host(optimizer)
    assert all(map(torch.equal, weights, expected_weights))
    assert all(map(torch.equal, moments, read_by_host(expected)))


def test_both_directions_overlap_with_each_other_and_with_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordedCuda(monkeypatch) as cuda:
        trained(eight_bit=False, paged=True, steps=1)
    # Each piece has two moments.
    fetches = [one for one in cuda.launches if one.what == "fetch"][1::2]
    writes = [one for one in cuda.launches if one.what == "write back"][1::2]
    updates = [one for one in cuda.launches if one.what == "_fused_adamw_"][1:]  # one state is not paged
    assert len(fetches) == len(updates) == len(writes) == NUM_PIECES
    for number in range(NUM_PIECES):
        assert updates[number].follows(fetches[number]) and writes[number].follows(updates[number])
        if number >= 1:
            assert not updates[number].follows(writes[number - 1])
            assert not fetches[number].follows(updates[number - 1])
        if number >= 2:
            assert not fetches[number].follows(writes[number - 2])
        if number >= PAGED_BUFFERS:  # they share a buffer
            assert fetches[number].follows(writes[number - PAGED_BUFFERS])


@pytest.mark.parametrize(
    "wait",
    [(FETCHING, COMPUTATION), (COMPUTATION, FETCHING), (WRITING, COMPUTATION), (FETCHING, WRITING), (HOST, WRITING)],
    ids=" for ".join,
)
def test_each_wait_is_needed(wait: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordedCuda(monkeypatch, ignored_wait=wait), pytest.raises(RaceError):
        read_by_host(trained(eight_bit=False, paged=True)[0])


@pytest.mark.parametrize("eight_bit", [False, True])
def test_pinned_memory_is_allocated_once_to_the_byte_and_given_back(
    eight_bit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = RecordedCuda(monkeypatch)
    optimizer, weights = trained(eight_bit=eight_bit, paged=True)
    states = [optimizer.state[weight] for weight in weights if weight.numel() >= SMALLEST]
    tensors = [tensor for state in states for tensor in state.values()]
    [(address, size)] = cuda.pinned.items()
    assert size == sum(tensor.nbytes for tensor in tensors) == optimizer.arena.num_bytes
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    ends = [address, *(end for _, end in places)]
    assert [start for start, _ in places] == ends[:-1] and ends[-1] == address + size
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in tensors)
    del optimizer, weights, states, tensors
    gc.collect()
    assert not cuda.pinned


def test_memory_that_cannot_be_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RecordedCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda address, size, flags: 2)
    with pytest.raises(MemoryError, match="bytes cannot be pinned for optimizer states: CUDA error 2"):
        trained(eight_bit=False, paged=True)
    assert not cuda.pinned


def page_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers keep moments in host memory, though they have no GPU."""

    def make(model: nn.Module, config: Any) -> AdamW:
        betas, eight_bit = (config.beta1, config.beta2), config.optimizer.endswith("8bit")
        return AdamW(list(_groups(model, config)), lr=1e-3, betas=betas, eight_bit=eight_bit, paged=True)

    RecordedCuda(monkeypatch)
    monkeypatch.setattr("train.loop.make_optimizer", make)


@pytest.mark.parametrize("optimizer", ["paged_adamw", "paged_adamw_8bit"])
def test_a_resumed_run_goes_on_in_the_same_arena(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = toy_trainer(tmp_path / "straight", optimizer=optimizer)
    straight.train()
    page_anyway(monkeypatch)
    first = toy_trainer(tmp_path / "parts", optimizer=optimizer, objective=Calls({9: stop}))
    assert first.train().interrupted
    second = toy_trainer(tmp_path / "parts", optimizer=optimizer, model=tiny_model(seed=77))
    second.train()
    assert weights_hash(second.model) == weights_hash(straight.model)
    paged: Any = second.optimizer
    held = {tensor.data_ptr() for state in paged.arena.states for tensor in state.values()}
    used = {t.data_ptr() for p, state in paged.state.items() if p.numel() >= SMALLEST for t in state.values()}
    assert held and held == used
    assert [line["loss"] for line in read_metrics(tmp_path / "parts" / "metrics.jsonl")] == [
        line["loss"] for line in read_metrics(tmp_path / "straight" / "metrics.jsonl")
    ]


@pytest.mark.parametrize("optimizer", ["paged_adamw", "paged_adamw_8bit"])
def test_what_lasts_is_planned_to_the_byte(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordedCuda(monkeypatch)
    model, config = tiny_model(), toy_config(optimizer=optimizer)
    own = AdamW(list(_groups(model, config)), lr=1e-3, betas=(0.9, 0.95), eight_bit="8bit" in optimizer, paged=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    own.step()
    plan = Setup(model.config, config).memory()
    near = [tensor for p, state in own.state.items() if p not in own.paged for tensor in state.values()]
    near += [tensor for buffer in own.prefetcher.buffers for tensor in buffer.state.values()]
    assert plan.host == own.arena.num_bytes > 0
    assert plan.optimizer == sum(tensor.nbytes for tensor in near)


@pytest.mark.gpu
@pytest.mark.parametrize("eight_bit", [False, True])
def test_on_a_gpu_paged_moments_leave_it_free_and_change_nothing(
    eight_bit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count = 1 << 20, 8
    monkeypatch.setattr("train.optimizer.PAGED_PIECE", size // 4)

    def trained(paged: bool) -> tuple[torch.Tensor, int]:
        """Weights after some steps, and what the optimizer then holds on the GPU."""
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(size, device="cuda")) for _ in range(count)]
        before = torch.cuda.memory_allocated()
        optimizer = AdamW([{"params": weights}], lr=1e-2, betas=(0.9, 0.95), eight_bit=eight_bit, paged=paged)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
            for weight in weights:
                weight.grad = None
        held = torch.cuda.memory_allocated() - before
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert all(tensor.is_cuda != paged and tensor.is_pinned() == paged for tensor in states)
        return torch.stack(list(weights)).detach(), held

    (near, all_held), (paged, held) = trained(False), trained(True)
    assert torch.equal(near, paged)
    assert held == pytest.approx(all_held * PAGED_BUFFERS / (4 * count), rel=0.05)
