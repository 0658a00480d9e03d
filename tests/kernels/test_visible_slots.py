"""Lists of the slots that hold a key: the CPU's form and the Triton kernel against the plainest one."""

from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.visible_slots import (
    VisibleSlots,
    list_visible_slots,
    list_visible_slots_reference,
    plan_visible_slots,
)

PAGE_SIZE = 16
CPU = torch.device("cpu")


def call(
    visible: VisibleSlots,
    selected: list[bool],
    sequences: list[tuple[list[int], int, int]],
    rows: list[int],
    first: list[int],
    slots: list[int],
) -> list[int]:
    """Of sequences (pages, tokens in all, new tokens), on the device of the lists."""
    device, width = visible.lists.device, max(len(pages) for pages, _, _ in sequences)

    def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    plan = plan_visible_slots(
        ints(slots, torch.int64),
        block_tables=ints([pages + [0] * (width - len(pages)) for pages, _, _ in sequences]),
        cu_seqlens=ints([0, *accumulate(new for _, _, new in sequences)]),
        kv_lengths=ints([length for _, length, _ in sequences]),
        rows=ints(rows),
        first=ints(first),
        page_size=PAGE_SIZE,
    )
    before = ints([0, *accumulate(selected)], torch.int64)
    found = list_visible_slots(visible, before, plan)
    assert found.dtype == torch.int32
    return found.tolist()


def slot_at(pages: list[int], position: int) -> int:
    return pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


CASES = {
    "decoding": [(1, 1), (40, 1), (17, 1)],
    "a prompt beside it": [(1500, 1500), (33, 1), (16, 16), (1100, 20)],
    "many": [(5, 2)] * 9,
    "without new tokens": [(20, 0), (3, 3)],
}


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_slots_come_in_order(device: torch.device, case: str, share: float) -> None:
    check(CASES[case], share, device)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_slots_come_in_order_without_triton(share: float) -> None:
    for sequences in CASES.values():
        check(sequences, share, CPU)


def check(lengths: list[tuple[int, int]], share: float, device: torch.device) -> None:
    """Tokens before the new ones are computed by one call, the new ones by another: into lists that know the others,
    and into new ones, which do not."""
    generator = torch.Generator().manual_seed(0)
    width = -(-max(length for length, _ in lengths) // PAGE_SIZE) + 1
    tables = torch.randperm(width * len(lengths), generator=generator).view(len(lengths), width).tolist()
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].tolist()
    visible = VisibleSlots.empty(width * len(lengths) * PAGE_SIZE, len(lengths) + 2, width * PAGE_SIZE, device)
    counts, lists = visible.counts.tolist(), visible.lists.tolist()
    spans = [[(0, length - new) for length, new in lengths], [(length - new, length) for length, new in lengths]]
    for span in spans:
        positions = [[slot_at(pages, n) for n in range(stop)] for pages, (_, stop) in zip(tables, span, strict=True)]
        num_new = [stop - start for start, stop in span]
        selected = (torch.rand(sum(num_new), generator=generator) < share).tolist()
        slots = [slot for own, new in zip(positions, num_new, strict=True) for slot in own[len(own) - new :]]
        sequences = [(pages, stop, stop - start) for pages, (start, stop) in zip(tables, span, strict=True)]
        anew = VisibleSlots(visible.counts.clone(), torch.full_like(visible.lists, -1))
        found = call(visible, selected, sequences, rows, [start for start, _ in span], slots)
        assert call(anew, selected, sequences, rows, [0] * len(rows), slots) == found
        assert list_visible_slots_reference(counts, lists, selected, positions, num_new, rows) == found
        assert visible.counts.tolist() == anew.counts.tolist() == counts
        for row, number in zip(rows, found, strict=True):
            assert visible.lists[row, :number].tolist() == anew.lists[row, :number].tolist() == lists[row][:number]


def test_tokens_without_a_slot_count_and_are_written_nowhere(device: torch.device) -> None:
    """What stands behind a shorter draft, and sequences that are padding: their queries count, so that those before
    them see the right keys."""
    for where in (device, CPU):
        visible = VisibleSlots.empty(3 * PAGE_SIZE, 3, 2 * PAGE_SIZE, where)
        slots = [17, 18, -1, 0, -1, -1, -1, -1, -1]
        selected = [True, False, True, False, True, True, True, True, True]
        sequences = [([1], 3, 3), ([0], 3, 3), ([0], 0, 3)]
        assert call(visible, selected, sequences, [2, 0, 1], [0, 0, 0], slots) == [2, 2, 0]
        counts = [0] * (3 * PAGE_SIZE + 1)
        counts[17], counts[18], counts[0] = 1, -1, 0
        assert visible.counts.tolist() == counts
        assert visible.lists[2, :2].tolist() == [17, 0] and not visible.lists[:2].any()


