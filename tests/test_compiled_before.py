"""Machine code is compiled again when code changes, and only then."""

from pathlib import Path
from typing import Any

import pytest

from tests import compiled_before

BEFORE = '"""Words."""\n\n\ndef double(x):\n    """More."""\n    return 2 * x\n'
SAME = '"""Other words."""\n\n# and a comment\ndef double(x):\n    return (\n        2 * x\n    )\n'


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with one kernel in each of two families, and a record."""
    for file in ("kernels/attention/flash.py", "kernels/linear/lora.py", "kernels/linear/_cpu.py", "tests/test_it.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(BEFORE)
    (tmp_path / "tests/native_compile.py").write_text(BEFORE)
    monkeypatch.setattr(compiled_before, "ROOT", tmp_path)
    monkeypatch.setattr(compiled_before, "RECORD", tmp_path / "record.json")
    return tmp_path


def item_of(house: Path) -> Any:
    class Item:
        nodeid, path = "tests/test_it.py::test_it", house / "tests/test_it.py"

        def iter_markers(self, name: str) -> list[pytest.Mark]:
            return [pytest.mark.machine_code("linear").mark]

    return Item()


@pytest.mark.parametrize(
    ("file", "text", "still_passed"),
    [
        ("kernels/linear/lora.py", SAME, True),
        ("kernels/linear/lora.py", BEFORE.replace("2", "3"), False),
        ("kernels/linear/new.py", BEFORE, False),
        ("kernels/linear/_cpu.py", BEFORE.replace("2", "3"), True),
        ("kernels/attention/flash.py", BEFORE.replace("2", "3"), True),
        ("tests/native_compile.py", BEFORE.replace("2", "3"), False),
        ("tests/test_it.py", BEFORE.replace("2", "3"), False),
    ],
)
def test_only_code_that_it_is_made_from_counts(house: Path, file: str, text: str, still_passed: bool) -> None:
    item = item_of(house)
    assert not compiled_before.passed_before(item)
    compiled_before.write_passed(item)
    assert compiled_before.passed_before(item)
    (house / file).write_text(text)
    compiled_before._code.cache_clear()
    assert compiled_before.passed_before(item) == still_passed
