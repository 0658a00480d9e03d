"""Slots that hold a key: the CPU's form and the Triton kernel against the plainest one."""

from itertools import accumulate

import pytest
import torch

from kernels.attention.visible_slots import plan_visible_slots, visible_slots, visible_slots_reference

PAGE_SIZE = 16


LENGTHS = ([1], [0, 33, 16, 1500], [5] * 9)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_slots_come_in_order(device: torch.device, lengths: list[int], share: float) -> None:
    check(lengths, share, device)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_slots_come_in_order_without_triton(share: float) -> None:
    for lengths in LENGTHS:
        check(lengths, share, torch.device("cpu"))


def check(lengths: list[int], share: float, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    width = -(-max(lengths) // PAGE_SIZE) + 1
    tables = torch.randperm(width * len(lengths), generator=generator).view(len(lengths), width).int()
    present = torch.rand(tables.numel() * PAGE_SIZE + 1, generator=generator) < share
    queries = [number % 3 for number in range(1, len(lengths) + 1)]
    expected = visible_slots_reference(present.tolist(), tables.tolist(), lengths, PAGE_SIZE, queries)
    inputs = (present.to(device), tables.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))
    cu_seqlens = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
    slots, counts = visible_slots(inputs[0], plan_visible_slots(*inputs[1:], PAGE_SIZE), cu_seqlens)
    assert slots.dtype == counts.dtype == torch.int32 and slots.shape[0] == len(lengths)
    assert counts.tolist() == list(map(len, expected))
    assert [row[:count].tolist() for row, count in zip(slots, counts.tolist(), strict=True)] == expected


def test_other_dtypes_are_refused() -> None:
    tables, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="int64"):
        plan_visible_slots(tables, lengths, PAGE_SIZE)
