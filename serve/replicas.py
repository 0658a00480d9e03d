"""Which replica a request goes to, and how many there should be: arithmetic, for a cluster and for its simulation.

A request's prompt is a list of blocks: numbers of which equal ones stand for equal text from the prompt's start up to
there, as hashes of KV pages do. A replica that was sent them before has most of their pages still.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

BLOCK_BYTES = 256
"""Of text in a block: some four KV pages."""
MAX_BLOCKS = 65_536
"""What is remembered of a replica: 16 MiB of text. What was sent longest ago is forgotten first."""
IMBALANCE = 1.5
SLACK = 4
"""A replica with more requests than IMBALANCE × the mean + SLACK gets no further ones, whatever it has cached."""
TARGET_USE = 0.7
"""How full the replicas should be together."""
UPSCALE_S, DOWNSCALE_S = 10.0, 300.0
"""How long more or fewer replicas must have been wanted: many start late, and what one has cached goes with it."""
LOOK_BACK_S = 20.0
"""Of how long a time the mean load counts."""


def text_blocks(text: bytes, start: Hashable = None) -> list[int]:
    """The blocks of a text, behind one for `start` if it has one; a last one that is not full is none."""
    blocks, last = [] if start is None else [hash(start)], hash(start)
    for end in range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES):
        last = hash((last, text[end - BLOCK_BYTES : end]))
        blocks.append(last)
    return blocks


class PrefixRouter:
    """Sends requests where most of their prompt is cached, unless that replica is too busy.

    It counts on what it has sent itself, and asks no replica. A conversation's next request begins with the last one,
    so that it goes where that went. A prompt of which nobody has half goes to the replica with the fewest requests, of
    equal ones to that which was sent none for longest: a common beginning gathers not all conversations in one place.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        """`max_blocks`: how many blocks a replica's cache is taken to hold."""
        self._max_blocks = max_blocks
        self._sent: dict[str, OrderedDict[Hashable, None]] = {}
        """What each replica was sent, the latest last, and of one prompt the first block last: what is remembered of
        a prompt is always its beginning. The replica that was sent something last comes last."""

    def rank(self, blocks: Sequence[int], loads: Mapping[str, float], session: str | None = None) -> list[str]:
        """All replicas, the best first. `loads`: how many requests each has. `session` goes before all blocks."""
        most = IMBALANCE * sum(loads.values()) / max(len(loads), 1) + SLACK
        turns = {name: turn for turn, name in enumerate(self._sent)}

        def reluctance(name: str) -> tuple[bool, bool, int, float, int]:
            sent: Mapping[Hashable, None] = self._sent.get(name, {})
            has_session = session is not None and _session_key(session) in sent
            matched = matching(blocks, sent)
            saved = matched if 2 * matched >= len(blocks) else 0
            return loads[name] > most, not has_session, -saved, loads[name], turns.get(name, -1)

        return sorted(loads, key=reluctance)

    def sent(self, name: str, blocks: Sequence[int], session: str | None = None) -> None:
        """A replica was sent this."""
        sent = self._sent[name] = self._sent.pop(name, OrderedDict())
        for key in [*reversed(blocks), *([] if session is None else [_session_key(session)])]:
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._max_blocks:
            sent.popitem(last=False)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all other replicas: they are gone, and their caches with them."""
        kept = set(names)
        self._sent = {name: sent for name, sent in self._sent.items() if name in kept}


def matching(blocks: Sequence[int], sent: Mapping[Hashable, None]) -> int:
    """How many of a prompt's first blocks are among these. They hold no block without the one before it."""
    return bisect_left(blocks, True, key=lambda block: block not in sent)


def _session_key(session: str) -> Hashable:
    return "session", session


@dataclass(frozen=True)
class ReplicaLoad:
    """How busy one replica is."""

    num_running: float
    """Choices in the batch."""
    num_waiting: float
    """Choices waiting for a place in it."""
    kv_cache_usage: float
    """Fraction of KV pages in use."""

    def use(self, max_num_seqs: int) -> float:
        """Of one replica; more than 1 where requests wait. Short prompts fill the batch first, long ones the pages."""
        return max(self.num_running / max_num_seqs, self.kv_cache_usage) + self.num_waiting / max_num_seqs


def wanted_replicas(loads: Iterable[ReplicaLoad], max_num_seqs: int) -> int:
    """How many replicas would be TARGET_USE full with what these have to do; at least 1."""
    total = sum(load.use(max_num_seqs) for load in loads)
    return max(1, math.ceil(total / TARGET_USE - 1e-9))
