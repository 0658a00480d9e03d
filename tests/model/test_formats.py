"""Weight formats: each is named by its own file and the list alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from model.formats.registry import FORMATS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", FORMATS)
def test_only_its_file_and_the_list_name_a_format(name: str) -> None:
    """Above the kernels, which multiply with it."""
    own = {"model/formats/registry.py", FORMATS[name].partition(":")[0].replace(".", "/") + ".py"}
    folders = ("model", "compress", "train", "serve", "pipeline")
    sources = {
        str(path.relative_to(ROOT)): path.read_text() for room in folders for path in (ROOT / room).rglob("*.py")
    }
    # int8 alone is also a dtype of torch, and 8 bits may be those of an optimizer or of pages.
    naming = re.compile(rf"(?<![\w.]){name}(?!\w)|{name}(?:Weight|Linear|Format)", re.IGNORECASE)
    assert {path for path, text in sources.items() if naming.search(text)} <= own


def test_the_list_alone_needs_no_torch() -> None:
    code = "import sys, model.formats.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
