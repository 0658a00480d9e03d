"""Which prompts and answers are worth training on. A check gives the reason to drop a text, in the report's words.

What small models do wrong when they write both sides (measured on SmolLM2-135M at temperatures of 0.8 to 1.2): they
answer or greet in the user's place, repeat the system prompt, go on with the next role, ask about a text that they do
not show, ask the same thing in other words, and repeat themselves until their tokens are spent.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

UNFINISHED, TOO_SHORT, TOO_LONG = "did not end in time", "too short", "leaves no room for an answer"
ROLE_LEAK, OUT_OF_ROLE = "goes on in another role", "speaks as the assistant"
ECHO, LOOP, DUPLICATE = "repeats what it was given", "repeats itself", "duplicate"
OPEN_END, NOTHING_THERE = "announces what does not follow", "refers to what is not there"

WORD = re.compile(r"\w+")
NEXT_ROLE = re.compile(
    r"^\W{0,4}(system|user|human|assistant|ai|bot|question|answer|q|a)\W{0,4}(:|$)|<\|\w+\|>|\[/?INST\]",
    re.IGNORECASE | re.MULTILINE,
)
"""A line that names who speaks next, or a template's mark spelled out."""
ASSISTANT = re.compile(
    r"\b(as an ai\b|i['’]?m an ai\b|i am an ai\b|i['’]?m here to (help|assist|provide|support)|"
    r"(how|what) (can|may|could) i (help|assist|do for) you|i['’]?d be (happy|glad|delighted) to|i can help you\b|"
    r"you['’]?re welcome|feel free to (ask|reach)|thank you for (reaching|contacting|your (question|inquiry|message)))|"
    r"^\W*(sure|certainly|of course|absolutely|great question|here (is|are|['’]s))\b[\s,!:]",
    re.IGNORECASE,
)
"""What a user does not say."""
ABSENT = re.compile(
    r"\b(the|this|these|my|following) (following|given|provided|attached|above|mentioned|below)\b|"
    r"\b(this|these) (\w+ )?(problems?|questions?|texts?|passages?|articles?|paragraphs?|sentences?|dataset|data|"
    r"images?|pictures?|documents?|emails?|tables?|code|functions?|equations?)\b",
    re.IGNORECASE,
)
"""What a prompt of one line asks about without showing it."""
DOUBLED = re.compile(r"\b(\w{3,}) \1\b", re.IGNORECASE)
ECHOED_WORDS, PHRASE_WORDS, LOOPING_WORDS = 7, 4, 12
MOST_REPEATED, REPEATED_LINES = 0.3, 3
BANDS, ROWS = 32, 3


def words_of(text: str) -> list[str]:
    """Its words in small letters, without what stands between them."""
    return WORD.findall(text.lower())


def fault_of_prompt(text: str, opening: str, min_words: int) -> str | None:
    """Why not to ask what a model wrote in the user's place behind `opening`; None where nothing speaks against it."""
    if len(words_of(text)) < min_words:
        return TOO_SHORT
    if NEXT_ROLE.search(text):
        return ROLE_LEAK
    if _shares_a_phrase(text, opening):
        return ECHO
    if ASSISTANT.search(text):
        return OUT_OF_ROLE
    if text.rstrip().endswith((":", ",")):
        return OPEN_END
    if ABSENT.search(text) and "\n" not in text.strip() and '"' not in text:
        return NOTHING_THERE
    return LOOP if loops(text) or DOUBLED.search(text) else None


def fault_of_answer(text: str, prompt: str, min_words: int) -> str | None:
    """Why not to learn this answer; None where nothing speaks against it."""
    if len(words_of(text)) < min_words:
        return TOO_SHORT
    if NEXT_ROLE.search(text):
        return ROLE_LEAK
    if words_of(text)[: max(len(words_of(prompt)), 1)] == words_of(prompt):
        return ECHO
    if text.rstrip().endswith(":"):
        return OPEN_END
    return LOOP if loops(text) else None


def loops(text: str) -> bool:
    """Whether it says the same again and again: lines, or phrases of a few words."""
    lines = [line.strip() for line in text.splitlines() if len(words_of(line)) > 1]
    if any(lines.count(line) >= REPEATED_LINES for line in set(lines)):
        return True
    words = words_of(text)
    phrases = _phrases(words, PHRASE_WORDS)
    return len(words) >= LOOPING_WORDS and len(set(phrases)) < (1 - MOST_REPEATED) * len(phrases)


def _phrases(words: Sequence[str], length: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]


def _shares_a_phrase(text: str, other: str) -> bool:
    mine, theirs = (set(_phrases(words_of(one), ECHOED_WORDS)) for one in (text, other))
    return not mine.isdisjoint(theirs)


class NearDuplicates:
    """Texts that were seen; how similar two are is the Jaccard index of their pairs of neighbouring words.

    Candidates are found by MinHash in bands (Broder 1997; Leskovec et al., Mining of Massive Datasets, ch. 3): texts of
    similarity s share a band with a chance of 1 - (1 - s^3)^32, which is 0.98 at 0.5. Then the index itself decides.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._pairs: list[frozenset[int]] = []
        self._texts: set[str] = set()
        self._bands: dict[tuple[int, bytes], list[int]] = {}

    def add(self, text: str) -> bool:
        """Whether the text is new, which it is no more from now on."""
        normal = " ".join(words_of(text)) or text.strip()
        if normal in self._texts:
            return False
        pairs = frozenset(_hash(" ".join(pair)) for pair in _phrases(normal.split(), 2) or [(normal,)])
        bands = self._bands_of(pairs)
        similar = {number for band in bands for number in self._bands.get(band, ())}
        if any(self._similarity(pairs, self._pairs[number]) >= self.threshold for number in similar):
            return False
        for band in bands:
            self._bands.setdefault(band, []).append(len(self._pairs))
        self._pairs.append(pairs)
        self._texts.add(normal)
        return True

    @staticmethod
    def _similarity(one: frozenset[int], other: frozenset[int]) -> float:
        return len(one & other) / len(one | other)

    def _bands_of(self, pairs: frozenset[int]) -> list[tuple[int, bytes]]:
        factors, terms = self._permutations
        hashed = factors[:, None] * np.array(sorted(pairs), dtype=np.uint64) + terms[:, None]
        least = hashed.min(1).reshape(BANDS, ROWS)
        return [(band, row.tobytes()) for band, row in enumerate(least)]

    @cached_property
    def _permutations(self) -> np.ndarray:
        drawn = np.random.default_rng(0).integers(0, 2**63, (2, BANDS * ROWS), dtype=np.uint64)
        return drawn | np.array([[1], [0]], dtype=np.uint64)  # an odd factor maps no two numbers to one


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
