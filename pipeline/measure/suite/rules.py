"""Rules that a program can check of an answer: whether it is one, and whether it does as it was told."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MIN_WORDS_TO_LOOP, MIN_DISTINCT = 12, 0.5
"""A text of that many words loops when fewer than half of its runs of three words are distinct."""
MIN_FUNCTION_WORDS, MIN_LETTERS = 0.2, 0.8
"""Of the words of English prose, and of its characters. English prose has about 0.4 and 0.95 of them, code less."""
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_ITEM = re.compile(r"\s*(?:[-*•]|\d+[.)])\s+\S")
_REPEATED_CHARACTER = re.compile(r"(\w)\1{9}")
_REPEATED_WORDS = re.compile(r"(.{2,80}?)\1{3}")


def words(text: str) -> list[str]:
    """In lower case, without what stands between them."""
    return _WORD.findall(text.lower())


FUNCTION_WORDS = frozenset(
    words(
        "a about an and are as at be but by can do for from has have he how i if in is it its me my no not of on or "
        "she so that the their there they this to was we what when which who will with you your"
    )
)


def is_text(text: str) -> bool:
    """Whether there are words in it, and they do not loop."""
    return bool(words(text)) and not loops(text)


def loops(text: str) -> bool:
    """Whether one character, or a run of characters or words, comes again and again. Only words count."""
    found = words(text)
    spelled = " ".join(found) + " "
    if _REPEATED_CHARACTER.search(spelled) or _REPEATED_WORDS.search(spelled):
        return True
    spoken = [word for word in found if not word.isdecimal()]
    triples = list(zip(spoken, spoken[1:], spoken[2:], strict=False))
    return len(spoken) >= MIN_WORDS_TO_LOOP and len(set(triples)) < MIN_DISTINCT * len(triples)


def is_prose(text: str) -> bool:
    """Whether it is written in English: mostly letters, with the small words that hold sentences together."""
    found = words(text)
    letters = sum(character.isalnum() or character.isspace() for character in text)
    function_words = sum(word in FUNCTION_WORDS for word in found)
    return letters >= MIN_LETTERS * len(text) and function_words >= MIN_FUNCTION_WORDS * len(found) > 0


def is_answer(text: str, mentions: Sequence[str], *, finished: bool) -> bool:
    """Whether it is text, ends by itself or is prose, and has a word that begins with one of `mentions`."""
    return is_text(text) and (finished or is_prose(text)) and any(_has(text, stem, whole=False) for stem in mentions)


def mentions_any(text: str, accepted: Sequence[str]) -> bool:
    """Whether one of these stands in the text as a whole word."""
    return any(_has(text, word) for word in accepted)


def last_number(text: str) -> float | None:
    """The number that an answer ends with, as exercises are marked."""
    found = re.findall(r"(?<!\d)-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None


def follows(text: str, rules: Mapping[str, Any]) -> bool:
    """Whether a text that does not loop keeps all of these rules of RULES."""
    return is_text(text) and all(RULES[name](text.strip(), bound) for name, bound in rules.items())


def _has(text: str, word: str, *, whole: bool = True) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}" + r"(?!\w)" * whole, text, re.IGNORECASE) is not None


def _between(count: int, bounds: Sequence[int]) -> bool:
    low, high = bounds
    return low <= count <= high


def _sentences(text: str) -> int:
    return sum(bool(words(part)) for part in re.split(r"[.!?]+(?=[\s\"'”)*]|$)", text))


def _items(text: str) -> int:
    """Marked lines; where none is marked, all that hold something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(bool(_ITEM.match(line)) for line in lines) or len(lines)


RULES: dict[str, Callable[[str, Any], bool]] = {
    "words": lambda text, bounds: _between(len(words(text)), bounds),
    "sentences": lambda text, bounds: _between(_sentences(text), bounds),
    "items": lambda text, bounds: _between(_items(text), bounds),
    "one_of": lambda text, choices: " ".join(words(text)) in choices,
    "starts_with": lambda text, beginning: text.lower().startswith(beginning),
    "ends_with": lambda text, end: text.rstrip("\"'”").endswith(end),
    "contains": lambda text, parts: all(_has(text, part) for part in parts),
    "avoids": lambda text, parts: not mentions_any(text, parts),
    "spells": lambda text, word: word in text,
    "lower_case": lambda text, wanted: text.islower() is wanted,
    "upper_case": lambda text, wanted: text.isupper() is wanted,
}
"""By the names that the prompts' files use: whether a text keeps the rule with this bound."""
