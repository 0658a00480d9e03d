"""Who holds which page of the KV cache: reference counts, block tables, prefix sharing. Host bookkeeping, no tensors.

A page holds the keys and values of PAGE_SIZE consecutive tokens of a sequence in every layer of the target. A draft
may keep its own at the same page id in tensors of its own: one allocator, one block table and one admission rule serve
both, because both see the same tokens at the same positions. Which pages it has filled is the draft's to know: a page
holds what it held as long as `PagePool.num_uses` of it stays.

A page is *held* while at least one block table lists it, else *free*: held + free = total, always. A full page whose
tokens are all committed is *published* under a hash of everything up to its end; it keeps its contents when freed, and
a later sequence that begins alike takes it back. Free pages are reused in the order they became free, those without
a hash first. Source of the hash chain and the eviction order: vLLM, v1/core/{block_pool,kv_cache_utils}.py.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

PAGE_SIZE = 16
WORTH_WAITING = 16
"""So many pages that are being computed for another sequence cost more than a step of waiting for them."""


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_SIZE)


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """SHA-256 of a page's tokens and of everything before them: equal digests mean equal keys and values."""
    return hashlib.sha256(parent + np.asarray(tokens, dtype=np.int32).tobytes()).digest()


class BlockTable:
    """The pages of one sequence, in order; `ids[:num_pages]` are page ids."""

    __slots__ = (
        *("__weakref__", "_listed", "digests", "ids", "num_pages", "num_published", "num_returns", "num_uploaded"),
        *("num_writable", "root"),
    )

    def __init__(self, max_pages: int, salt: str = "") -> None:
        """`salt`: sequences share pages only with sequences of the same salt."""
        self.ids = np.zeros(max_pages, dtype=np.int32)
        self.num_pages = 0
        self.num_published = 0
        """Leading pages that have been offered for sharing."""
        self.num_writable = 0
        """Tokens up to which its slots, from the last computed one on, are known to be its own."""
        self.num_returns = 0
        """How often it has given back all pages: what somebody knew of them then, is no longer true of this table."""
        self.num_uploaded = 0
        """Leading pages that are listed where the device reads them, too."""
        self._listed: dict[Hashable, int] = {}
        """By owner of lists of visible slots, how many leading tokens of the sequence its own has been made for."""
        self.root = hashlib.sha256(salt.encode()).digest()
        self.digests: list[bytes] = []
        """Digests of the leading full pages, as many as were needed so far."""

    def slot(self, position: int) -> int:
        """Of the token there, among all slots of the pages."""
        return int(self.ids[position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE

    def digest(self, page: int, tokens: Sequence[int]) -> bytes:
        """The digest of full page number `page` of a sequence that begins with `tokens`."""
        for number in range(len(self.digests), page + 1):
            parent = self.digests[-1] if self.digests else self.root
            self.digests.append(chain_digest(parent, tokens[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]))
        return self.digests[page]

    def list_tokens(self, owner: Hashable, start: int, stop: int) -> int:
        """The first token that a pass over [start, stop), which lists those and all before, must list for `owner`."""
        first = min(self._listed.get(owner, 0), start)
        self._listed[owner] = stop
        return first

    def changes_from(self, page: int) -> None:
        """From this one on, what the device knows of the pages is not true any more."""
        self.num_uploaded = min(self.num_uploaded, page)
        self._listed = {owner: min(number, page * PAGE_SIZE) for owner, number in self._listed.items()}


class Branch(NamedTuple):
    """Pages for another way on from a sequence's tokens, while one step lasts."""

    table: BlockTable
    """Lists pages of the sequence, which it does not hold, and behind them its own."""
    first: int
    """Number of the first one of its own."""


class PagePool:
    """All pages: how many tables hold each, which are free, which digest names which."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.holders = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_of_digest: dict[bytes, int] = {}
        self._digest_of_page: dict[int, bytes] = {}
        self.num_uses = [0] * num_pages
        """How often each page has been taken: with that, what it held before is lost."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Hold the free page that was free longest; what it was published as is forgotten."""
        page, _ = self._free.popitem(last=False)
        digest = self._digest_of_page.pop(page, None)
        if digest is not None:
            del self._page_of_digest[digest]
        self.holders[page] = 1
        self.num_uses[page] += 1
        return page

    def hold(self, page: int) -> None:
        """One more table lists `page`, which may be free and published."""
        if self.holders[page] == 0:
            del self._free[page]
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """One table less lists `page`."""
        if self.holders[page] == 0:
            raise RuntimeError(f"page {page} was released more often than it was held")
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self._free[page] = None
            if page not in self._digest_of_page:
                self._free.move_to_end(page, last=False)

    def publish(self, page: int, digest: bytes) -> None:
        """Let others find `page`; the first page published under a digest stays."""
        if digest not in self._page_of_digest and page not in self._digest_of_page:
            self._page_of_digest[digest] = page
            self._digest_of_page[page] = digest

    def unpublish_all(self) -> None:
        """Forget what every page was published as."""
        self._page_of_digest.clear()
        self._digest_of_page.clear()

    def find(self, digest: bytes) -> int | None:
        return self._page_of_digest.get(digest)

    def is_free(self, page: int) -> bool:
        return self.holders[page] == 0


class KVCache:
    """Gives pages to block tables and takes them back."""

    def __init__(self, num_pages: int, *, share_prefixes: bool = True) -> None:
        self.pool = PagePool(num_pages)
        self.share_prefixes = share_prefixes
        self._branches: list[Branch] = []
        """Of this step."""
        self._promised: dict[bytes, BlockTable] = {}
        """By digest, the table of the sequence that will publish such a page, once it has computed it."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_used(self) -> int:
        return self.pool.num_pages - self.pool.num_free

    def is_being_computed(self, table: BlockTable, tokens: Sequence[int]) -> bool:
        """Whether some sequence is about to publish many more leading pages of these tokens than can be found now."""
        if not self.share_prefixes:
            return False
        last = len(self._find_prefix(table, tokens)) + WORTH_WAITING - 1
        if last >= (len(tokens) - 1) // PAGE_SIZE:
            return False
        owner = self._promised.get(table.digest(last, tokens))
        return owner is not None and owner.num_published <= last < owner.num_pages

    def admit(
        self, table: BlockTable, tokens: Sequence[int], *, headroom: int = 0, may_share: bool = True
    ) -> int | None:
        """Give an empty table pages for all `tokens` and the next one, found in the cache as far as possible.

        Never all tokens are found: the last one must be computed for its logits. `headroom` free pages must remain.
        Returns the number of tokens found, or None, with nothing changed, when the free pages do not suffice.
        """
        may_share &= self.share_prefixes
        hits = self._find_prefix(table, tokens) if may_share else []
        num_new = pages_for(len(tokens) + 1) - len(hits)
        num_revived = sum(map(self.pool.is_free, hits))
        if num_new + num_revived + headroom > self.pool.num_free:
            return None
        for page in hits:
            self.pool.hold(page)
            self._append(table, page)
        table.num_published = len(hits)
        for _ in range(num_new):
            self._append(table, self.pool.take())
        if may_share:
            self.num_queried_tokens += len(tokens)
            self.num_hit_tokens += len(hits) * PAGE_SIZE
            for number in range(len(hits), len(tokens) // PAGE_SIZE):
                self._promised[table.digest(number, tokens)] = table
        return len(hits) * PAGE_SIZE

    def reserve(self, table: BlockTable, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        """Make slots [start, stop) of a sequence writable, by new pages and by copies of shared ones.

        Returns the (source, destination) pages to copy before writing, or None, with nothing changed, when the free
        pages do not suffice. Pages before `start`, which never goes back, may stay shared.
        """
        if stop <= table.num_writable:
            return ()
        shared = [n for n in range(start // PAGE_SIZE, table.num_pages) if self.pool.holders[table.ids[n]] > 1]
        num_new = max(0, pages_for(stop) - table.num_pages)
        if num_new + len(shared) > self.pool.num_free:
            return None
        copies = []
        for number in shared:
            source, copy = int(table.ids[number]), self.pool.take()
            self.pool.release(source)
            table.ids[number] = copy
            table.changes_from(number)
            copies.append((source, copy))
        for _ in range(num_new):
            self._append(table, self.pool.take())
        table.num_writable = table.num_pages * PAGE_SIZE
        return tuple(copies)

    def fork(self, parent: BlockTable, child: BlockTable, num_tokens: int) -> None:
        """Let an empty `child` share the parent's first `num_tokens` tokens; whoever writes a shared page copies it."""
        for page in parent.ids[: pages_for(num_tokens)].tolist():
            self.pool.hold(page)
            self._append(child, page)
        parent.num_writable = child.num_writable = 0
        child.num_published = parent.num_published
        child.digests = list(parent.digests)

    def branch(self, table: BlockTable, start: int, stop: int) -> tuple[Branch, tuple[tuple[int, int], ...]] | None:
        """Slots [start, stop) once more, beside those of the sequence; dropped at the end of the step unless adopted.

        Returns the (source, destination) pages to copy before writing, too; None, with nothing changed, when the free
        pages do not suffice.
        """
        first = start // PAGE_SIZE
        if pages_for(stop) - first > self.pool.num_free:
            return None
        branch = Branch(BlockTable(len(table.ids)), first)
        branch.table.ids[:first], branch.table.num_pages = table.ids[:first], first
        while branch.table.num_pages < pages_for(stop):
            self._append(branch.table, self.pool.take())
        self._branches.append(branch)
        copies = ((int(table.ids[first]), int(branch.table.ids[first])),) if start % PAGE_SIZE else ()
        return branch, copies

    def adopt(self, table: BlockTable, branch: Branch) -> None:
        """Let a sequence go on that way: the pages that it had there instead are given back."""
        self._cut(table, branch.first)
        for page in branch.table.ids[branch.first : branch.table.num_pages].tolist():
            self._append(table, page)
        table.num_writable = table.num_pages * PAGE_SIZE
        branch.table.num_pages = branch.first

    def drop_branches(self) -> None:
        """Give back the pages of all that were not adopted; a step ends."""
        for branch in self._branches:
            self._cut(branch.table, branch.first)
        self._branches.clear()

    def publish(self, table: BlockTable, tokens: Sequence[int], num_committed: int) -> None:
        """Offer the full pages among the first `num_committed` tokens, all computed and final, for sharing."""
        if not self.share_prefixes:
            return
        for number in range(table.num_published, num_committed // PAGE_SIZE):
            digest = table.digest(number, tokens)
            self.pool.publish(int(table.ids[number]), digest)
            self._promised.pop(digest, None)
            table.num_published = number + 1

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Give back the pages past `num_tokens` tokens: the roll-back of rejected drafts."""
        self._cut(table, pages_for(num_tokens))

    def free(self, table: BlockTable) -> None:
        """Give back all pages, the last first, so that the beginning of a sequence stays findable longest."""
        self._cut(table, 0)
        for digest in table.digests[table.num_published :]:
            if self._promised.get(digest) is table:
                del self._promised[digest]
        table.num_published = 0
        table.num_returns += 1

    def forget_prefixes(self) -> None:
        """Let nobody find the pages of before: what they hold is no longer what their tokens would give."""
        self.pool.unpublish_all()

    def _find_prefix(self, table: BlockTable, tokens: Sequence[int]) -> list[int]:
        pages: list[int] = []
        for number in range((len(tokens) - 1) // PAGE_SIZE):
            page = self.pool.find(table.digest(number, tokens))
            if page is None:
                break
            pages.append(page)
        return pages

    def _append(self, table: BlockTable, page: int) -> None:
        table.ids[table.num_pages] = page
        table.num_pages += 1

    def _cut(self, table: BlockTable, num_pages: int) -> None:
        if table.num_pages <= num_pages:
            return
        while table.num_pages > num_pages:
            table.num_pages -= 1
            self.pool.release(int(table.ids[table.num_pages]))
        table.num_writable = min(table.num_writable, num_pages * PAGE_SIZE)
        table.changes_from(num_pages)
