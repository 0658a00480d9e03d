"""The paged KV cache: accounting, sharing, copy-on-write. Contents of pages are simulated token by token."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from serve.engine.kv_cache import PAGE_SIZE, BlockTable, KVCache, PagePool, pages_for
from tests.trials import trials

NUM_PAGES = 12
MAX_TOKENS = NUM_PAGES * PAGE_SIZE


class Simulated:
    """A sequence as the engine drives it."""

    def __init__(self, tokens: list[int], salt: str) -> None:
        self.tokens = tokens
        self.salt = salt
        self.num_computed = 0
        self.table = BlockTable(NUM_PAGES, salt)

    @property
    def pages(self) -> list[int]:
        return self.table.ids[: self.table.num_pages].tolist()


class CacheMachine(RuleBasedStateMachine):
    """Random admissions, writes, forks, roll-backs and releases; `contents` is what a device would hold."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(NUM_PAGES)
        self.contents: list[list[tuple[int, int] | None]] = [[None] * PAGE_SIZE for _ in range(NUM_PAGES)]
        self.alive: list[Simulated] = []

    def reserve(self, sequence: Simulated, start: int, stop: int) -> bool:
        before = self.cache.pool.num_free
        copies = self.cache.reserve(sequence.table, start, stop)
        if copies is None:
            assert self.cache.pool.num_free == before
            return False
        for source, destination in copies:
            self.contents[destination] = list(self.contents[source])
        return True

    def write(self, sequence: Simulated, start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start):
            page = sequence.pages[position // PAGE_SIZE]
            assert self.cache.pool.holders[page] == 1, "a shared page was written"
            self.contents[page][position % PAGE_SIZE] = (position, token)

    @rule(
        target=sequences,
        # Few distinct prefixes, so that they are found again.
        prefix=st.sampled_from([[], [7] * 16, [7] * 32, [7] * 16 + [8] * 20, [9] * 48]),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=40),
        salt=st.sampled_from(["", "tenant"]),
        headroom=st.integers(0, 2),
    )
    def admit(self, prefix: list[int], tail: list[int], salt: str, headroom: int) -> Simulated:
        sequence = Simulated(prefix + tail, salt)
        before = self.cache.pool.num_free
        found = self.cache.admit(sequence.table, sequence.tokens, headroom=headroom)
        if found is None:
            assert self.cache.pool.num_free == before and not sequence.pages
            return sequence
        assert found < len(sequence.tokens) and found % PAGE_SIZE == 0
        assert len(sequence.pages) == pages_for(len(sequence.tokens) + 1)
        assert self.cache.pool.num_free >= headroom
        self.alive.append(sequence)
        sequence.num_computed = found
        self.check_contents(sequence)  # what was found is what this sequence would have computed
        return sequence

    @rule(sequence=sequences, count=st.integers(1, 30))
    def compute(self, sequence: Simulated, count: int) -> None:
        if sequence not in self.alive:
            return
        start = sequence.num_computed
        chunk = sequence.tokens[start : start + count]
        if not self.reserve(sequence, start, start + len(chunk)):
            return
        self.write(sequence, start, chunk)
        sequence.num_computed += len(chunk)
        self.cache.publish(sequence.table, sequence.tokens, sequence.num_computed)

    @rule(sequence=sequences, drafted=st.lists(st.integers(0, 3), max_size=20), accepted=st.integers(0, 20))
    def verify(self, sequence: Simulated, drafted: list[int], accepted: int) -> None:
        """Decode with draft tokens of which some are rolled back."""
        if sequence not in self.alive or sequence.num_computed != len(sequence.tokens) - 1:
            return
        start = sequence.num_computed
        drafted = drafted[: MAX_TOKENS - len(sequence.tokens) - 1]
        if not self.reserve(sequence, start, start + 1 + len(drafted)):
            return
        self.write(sequence, start, [sequence.tokens[-1], *drafted])
        kept = drafted[:accepted]
        sequence.tokens += [*kept, 0]
        sequence.num_computed += 1 + len(kept)
        self.cache.publish(sequence.table, sequence.tokens, sequence.num_computed)
        self.cache.trim(sequence.table, len(sequence.tokens))
        assert len(sequence.pages) <= pages_for(len(sequence.tokens))

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: Simulated) -> Simulated:
        child = Simulated(list(parent.tokens), parent.salt)
        if parent in self.alive and parent.num_computed == len(parent.tokens):
            self.cache.fork(parent.table, child.table, parent.num_computed)
            child.num_computed = parent.num_computed
            for sequence in (parent, child):
                sequence.tokens.append(1)
            self.alive.append(child)
        return child

    @rule(sequence=consumes(sequences))
    def free(self, sequence: Simulated) -> None:
        if sequence in self.alive:
            self.cache.free(sequence.table)
            self.alive.remove(sequence)

    def check_contents(self, sequence: Simulated) -> None:
        for position, token in enumerate(sequence.tokens[: sequence.num_computed]):
            held = self.contents[sequence.pages[position // PAGE_SIZE]][position % PAGE_SIZE]
            assert held == (position, token)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence in self.alive:
            self.check_contents(sequence)

    @invariant()
    def pages_balance(self) -> None:
        listed = [page for sequence in self.alive for page in sequence.pages]
        for page in range(NUM_PAGES):
            assert self.cache.pool.holders[page] == listed.count(page)
        assert self.cache.num_used == len(set(listed))
        assert self.cache.num_used + self.cache.pool.num_free == NUM_PAGES
        for sequence in self.alive:
            assert len(set(sequence.pages)) == len(sequence.pages)


CacheMachine.TestCase.settings = settings(
    max_examples=trials(150, 5000), stateful_step_count=40, deadline=None, derandomize=True
)
TestCacheMachine = CacheMachine.TestCase


def computed(cache: KVCache, tokens: list[int], salt: str = "") -> BlockTable:
    table = BlockTable(64, salt)
    assert cache.admit(table, tokens) is not None
    cache.publish(table, tokens, len(tokens))
    return table


def test_a_prefix_is_found_again_but_never_all_of_it() -> None:
    cache = KVCache(16)
    tokens = list(range(32))
    first = computed(cache, tokens)
    again = BlockTable(64)
    assert cache.admit(again, tokens) == 16  # the page that holds the last token is computed again for its logits
    longer = BlockTable(64)
    assert cache.admit(longer, [*tokens, 99]) == 32
    assert longer.ids[:2].tolist() == first.ids[:2].tolist()
    assert cache.admit(BlockTable(64), [5, *tokens[1:], 99]) == 0
    assert cache.admit(BlockTable(64, "other tenant"), [*tokens, 99]) == 0


def test_freed_pages_keep_their_prefix_until_taken_and_tails_go_first() -> None:
    cache = KVCache(4)
    tokens = list(range(48))
    table = computed(cache, tokens)
    cache.free(table)
    assert cache.num_used == 0
    other = BlockTable(8)
    assert cache.admit(other, [1000] * 17) == 0  # takes the unpublished page and the last published one
    cache.free(other)
    assert cache.admit(BlockTable(8), [*tokens, 99]) == 32


def test_pages_found_free_are_not_counted_as_free_for_the_rest() -> None:
    cache = KVCache(3)
    tokens = list(range(32))
    cache.free(computed(cache, tokens))
    computed(cache, [99])  # takes the page that was not published
    assert cache.pool.num_free == 2
    assert cache.admit(BlockTable(8), [*tokens, *range(17)]) is None
    assert cache.admit(BlockTable(8), [*tokens[:16], 5]) == 16


def test_the_longest_free_page_is_reused_first() -> None:
    cache = KVCache(4)
    for number in range(4):
        cache.free(computed(cache, [number] * 15))  # a page each, unpublished
    old, new = [1] * 16, [2] * 16
    for tokens in (old, new):
        cache.free(computed(cache, [*tokens, 3]))
    taken = BlockTable(8)
    assert cache.admit(taken, [9] * 40) == 0  # three of four pages: both unpublished ones and the older published one
    cache.free(taken)
    assert cache.admit(BlockTable(8), [*new, 3]) == 16
    assert cache.pool.find(BlockTable(8).digest(0, old)) is None


def test_a_page_that_is_taken_again_counts_another_use() -> None:
    """By that a draft, which keeps its own at the same page ids, knows that what it left there is gone."""
    cache = KVCache(16)
    tokens = list(range(50))
    table = computed(cache, tokens)
    full = table.ids[:3].tolist()
    uses = [cache.pool.num_uses[page] for page in full]
    cache.free(table)
    again = BlockTable(64)
    assert cache.admit(again, tokens) == 48
    assert again.ids[:3].tolist() == full and [cache.pool.num_uses[page] for page in full] == uses
    cache.free(again)
    assert (table.num_returns, again.num_returns) == (1, 1)
    for _ in range(16):
        cache.pool.take()
    assert [cache.pool.num_uses[page] for page in full] == [use + 1 for use in uses]


def test_forgotten_prefixes_are_not_found() -> None:
    cache = KVCache(16)
    tokens = list(range(50))
    cache.free(computed(cache, tokens))
    cache.forget_prefixes()
    assert cache.admit(BlockTable(64), tokens) == 0


def test_sharing_can_be_switched_off() -> None:
    cache = KVCache(16, share_prefixes=False)
    tokens = list(range(40))
    computed(cache, tokens)
    assert cache.admit(BlockTable(64), tokens) == 0
    assert cache.num_queried_tokens == 0


def test_releasing_too_often_is_an_error() -> None:
    pool = PagePool(2)
    page = pool.take()
    pool.release(page)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(page)
