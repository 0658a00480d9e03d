"""Machine code that has been checked is not compiled again before its source changes, for that takes ten minutes.

A test with `@pytest.mark.machine_code("attention")` depends on the Python code of that folder of kernels, on what all
kernels share, on how it is compiled and read, and on itself. The test is left out while `compiled_before.json` has the
hash of them all with which it last passed; comments, docstrings and layout are not code. `make machine-code` compiles
everything and writes that file. Where it is out of date, or with `--all-trials`, tests compile as if it were not there.
"""

import ast
import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_suffix(".json")
SHARED = ("kernels", "kernels/common", "bench/machine_code")
"""Folders whose own files enter every test; those of families are named by the test."""


def passed_before(item: pytest.Item) -> bool:
    """Whether this test passed with the code of today."""
    return _record().get(item.nodeid) == code_of(item)


def code_of(item: pytest.Item) -> str:
    """A hash of all that the machine code and the test of it are made from."""
    families = [f"kernels/{family}" for mark in item.iter_markers("machine_code") for family in mark.args]
    folders = [ROOT / folder for folder in (*SHARED, *families)]
    files = [ROOT / "tests/native_compile.py", item.path]
    files += [path for folder in folders for path in folder.glob("*.py") if not path.stem.endswith("_cpu")]
    digest = hashlib.sha256(version("triton").encode())
    for file in sorted(set(files)):
        digest.update(f"{file.relative_to(ROOT)}\n{_code(file)}\n".encode())
    return digest.hexdigest()[:16]


def write_passed(item: pytest.Item) -> None:
    """Record a test that has just passed."""
    record = _record() | {item.nodeid: code_of(item)}
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")


def _record() -> dict[str, str]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


@cache
def _code(file: Path) -> str:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [statement for statement in node.body if not _is_words(statement)]
    return ast.dump(tree)


def _is_words(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