def test_a_decoding_sequence_touches_no_slot_but_its_own_and_the_one_before(device: torch.device) -> None:
    length = 2000
    for where in (device, CPU):
        visible = VisibleSlots.empty(length + 48, 1, length + 48, where)
        pages = list(range(length // PAGE_SIZE + 1))
        call(visible, [True] * length, [(pages, length, length)], [0], [0], list(range(length)))
        visible.counts[: length - 1] = 10**9  # whoever reads these, writes outside of the list
        before = visible.lists.clone()
        assert call(visible, [True], [(pages, length + 1, 1)], [0], [length], [length]) == [length + 1]
        assert visible.counts[length] == length + 1 and visible.counts[length - 1] == length
        assert (visible.lists != before).nonzero().tolist() == [[0, length]] and visible.lists[0, length] == length


def test_other_dtypes_are_refused() -> None:
    ints = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="int64"):
        plan_visible_slots(
            ints.long(), block_tables=ints[None], cu_seqlens=ints, kv_lengths=ints.long(), rows=ints, first=ints,
            page_size=PAGE_SIZE,
        )  # fmt: skip


# --- a life of sequences ---------------------------------------------------------------------------------------------

PAGES, ROWS, MOST = 24, 4, 6 * PAGE_SIZE


@dataclass
class Life:
    """A sequence, and what is known of it: who has a key, by position."""

    row: int
    pages: list[int] = field(default_factory=list)
    has_key: list[bool] = field(default_factory=list)
    num_listed: int = 0


class World:
    """Sequences that grow, are rolled back, forked, and end; lists are compared with what was decided, in full."""

    def __init__(self) -> None:
        self.visible = VisibleSlots.empty(PAGES * PAGE_SIZE, ROWS, MOST, CPU)
        self.holders = [0] * PAGES
        self.lives: list[Life] = []

    def grow(self, choices: list[tuple[int, list[bool]]]) -> None:
        """One pass: new tokens of some sequences."""
        batch = []
        for life, selected in choices:
            one = self.lives[life]
            if len(one.has_key) + len(selected) <= MOST and self._make_room(one, len(one.has_key) + len(selected)):
                batch.append((one, selected))
        if not batch:
            return
        slots = [slot_at(one.pages, len(one.has_key) + n) for one, new in batch for n in range(len(new))]
        sequences = [(one.pages, len(one.has_key) + len(new), len(new)) for one, new in batch]
        first = [min(one.num_listed, len(one.has_key)) for one, _ in batch]
        flat = [has for _, new in batch for has in new]
        found = call(self.visible, flat, sequences, [one.row for one, _ in batch], first, slots)
        for (one, new), number in zip(batch, found, strict=True):
            one.has_key += new
            one.num_listed = len(one.has_key)
            assert number == sum(one.has_key)
            expected = [slot_at(one.pages, n) for n, has in enumerate(one.has_key) if has]
            assert self.visible.lists[one.row, :number].tolist() == expected

    def _make_room(self, one: Life, stop: int) -> bool:
        start = len(one.has_key)
        shared = [n for n in range(start // PAGE_SIZE, len(one.pages)) if self.holders[one.pages[n]] > 1]
        missing = -(-stop // PAGE_SIZE) - len(one.pages)
        free = [page for page in range(PAGES) if not self.holders[page]]
        if len(free) < missing + len(shared):
            return False
        counts = self.visible.counts[:-1].view(PAGES, PAGE_SIZE)
        for number in shared:
            counts[free[0]] = counts[one.pages[number]]
            self.holders[one.pages[number]] -= 1
            one.pages[number] = free.pop(0)
            self.holders[one.pages[number]] += 1
            one.num_listed = min(one.num_listed, number * PAGE_SIZE)
        for _ in range(missing):
            one.pages.append(free.pop(0))
            self.holders[one.pages[-1]] += 1
        return True

    def roll_back(self, life: int, number: int) -> None:
        one = self.lives[life]
        del one.has_key[max(0, len(one.has_key) - number) :]
        kept = -(-len(one.has_key) // PAGE_SIZE)
        for page in one.pages[kept:]:
            self.holders[page] -= 1
        del one.pages[kept:]
        one.num_listed = min(one.num_listed, kept * PAGE_SIZE)

    def fork(self, life: int, number: int) -> None:
        """Another sequence with the same first tokens, in a row that others have used."""
        free = sorted(set(range(ROWS)) - {one.row for one in self.lives})
        if not free:
            return
        parent = self.lives[life] if self.lives else Life(-1)
        has_key = parent.has_key[:number]
        child = Life(free[0], parent.pages[: -(-len(has_key) // PAGE_SIZE)], has_key)
        for page in child.pages:
            self.holders[page] += 1
        self.lives.append(child)

    def end(self, life: int) -> None:
        self.roll_back(life, MOST)
        del self.lives[life]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lists_are_those_of_what_was_decided(data: st.DataObject) -> None:
    world = World()
    for _ in range(data.draw(st.integers(1, 30))):
        which = st.integers(0, max(len(world.lives) - 1, 0))
        kind = (
            data.draw(st.sampled_from(["grow", "grow", "grow", "roll back", "fork", "end"])) if world.lives else "fork"
        )
        if kind == "grow":
            some = sorted(data.draw(st.sets(which, min_size=1)))
            lengths = [data.draw(st.sampled_from([1, 1, 3, 20, 40])) for _ in some]
            chosen = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
            world.grow(list(zip(some, chosen, strict=True)))
        elif kind == "roll back":
            world.roll_back(data.draw(which), data.draw(st.integers(0, 25)))
        elif kind == "fork":
            world.fork(data.draw(which), data.draw(st.integers(0, MOST)))
        else:
            world.end(data.draw(which))
