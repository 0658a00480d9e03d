"""Pairs of answers for configs/dpo.yaml, from Python's own documentation strings: one sentence, or all of the text.

    python -m bench.preference_pairs runs/pairs.jsonl        # in seconds, no download

A row holds a question about a function of the standard library, its docstring's first sentence as the chosen answer,
and the beginning of the whole docstring as the rejected one.
"""

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

Pair = dict[str, str]

ASKED = (
    "What does Python's {} do?",
    "Explain {} of Python's standard library.",
    "I found a call of {} in a Python program. What is it for?",
    "When would I use {} in Python?",
)
PAIRS = 400
SENTENCE, WHOLE = range(30, 160), range(200, 2_000)
"""Characters of a first sentence, and of a docstring."""
REJECTED = 480
"""Characters of a rejected answer, up to the end of its last word."""


def documented() -> Iterator[tuple[str, str]]:
    """Names of public functions of the standard library with their docstrings, from its source alone."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        if any(part.startswith(("_", "test", "idlelib", "lib2to3")) or "-" in part for part in module.split(".")):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{module}.{node.name}", ast.get_docstring(node) or ""


def pair_of(name: str, text: str, question: str) -> Pair | None:
    """None where the docstring does not begin with one whole sentence and go on."""
    first, _, rest = text.partition("\n\n")
    first = " ".join(first.split())
    if not first.endswith(".") or ". " in first or len(first) not in SENTENCE or len(text) not in WHOLE or not rest:
        return None
    whole = " ".join(text.split())
    rejected = whole if len(whole) <= REJECTED else whole[:REJECTED].rpartition(" ")[0]
    return {"prompt": question.format(name), "chosen": first, "rejected": rejected}


def pairs(count: int = PAIRS) -> list[Pair]:
    """At most so many, the same ones on every machine with this Python."""
    draw = random.Random(0)
    found = [pair for name, text in documented() if (pair := pair_of(name, text, draw.choice(ASKED)))]
    draw.shuffle(found)
    return found[:count]


def main() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pairs()
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} pairs are in {path}")


if __name__ == "__main__":
    main()
