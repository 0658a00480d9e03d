"""JSON from strangers: everything that two parsers could read differently is refused.

The standard library's parser takes duplicate keys (last one wins), NaN, Infinity, numbers too large for a float,
integers of any length and lone surrogates. On none of them do all readers agree, and each has broken a server.
"""

import json
import math
from collections import Counter
from typing import Any, NoReturn

from serve.http.errors import invalid

MAX_DEPTH = 32
MAX_INTEGER = 2**63 - 1


def loads(body: bytes) -> Any:
    """The value in `body` (UTF-8), or ApiError 400 saying what is wrong with it."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise invalid("the body is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise invalid(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # Python reads no more than 4300 digits
        raise invalid("an integer in the body is too large") from None
    except RecursionError:
        raise invalid(f"the body nests deeper than {MAX_DEPTH} levels") from None
    _check(value)
    return value


def loads_object(body: bytes) -> dict[str, Any]:
    """Like `loads`, for a body that must be an object."""
    value = loads(body)
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = shown(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
        raise invalid(f"the key {twice} appears twice in one object", twice)
    return result


def _no_constant(name: str) -> NoReturn:
    raise invalid(f"{name} is not a JSON number")


def _check(value: Any) -> None:
    """Depth, size of numbers and encodable text, level by level (no recursion, so no depth can hurt)."""
    level, depth = [value], 0
    while level:
        depth += 1
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, int):
                if not -MAX_INTEGER - 1 <= item <= MAX_INTEGER:
                    raise invalid("an integer in the body is too large")
            elif isinstance(item, str):
                _check_text(item)
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise invalid("a number in the body is too large")
            elif isinstance(item, list | dict):
                if depth > MAX_DEPTH:
                    raise invalid(f"the body nests deeper than {MAX_DEPTH} levels")
                deeper.extend(item)  # of an object: its keys
                if isinstance(item, dict):
                    deeper.extend(item.values())
        level = deeper


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("a string in the body holds half a surrogate pair, which is no character") from None


def shown(name: str) -> str:
    """A name from the request, fit to be repeated in a message: short and printable."""
    return "".join(character for character in name[:64] if character.isprintable())
